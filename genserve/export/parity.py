"""Parity: the exported graph against its source, logit by logit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import onnxruntime as ort
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights

from genserve.backends.logits_growing import GrowingLogits
from genserve.backends.logits_torchscript import TorchLogits
from genserve.errors import ExportError
from genserve.export.checkpoint import Checkpoint, FloatArray
from genserve.export.decoder import Dimensions
from genserve.export.form import Form
from genserve.export.graph import MODEL_FILE
from genserve.export.precision import FORMATS
from genserve.export.report import Precision

__all__ = ["CachedGraph", "Parity", "check_parity", "source_logits", "source_model"]

PARITY_FILE = "parity.json"
MAX_TOKENS = 256

# Prose, numbers, code and other scripts: what a tokenizer splits in its different ways.
_TEXT = """\
The lighthouse keeper wrote in his book every evening: the height of the tide, the direction of the wind,
and the names of the ships that had passed. On the 14th of March 1897 he counted 23 of them, which was more
than in any year before. "It cannot last," he said to his daughter, who did not believe him. By the summer of
1903 the harbour had silted up, and the trade had moved 60 miles to the south.

def fibonacci(n: int) -> list[int]:
    numbers = [0, 1]
    while len(numbers) < n:
        numbers.append(numbers[-1] + numbers[-2])
    return numbers[:n]

Water boils at 100 degrees Celsius at sea level; on a mountain of 3000 metres, at about 90. The reason is the
lower pressure of the air. Der Wind dreht nach Norden, und die Fischer bleiben zu Hause. Le phare éclaire la
mer. 海は静かです。 Question: which gas do plants take from the air? Answer: carbon dioxide, from which, with
water and the light of the sun, they make sugar. They give back oxygen, on which all animals depend.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """How far the logits of an exported graph are from those of its source."""

    precision: Precision
    tokens: int                      # compared rows of logits
    largest_logit_difference: float
    top1_agreement: float            # share of the rows


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bound:
    largest_logit_difference: float = float("inf")
    top1_agreement: float = 0.0


_BOUNDS: Mapping[Precision, _Bound] = MappingProxyType(
    {
        # So close, that the first token is the same wherever the first two are 0.002 apart.
        "fp32": _Bound(largest_logit_difference=1e-3),
        "fp16": _Bound(top1_agreement=0.97),
        "int8": _Bound(top1_agreement=0.90),
        "int4": _Bound(top1_agreement=0.50),
    }
)


def check_parity(
    checkpoint: Checkpoint,
    folder: Path,
    *,
    form: Form = Form.ONNX,
    precision: Precision,
    dimensions: Dimensions,
) -> Parity:
    """Compare the graph in `folder` with transformers' own model, and write parity.json there.

    Up to 256 tokens of a fixed text: one prefill, and a decode through the KV cache of two rows at different
    positions.

    Raises:
        ExportError: the graph is further from its source than its precision explains.
    """
    tokenizer = Tokenizer.from_str(checkpoint.tokenizer_files["tokenizer.json"].decode())
    ids = np.array(tokenizer.encode(_TEXT).ids[: min(MAX_TOKENS, dimensions.context_length)])
    source = source_logits(checkpoint, ids)
    graph: _Cached
    match form:
        case Form.ONNX:
            graph = CachedGraph(
                folder, dimensions=dimensions, precision=precision, batch=2, max_len=len(ids)
            )
        case Form.TORCHSCRIPT:
            graph = TorchLogits(folder / form.file_name, num_slots=2, max_length=len(ids))
        case Form.TRACED:
            graph = GrowingLogits(folder / form.file_name, num_slots=2, max_length=len(ids))
    exported, positions = _exported_logits(graph, ids)
    expected = source[positions]
    parity = Parity(
        precision=precision,
        tokens=len(positions),
        largest_logit_difference=float(np.abs(exported - expected).max()),
        top1_agreement=float((exported.argmax(axis=-1) == expected.argmax(axis=-1)).mean()),
    )
    _require_within(_BOUNDS[precision], parity, source=checkpoint.source)
    (folder / PARITY_FILE).write_text(json.dumps(asdict(parity), indent=2) + "\n", encoding="utf-8")
    return parity


def source_model(checkpoint: Checkpoint) -> PreTrainedModel:
    """The model of the checkpoint as transformers builds it, in float32, ready to be called.

    Raises:
        ExportError: the tensors do not have the shapes that the config says.
    """
    config = AutoConfig.for_model(**checkpoint.config)
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    names = checkpoint.tensor_names & model.state_dict().keys()
    weights = {name: torch.from_numpy(checkpoint.tensor(name)) for name in names}
    try:
        missing = model.load_state_dict(weights, strict=False, assign=True).missing_keys
    except RuntimeError as error:
        raise ExportError(
            f"the tensors of {checkpoint.source} have other shapes than its config says: {error}",
            remedy="the checkpoint's files do not belong together; download it again",
        ) from error
    assert set(missing) <= set(model.all_tied_weights_keys), missing
    model.tie_weights()
    source: PreTrainedModel = model.eval()
    return source


def source_logits(checkpoint: Checkpoint, ids: NDArray[np.int64]) -> FloatArray:
    """Logits [tokens, vocab] of `source_model` after each of the token ids [tokens]."""
    with torch.inference_mode():
        logits: FloatArray = source_model(checkpoint)(torch.from_numpy(ids)[None]).logits[0].numpy()
    return logits


def _exported_logits(graph: _Cached, ids: NDArray[np.int64]) -> tuple[FloatArray, NDArray[np.int64]]:
    """Logits [rows, vocab] of the graph, and after how many tokens less one each row stands."""
    num_tokens, half = len(ids), len(ids) // 2
    whole = graph.forward(ids[None], past=[0], rows=range(num_tokens))
    starts = [half, half // 2]
    # Right-padded: what the shorter row has too much in the cache is overwritten before it is seen.
    prompts = np.stack([ids[:half], ids[:half]])
    prompts[1, starts[1] :] = 0
    graph.forward(prompts, past=[0, 0], rows=[])
    decoded, positions = [whole], list(range(num_tokens))
    for step in range(num_tokens - half):
        past = [start + step for start in starts]
        decoded.append(graph.forward(ids[past][:, None], past=past, rows=[0, 1]))
        positions += past
    return np.concatenate(decoded), np.array(positions)


class _Cached(Protocol):
    """An exported graph with a KV cache."""

    def forward(self, input_ids: NDArray[np.int64], *, past: Any, rows: Any) -> FloatArray:
        """See `CachedGraph.forward`."""


class CachedGraph:
    """An exported graph with one KV cache, run the plain way: for checks, not for speed."""

    def __init__(
        self, folder: Path, *, dimensions: Dimensions, precision: Precision, batch: int, max_len: int
    ) -> None:
        options = ort.SessionOptions()
        options.log_severity_level = 3
        self._session = ort.InferenceSession(folder / MODEL_FILE, options, providers=["CPUExecutionProvider"])
        shape = (batch, dimensions.num_kv_heads, max_len, dimensions.head_dim)
        parts = [f"{i}.{part}" for i in range(dimensions.num_layers) for part in ("key", "value")]
        self._caches = {part: np.zeros(shape, FORMATS[precision].activations) for part in parts}

    def forward(self, input_ids: NDArray[np.int64], *, past: Any, rows: Any) -> FloatArray:
        """Run ids [batch, sequence] after `past` tokens of each row, in the first rows of the cache.

        Returns:
            [len(rows), vocab]: logits of those of the batch * sequence hidden rows.
        """
        batch, sequence = input_ids.shape
        seqlens = np.array(past, np.int32) + sequence - 1
        binding = self._session.io_binding()
        binding.bind_cpu_input("input_ids", np.ascontiguousarray(input_ids))
        binding.bind_cpu_input("seqlens_k", seqlens.astype(np.int32))
        binding.bind_cpu_input("total_len", np.array(seqlens.max() + 1, np.int32))
        binding.bind_cpu_input("rows", np.array(rows, np.int64))
        for part, cache in self._caches.items():
            place = (cache.dtype.type, (batch, *cache.shape[1:]), cache.ctypes.data)
            binding.bind_input(f"past_key_values.{part}", "cpu", 0, *place)
            binding.bind_output(f"present.{part}", "cpu", 0, *place)
        binding.bind_output("logits", "cpu")
        self._session.run_with_iobinding(binding)
        logits: FloatArray = binding.get_outputs()[-1].numpy()
        return logits


def _require_within(bound: _Bound, parity: Parity, *, source: str) -> None:
    holds = (
        parity.largest_logit_difference <= bound.largest_logit_difference
        and parity.top1_agreement >= bound.top1_agreement
    )
    if not holds:
        raise ExportError(
            f"the {parity.precision} graph of {source} is too far from its source: largest logit difference "
            f"{parity.largest_logit_difference:.4g}, top-1 agreement {parity.top1_agreement:.1%}",
            remedy="nothing was installed; try --precision int8 or fp32, and report this if fp32 fails",
        )
