"""The forwards of fp16 exports on a GPU against transformers' own models there, in fp16 too."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from genserve.backends.device_memory import DeviceMemory
from genserve.backends.logits_onnx import OnnxLogits
from genserve.backends.logits_torchscript import TorchLogits
from genserve.errors import RepositoryError
from genserve.export.form import Form
from genserve.generation.logits_model import LogitsModel
from tests.export.graphs import conversion_of, write_conversion, write_graph
from tests.export.tiny_models import TINY_MODELS, tiny_checkpoint

TOLERANCE = 0.02  # of the largest logit: some units of float16 in two layers


class Checked:
    """Slots that are filled, decoded and moved, each row compared with the reference at once."""

    def __init__(self, logits: LogitsModel, source: Path, *, device: str) -> None:
        self.logits = logits
        self.histories: list[list[int]] = []
        self._reference = reference_model(source, device=device)

    def prefill(self, histories: list[list[int]]) -> None:
        self.histories = [list(history) for history in histories]
        self._compare(self.logits.prefill(histories, first_slot=0, past=0))

    def prefill_in_chunks(self, slot: int, history: list[int], *, length: int) -> None:
        for start in range(0, len(history), length):
            rows = self.logits.prefill([history[start : start + length]], first_slot=slot, past=start)
        self.histories[slot:] = [list(history)]
        self._compare(rows, first_slot=slot)

    def decode(self, *, steps: int) -> None:
        rng = np.random.default_rng(5)
        for _ in range(steps):
            token_ids = rng.integers(3, 300, len(self.histories))
            past = np.array([len(history) for history in self.histories])
            for history, token_id in zip(self.histories, token_ids.tolist(), strict=True):
                history.append(token_id)
            self._compare(self.logits.decode(token_ids, past))

    def copy(self, *, source: int, target: int, length: int) -> None:
        self.logits.move(source=source, target=target, length=length)
        self.histories[target] = self.histories[source][:length]

    def _compare(self, rows: torch.Tensor, *, first_slot: int = 0) -> None:
        for row, history in zip(rows, self.histories[first_slot:], strict=False):
            with torch.inference_mode():
                ids = torch.tensor([history], device=self._reference.device)
                expected = self._reference(ids).logits[0, -1].float()
            row = torch.as_tensor(row, device=expected.device)  # TorchScript's are numpy's on the CPU
            assert (row - expected).abs().max() < TOLERANCE * expected.abs().max()


def reference_model(source: Path, *, device: str) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float16, attn_implementation="eager")
    return model.to(device)


def random_ids(count: int, *, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 300, count).tolist()


def onnx(source: Path, folder: Path, memory: DeviceMemory) -> LogitsModel:
    file = write_graph(source, folder, precision="fp16").folder / "model.onnx"
    return OnnxLogits(file, num_slots=4, max_length=128, memory=memory)


def torchscript(source: Path, folder: Path, memory: DeviceMemory) -> LogitsModel:
    conversion = conversion_of(source, form=Form.TORCHSCRIPT)
    file = write_conversion(conversion, folder).folder / "model.pt"
    return TorchLogits(file, num_slots=4, max_length=128, memory=memory)


ATTENTION_WITH_A_BIAS = "bloom"     # ALiBi, which ONNX Runtime's attention on CUDA has not


@pytest.mark.parametrize("model", TINY_MODELS)
@pytest.mark.parametrize("runtime", [onnx, torchscript])
def test_all_that_the_engine_does_equals_transformers(runtime, model, device, memory, tmp_path):
    if runtime is onnx and model.startswith(ATTENTION_WITH_A_BIAS):
        pytest.skip("has no attention on CUDA in ONNX Runtime")
    source = tiny_checkpoint(tmp_path / "checkpoint", **TINY_MODELS[model])
    slots = Checked(runtime(source, tmp_path / "graph", memory), source, device=device)
    slots.prefill([random_ids(length, seed=length) for length in (5, 40, 1)])
    slots.decode(steps=4)
    slots.prefill_in_chunks(3, random_ids(50, seed=3), length=16)
    slots.decode(steps=2)
    slots.copy(source=3, target=0, length=30)   # a prefix that two share
    slots.decode(steps=3)


def test_the_logits_lie_on_the_device(device, memory, tmp_path):
    source = tiny_checkpoint(tmp_path / "checkpoint", **TINY_MODELS["llama"])
    file = write_graph(source, tmp_path / "graph", precision="fp16").folder / "model.onnx"
    logits = OnnxLogits(file, num_slots=2, max_length=64, memory=memory)
    rows = logits.prefill([[3, 4]], first_slot=0, past=0)
    assert rows.device == torch.device(device)
    assert rows.dtype == torch.float32
    assert torch.from_dlpack(rows).data_ptr() == rows.data_ptr()


@pytest.mark.parametrize("model", ["bloom_4_heads", "fp32"])
def test_what_cuda_has_no_attention_for_is_refused_at_load(model, device, memory, tmp_path):
    if device == "cpu":
        pytest.skip("the CPU has it")
    precision = "fp32" if model == "fp32" else "fp16"
    source = tiny_checkpoint(tmp_path / "checkpoint", **TINY_MODELS["llama" if model == "fp32" else model])
    file = write_graph(source, tmp_path / "graph", precision=precision).folder / "model.onnx"
    with pytest.raises(RepositoryError, match="on cuda"):
        OnnxLogits(file, num_slots=2, max_length=64, memory=memory)
