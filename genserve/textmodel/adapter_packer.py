"""Adapter packer: fits a LoRA adapter to the graphs of a model, and packs its weights for their kernels."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from genserve.errors import RepositoryError
from genserve.kernels.low_rank import LowRankPart, PackedAdapter, pack_layer
from genserve.textmodel.logits_runtime import LoadedLogits
from genserve.textmodel.peft_adapter import MERGE_REMEDY, PeftAdapter
from genserve.textmodel.runtimes.adapter_targets import AdapterTarget, num_layers
from genserve.textmodel.runtimes.onnx_logits import LogitsGraph, OnnxLogits
from genserve.textmodel.runtimes.pipeline_logits import PipelineLogits

# The modules of transformers' models by the parts of a layer whose weights they have unchanged.
_LLAMA = {
    "self_attn.q_proj": ("attention.query",),
    "self_attn.k_proj": ("attention.key",),
    "self_attn.v_proj": ("attention.value",),
    "self_attn.o_proj": ("attention.output",),
    "mlp.gate_proj": ("mlp.gate",),
    "mlp.up_proj": ("mlp.up",),
    "mlp.down_proj": ("mlp.down",),
}
_LIKE_LLAMA = (
    "apertus", "arcee", "exaone4", "gemma", "gemma2", "gemma3", "hunyuan", "llama", "ministral3", "nemotron",
    "olmo", "olmo2", "qwen2", "qwen3", "stablelm",
)  # fmt: skip
_MODULES: Mapping[str, Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        **dict.fromkeys(_LIKE_LLAMA, _LLAMA),
        "phi": _LLAMA
        | {
            "self_attn.dense": ("attention.output",),
            "mlp.fc1": ("mlp.up",),
            "mlp.fc2": ("mlp.down",),
        },
        "phi3": _LLAMA
        | {
            "self_attn.qkv_proj": ("attention.query", "attention.key", "attention.value"),
            "mlp.gate_up_proj": ("mlp.gate", "mlp.up"),
        },
        "starcoder2": _LLAMA | {"mlp.c_fc": ("mlp.up",), "mlp.c_proj": ("mlp.down",)},
    }
)
# A module in a layer of the text model, which may be a part of a model with images.
_MODULE = re.compile(r"(?:model\.|language_model\.model\.|model\.language_model\.)layers\.(\d+)\.(.+)")


class AdapterPacker:
    """Packs adapters for one text model."""

    def __init__(self, *, model: str, logits: LoadedLogits) -> None:
        """Take the model, whose name errors have."""
        self._model = model
        self._logits = logits

    def pack(self, peft: PeftAdapter) -> Sequence[PackedAdapter]:
        """Read an adapter; return its weights for each graph of the model.

        Raises:
            RepositoryError: the adapter is broken or does not fit the model, or `graphs` raises it.
        """
        graphs, modules = self.graphs(), self._modules()
        parts: list[dict[str, list[LowRankPart]]] = [{} for _ in graphs]
        for module in peft.modules:
            index, targets = self._targets(peft, module, graphs, modules)
            first = targets[0]
            outputs, _, inputs = peft.shape(module)
            wanted = sum(target.num_outputs for target in targets), first.shape.in_features
            if (outputs, inputs) != wanted:
                raise _of_another_model(
                    peft,
                    f"the adapter changes {module!r} with the shape {[outputs, inputs]}; that of model "
                    f"{self._model!r} has {[*wanted]}",
                )
            product = peft.product(module)
            down = product.down if first.smoothing is None else product.down * first.smoothing
            part = LowRankPart(first=first.first, down=down, up=product.up)
            parts[index].setdefault(first.weight, []).append(part)
        packed = []
        for graph, layers in zip(graphs, parts, strict=True):
            shapes = {target.weight: target.shape for target in graph.adapter_targets.values()}
            packed.append(
                graph.adapter_layers.packed(
                    {name: pack_layer(shapes[name], own) for name, own in layers.items()}
                )
            )
        return packed

    def _targets(
        self,
        peft: PeftAdapter,
        module: str,
        graphs: Sequence[LogitsGraph],
        modules: Mapping[str, tuple[str, ...]],
    ) -> tuple[int, Sequence[AdapterTarget]]:
        """Return the number of the graph that has a module, and the targets that are its outputs."""
        match = _MODULE.fullmatch(module)
        parts = () if match is None else modules.get(match[2], ())
        roles = [f"layers.{match[1]}.{part}" for part in parts] if match else []
        for index, graph in enumerate(graphs):
            targets = [graph.adapter_targets[role] for role in roles if role in graph.adapter_targets]
            if not targets or len(targets) < len(roles):
                continue
            if any(target.is_smoothed for target in targets):
                raise RepositoryError(
                    f"the graph of model {self._model!r} does not say how its export has balanced the inputs "
                    "of its layers, which an adapter must know",
                    remedy="export the model again with `genserve export --overwrite`",
                )
            return index, targets
        total = num_layers(role for graph in graphs for role in graph.adapter_targets)
        if match and int(match[1]) >= total:
            raise _of_another_model(
                peft, f"the adapter changes {module!r}; model {self._model!r} has {total} layers"
            )
        raise RepositoryError(
            f"the adapter changes {module!r}, which an adapter of a request to model {self._model!r} cannot; "
            f"it can change {', '.join(name.rpartition('.')[2] for name in modules)}",
            remedy=MERGE_REMEDY,
        )

    def graphs(self) -> Sequence[LogitsGraph]:
        """Return the graphs of the model; raises RepositoryError if adapters cannot change their layers."""
        if isinstance(self._logits, OnnxLogits | PipelineLogits) and all(
            graph.memory.is_host and graph.adapter_targets for graph in self._logits.graphs
        ):
            self._modules()  # or requests can choose no adapters of its family
            return self._logits.graphs
        raise RepositoryError(
            f"model {self._model!r} has no layers that adapters of requests can change",
            remedy="export it with `genserve export` to ONNX, in another precision than fp16, and run it on "
            f"the CPU; or {MERGE_REMEDY}",
        )

    def _modules(self) -> Mapping[str, tuple[str, ...]]:
        family = self._logits.metadata.get("genserve.family", "")
        if family not in _MODULES:
            raise RepositoryError(
                f"model {self._model!r} is of the family {family!r}, whose adapters a request cannot choose",
                remedy=f"{MERGE_REMEDY}; families that can are {', '.join(sorted(_MODULES))}",
            )
        return _MODULES[family]


def _of_another_model(peft: PeftAdapter, problem: str) -> RepositoryError:
    base = peft.config.get("base_model_name_or_path")
    return RepositoryError(
        problem, remedy="load it with the model that it was trained on" + (f": {base}" if base else "")
    )
