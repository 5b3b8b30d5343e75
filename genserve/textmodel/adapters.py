"""Adapters: the LoRA adapters of a loaded text model, which requests choose by name.

One engine serves the model and all its adapters; rows of different ones share a forward. An adapter that is
loaded stays in its files, and is packed into memory when a request needs it. The least recently used one is
dropped for another.
"""

from __future__ import annotations

import hashlib
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from genserve.errors import ModelFailed, ModelNotFound, Overloaded, RepositoryError
from genserve.files import file_sha256
from genserve.generation_metrics import GenerationMetrics
from genserve.kernels.low_rank import LowRankPart, PackedAdapter, pack_layer
from genserve.textmodel.logits_runtime import LoadedLogits
from genserve.textmodel.peft_adapter import CONFIG, WEIGHTS, PeftAdapter, merge_remedy
from genserve.textmodel.runtimes.adapter_targets import AdapterTarget
from genserve.textmodel.runtimes.onnx_logits import LogitsGraph, OnnxLogits
from genserve.textmodel.runtimes.pipeline_logits import PipelineLogits

MAX_LOADED = 32     # adapters in memory, unless the config says otherwise
_MAX_WAIT_S = 60.0

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


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterInfo:
    """An adapter that requests can choose.

    Attributes:
        name: the name by which requests choose it.
        folder: the folder with its files.
        base: the model that it states to be made for; may be empty.
        rank: the largest rank of its modules.
        alpha: its `lora_alpha`.
        targets: the last names of the modules that it changes, such as `q_proj`, sorted.
        num_bytes: the size of its weights in the file.
        sha256: the digest of its files.
        loaded_s: wall-clock time of the load, seconds since 1970.
    """

    name: str
    folder: Path
    base: str
    rank: int
    alpha: float
    targets: tuple[str, ...]
    num_bytes: int
    sha256: str
    loaded_s: float


@dataclass(frozen=True, slots=True, eq=False)
class LoadedAdapter:
    """An adapter in memory; implements `engine.LogitsAdapter`.

    Attributes:
        info: the adapter.
        graphs: its weights for each graph of the logits.
    """

    info: AdapterInfo
    graphs: Sequence[PackedAdapter]

    @property
    def sha256(self) -> str:
        """See `LogitsAdapter`."""
        return self.info.sha256


@dataclass(slots=True)
class _Slot:
    adapter: LoadedAdapter | None = None    # None: a thread is packing it
    num_users: int = 0


@dataclass(slots=True)
class _Known:
    info: AdapterInfo
    states: Sequence[tuple[int, int, int]] = field(default_factory=tuple)   # of its files when it was loaded


class Adapters:
    """The adapters of one text model. Its methods are safe from any thread, and may read files."""

    def __init__(
        self,
        *,
        model: str,
        logits: LoadedLogits,
        metrics: GenerationMetrics,
        max_loaded: int = MAX_LOADED,
    ) -> None:
        """Start without adapters; at most `max_loaded` are in memory."""
        self._model = model
        self._logits = logits
        self._metrics = metrics
        self._max_loaded = max(1, max_loaded)
        self._changed = threading.Condition()
        # Guarded by the condition. The least recently used slot is the first.
        self._known: dict[str, _Known] = {}
        self._slots: OrderedDict[AdapterInfo, _Slot] = OrderedDict()

    def __contains__(self, name: object) -> bool:
        return name in self._known

    def __len__(self) -> int:
        return len(self._known)

    def list(self) -> Sequence[AdapterInfo]:
        """Return the adapters, by name."""
        with self._changed:
            return sorted((known.info for known in self._known.values()), key=lambda info: info.name)

    def get(self, name: str) -> AdapterInfo:
        """Return an adapter; raises ModelNotFound if there is none of this name."""
        return self._find(name).info

    def load(self, name: str, folder: Path) -> AdapterInfo:
        """Let requests choose the adapter in a folder, which must stay there. Replaces one of the same name.

        Raises:
            RepositoryError: the adapter is broken, is of a kind that a request cannot choose, or does not fit
                the model; or the model can have none.
        """
        states = _file_states(folder)
        info, packed = self._read(name, folder)
        with self._changed:
            self._known[name] = _Known(info, states)
            self._drop_unknown()
            if self._make_room():
                self._slots[info] = _Slot(packed)
            self._changed.notify_all()
            self._metrics.adapters(known=len(self._known))
        return info

    def unload(self, info: AdapterInfo, *, timeout_s: float = 0.0) -> None:
        """Forget an adapter, unless another one has its name by now; requests that have begun keep it.

        Args:
            info: the adapter, as `load` has returned it.
            timeout_s: how long to wait for these requests to end.
        """
        with self._changed:
            known = self._known.get(info.name)
            if known is not None and known.info is info:
                del self._known[info.name]
                self._metrics.adapters(known=len(self._known))
            self._drop_unknown()
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._is_used(info), timeout_s)

    def _is_used(self, info: AdapterInfo) -> bool:
        slot = self._slots.get(info)
        return slot is not None and slot.num_users > 0

    def acquire(self, name: str, *, count: int = 1) -> LoadedAdapter:
        """Return an adapter in memory, which stays there until it is released `count` times.

        If all adapters in memory are in use, it waits for one to be released.

        Raises:
            ModelNotFound: there is no adapter of this name.
            ModelFailed: its files have changed since it was loaded.
            Overloaded: none was released for a minute.
        """
        deadline_s = time.monotonic() + _MAX_WAIT_S
        with self._changed:
            while True:
                known = self._find(name)
                slot = self._slots.get(known.info)
                if slot is not None and slot.adapter is not None:
                    slot.num_users += count
                    self._slots.move_to_end(known.info)
                    return slot.adapter
                if slot is None and self._make_room():
                    slot = self._slots[known.info] = _Slot()
                    break
                if not self._changed.wait(deadline_s - time.monotonic()):
                    raise Overloaded(
                        f"model {self._model!r} has {self._max_loaded} adapters in memory; all are in use",
                        remedy="try again later, or raise max_loaded_adapters in the config.pbtxt of its "
                        "logits stage",
                        retry_after_s=_MAX_WAIT_S,
                    )
        try:
            adapter = self._pack_again(known)
        except BaseException:
            with self._changed:
                del self._slots[known.info]
                self._changed.notify_all()
            raise
        with self._changed:
            slot.adapter = adapter
            slot.num_users += count
            self._changed.notify_all()
        return adapter

    def release(self, adapter: LoadedAdapter) -> None:
        """Give back an adapter that was acquired."""
        with self._changed:
            self._slots[adapter.info].num_users -= 1
            self._drop_unknown()
            self._changed.notify_all()

    def _find(self, name: str) -> _Known:
        known = self._known.get(name)
        if known is None:
            raise ModelNotFound(
                f"model {self._model!r} has no adapter {name!r}",
                remedy=f"load it first; loaded are: {', '.join(sorted(self._known)) or 'none'}",
            )
        return known

    def _make_room(self) -> bool:
        """Drop the least recently used adapter that is not in use, if all slots are taken; False: none is."""
        if len(self._slots) < self._max_loaded:
            return True
        unused = (info for info, slot in self._slots.items() if slot.adapter and not slot.num_users)
        info = next(unused, None)
        if info is None:
            return False
        del self._slots[info]
        return True

    def _drop_unknown(self) -> None:
        """Drop the adapters that were unloaded or replaced, and are not in use any more."""
        infos = {known.info for known in self._known.values()}
        for info in [each for each, slot in self._slots.items() if slot.adapter and not slot.num_users]:
            if info not in infos:
                del self._slots[info]

    def _pack_again(self, known: _Known) -> LoadedAdapter:
        folder = known.info.folder
        try:
            if _file_states(folder) == known.states:
                return LoadedAdapter(known.info, self._packed(PeftAdapter(folder)))
        except RepositoryError as error:
            raise ModelFailed(error.message, remedy=error.remedy) from error
        raise ModelFailed(
            f"the files of the adapter {known.info.name!r} in {folder} have changed since it was loaded",
            remedy="load it again",
        )

    def _read(self, name: str, folder: Path) -> tuple[AdapterInfo, LoadedAdapter]:
        peft = PeftAdapter(folder)
        packed = self._packed(peft)
        info = AdapterInfo(
            name=name,
            folder=folder,
            base=str(peft.config.get("base_model_name_or_path") or ""),
            rank=max(peft.shape(module)[1] for module in peft.modules),
            alpha=float(peft.config["lora_alpha"]),
            targets=tuple(sorted({module.rpartition(".")[2] for module in peft.modules})),
            num_bytes=(folder / WEIGHTS).stat().st_size,
            sha256=_digest(folder),
            loaded_s=time.time(),
        )
        return info, LoadedAdapter(info, packed)

    def _packed(self, peft: PeftAdapter) -> Sequence[PackedAdapter]:
        graphs, modules = self._graphs(), self._modules()
        self._metrics.adapter_packed()
        parts: list[dict[str, list[LowRankPart]]] = [{} for _ in graphs]
        for module in peft.modules:
            index, targets = self._targets(module, graphs, modules)
            first = targets[0]
            outputs, _, inputs = peft.shape(module)
            wanted = sum(target.num_outputs for target in targets), first.shape.in_features
            if (outputs, inputs) != wanted:
                raise RepositoryError(
                    f"the adapter changes {module!r} with the shape {[outputs, inputs]}; that of model "
                    f"{self._model!r} has {[*wanted]}",
                    remedy="load it with the model that it was trained on"
                    + (f": {base}" if (base := peft.config.get("base_model_name_or_path")) else ""),
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
        self, module: str, graphs: Sequence[LogitsGraph], modules: Mapping[str, tuple[str, ...]]
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
        raise RepositoryError(
            f"the adapter changes {module!r}, which an adapter of a request to model {self._model!r} cannot; "
            f"it can change {', '.join(name.rpartition('.')[2] for name in modules)}",
            remedy=merge_remedy(),
        )

    def _graphs(self) -> Sequence[LogitsGraph]:
        if isinstance(self._logits, OnnxLogits | PipelineLogits) and all(
            graph.memory.is_host and graph.adapter_targets for graph in self._logits.graphs
        ):
            return self._logits.graphs
        raise RepositoryError(
            f"model {self._model!r} has no layers that adapters of requests can change",
            remedy="export it with `genserve export` to ONNX, in another precision than fp16, and run it on "
            f"the CPU; or {merge_remedy()}",
        )

    def _modules(self) -> Mapping[str, tuple[str, ...]]:
        family = self._logits.metadata.get("genserve.family", "")
        if family not in _MODULES:
            raise RepositoryError(
                f"model {self._model!r} is of the family {family!r}, whose adapters a request cannot choose",
                remedy=f"{merge_remedy()}; families that can are {', '.join(sorted(_MODULES))}",
            )
        return _MODULES[family]


def _file_states(folder: Path) -> Sequence[tuple[int, int, int]]:
    """Return what changes with each file of an adapter that is written or replaced."""
    states = []
    for name in (CONFIG, WEIGHTS):
        try:
            state = (folder / name).stat()
        except OSError:
            return ()
        states.append((state.st_size, state.st_mtime_ns, state.st_ino))
    return tuple(states)


def _digest(folder: Path) -> str:
    digests = [file_sha256(folder / name) for name in (CONFIG, WEIGHTS)]
    return hashlib.sha256(repr(digests).encode()).hexdigest()
