"""Adapters: the LoRA adapters of a loaded text model, which requests choose by name.

One engine serves the model and all its adapters; rows of different ones share a forward. An adapter that is
loaded stays in its files, and is packed into memory when a request needs it. The least recently used one is
dropped for another.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from bisect import insort, insort_left
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from genserve.errors import (
    SEE_LOG,
    GenserveError,
    ModelFailed,
    ModelNotFound,
    ModelNotReady,
    RepositoryError,
)
from genserve.files import file_sha256
from genserve.generation_metrics import GenerationMetrics
from genserve.kernels.low_rank import PackedAdapter
from genserve.textmodel.adapter_packer import AdapterPacker
from genserve.textmodel.logits_runtime import LoadedLogits
from genserve.textmodel.peft_adapter import CONFIG, WEIGHTS, PeftAdapter

logger = logging.getLogger(__name__)

MAX_LOADED = 32  # adapters in memory, unless the config says otherwise


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
        file_states: size, modification time and inode of each of its files when it was loaded.
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
    file_states: Sequence[tuple[int, int, int]]


@dataclass(slots=True, eq=False)
class _Slot:
    """The memory of an adapter; `graphs` has its weights for each graph, once a thread has packed them."""

    graphs: Sequence[PackedAdapter] | None = None
    error: GenserveError | None = None  # why they cannot be packed
    users: list[AcquiredAdapter] = field(default_factory=list)


@dataclass(slots=True, eq=False, kw_only=True)
class AcquiredAdapter:
    """An adapter that sequences use or wait for; implements `engine.LogitsAdapter`.

    Attributes:
        info: the adapter; a later load of its name, if its files were replaced before they were read.
        num_users: how many sequences have not released it.
        priority: its rank in the queue for room; the adapter with the lowest value is first.
        on_change: called when its weights are in memory, or cannot be.
    """

    info: AdapterInfo
    num_users: int
    priority: int
    on_change: Callable[[], None] = lambda: None
    slot: _Slot | None = None  # None: it waits for room

    @property
    def sha256(self) -> str:
        """See `LogitsAdapter`."""
        return self.info.sha256

    @property
    def is_ready(self) -> bool:
        """See `LogitsAdapter`."""
        slot = self.slot  # which the thread that packs may take away
        return slot is not None and slot.graphs is not None

    @property
    def error(self) -> GenserveError | None:
        """See `LogitsAdapter`."""
        slot = self.slot
        return None if slot is None else slot.error

    @property
    def graphs(self) -> Sequence[PackedAdapter]:
        """Its weights for each graph of the logits, which are in memory."""
        assert self.slot is not None
        assert self.slot.graphs is not None
        return self.slot.graphs


class Adapters:
    """The adapters of one text model. Its methods are safe from any thread; `load` reads files.

    Attributes:
        packer: fits adapters to the model.
    """

    def __init__(
        self,
        *,
        model: str,
        logits: LoadedLogits,
        metrics: GenerationMetrics,
        max_loaded: int = MAX_LOADED,
    ) -> None:
        """Start without adapters; at most `max_loaded` are in memory."""
        self.packer = AdapterPacker(model=model, logits=logits)
        self._model = model
        self._metrics = metrics
        self._max_loaded = max(1, max_loaded)
        self._changed = threading.Condition()
        # Guarded by the condition. The least recently used slot is the first.
        self._known: dict[str, AdapterInfo] = {}
        self._slots: OrderedDict[AdapterInfo, _Slot] = OrderedDict()
        self._waiting: list[AcquiredAdapter] = []  # for room: by priority, then by arrival
        self._packing = ThreadPoolExecutor(1, thread_name_prefix=f"adapters-{model}")

    def __contains__(self, name: object) -> bool:
        return name in self._known

    def __len__(self) -> int:
        return len(self._known)

    def list(self) -> Sequence[AdapterInfo]:
        """Return the adapters, by name."""
        with self._changed:
            return sorted(self._known.values(), key=lambda info: info.name)

    def get(self, name: str) -> AdapterInfo:
        """Return an adapter; raises ModelNotFound if there is none of this name."""
        info = self._known.get(name)
        if info is None:
            raise ModelNotFound(
                f"model {self._model!r} has no adapter {name!r}",
                remedy=f"load it first; loaded are: {', '.join(sorted(self._known)) or 'none'}",
            )
        return info

    def load(self, name: str, folder: Path) -> AdapterInfo:
        """Let requests choose the adapter in a folder, which must stay there. Replaces one of the same name.

        Requests that have begun, or wait for room, go on with the one that they began with.

        Raises:
            RepositoryError: the adapter is broken, is of a kind that a request cannot choose, or does not fit
                the model; or the model can have none.
        """
        info, packed = self._read(name, folder)
        with self._changed:
            self._known[name] = info
            self._update()
            if not self._waiting and self._make_room():
                self._slots[info] = _Slot(packed)
            self._metrics.adapters(known=len(self._known), max_loaded=self._max_loaded)
        return info

    def unload(self, info: AdapterInfo, *, timeout_s: float = 0.0) -> None:
        """Forget an adapter, unless another one has its name by now; requests that have begun keep it.

        Args:
            info: the adapter, as `load` has returned it.
            timeout_s: how long to wait for these requests to end.
        """
        with self._changed:
            if self._known.get(info.name) is info:
                del self._known[info.name]
                self._metrics.adapters(known=len(self._known), max_loaded=self._max_loaded)
            self._update()
            self._changed.wait_for(lambda: not self._is_used(info), timeout_s)

    def _is_used(self, info: AdapterInfo) -> bool:
        slot = self._slots.get(info)
        return bool(slot and slot.users) or any(waiting.info is info for waiting in self._waiting)

    def acquire(
        self,
        name: str,
        *,
        count: int = 1,
        priority: int = 0,
        on_change: Callable[[], None] = lambda: None,
    ) -> AcquiredAdapter:
        """Return an adapter, which is kept in memory until it is released `count` times.

        It may be read from its files first, and waits for room while all adapters in memory are in use.
        Adapters get room, and those in memory new users, in the order of arrival, so that none waits forever.

        Args:
            name: the adapter.
            count: the number of sequences that use it.
            priority: the rank in the queue for room; the adapter with the lowest value is first.
            on_change: called on any thread, and without waiting, when it is in memory or cannot be, unless
                that is so already.

        Raises:
            ModelNotFound: there is no adapter of this name.
        """
        with self._changed:
            acquired = AcquiredAdapter(info=self.get(name), num_users=count, priority=priority)
            insort(self._waiting, acquired, key=lambda each: each.priority)
            self._update()
            acquired.on_change = on_change
        return acquired

    def release(self, acquired: AcquiredAdapter) -> None:
        """Give an adapter back for one sequence."""
        with self._changed:
            acquired.num_users -= 1
            if not acquired.num_users:
                if acquired.slot is not None:
                    acquired.slot.users.remove(acquired)
                else:
                    self._waiting.remove(acquired)
            self._update()

    def _update(self) -> None:
        """Drop the adapters that nobody can use any more, and give room to those that wait."""
        for info in [each for each in self._unused() if self._known.get(each.name) is not each]:
            del self._slots[info]
        while self._waiting and self._give_room(self._waiting[0]):
            first = self._waiting.pop(0)
            if first.is_ready:
                first.on_change()
        self._changed.notify_all()

    def _give_room(self, acquired: AcquiredAdapter) -> bool:
        """Have an adapter packed unless it is in memory; False: there is no room."""
        info = acquired.info
        slot = self._slots.get(info)
        if slot is None:
            if not self._make_room():
                return False
            slot = self._slots[info] = _Slot()
            self._packing.submit(self._fill, slot, info)
        self._slots.move_to_end(info)
        slot.users.append(acquired)
        acquired.slot = slot
        return True

    def _fill(self, slot: _Slot, info: AdapterInfo) -> None:
        with self._changed:
            if not slot.users:  # all requests for it have ended
                del self._slots[info]
                self._update()
                return
        error: GenserveError | None = None
        try:
            graphs = self._pack_again(info)
        except (ModelFailed, ModelNotReady) as failure:
            error = failure
        except Exception:
            logger.exception("an adapter was not packed")
            error = ModelFailed(f"the adapter {info.name!r} cannot be read", remedy=SEE_LOG)
        with self._changed:
            if error is None:
                slot.graphs = graphs
            else:
                del self._slots[info]
                self._cannot_pack(slot, info, error)
            for user in slot.users:
                user.on_change()
            self._update()

    def _cannot_pack(self, slot: _Slot, info: AdapterInfo, error: GenserveError) -> None:
        """End the wait for an adapter that cannot be packed; for a replaced one, wait for the new one."""
        now = self._known.get(info.name)
        if now is info:
            slot.error = error
        elif now is None:
            slot.error = ModelNotReady(
                f"the adapter {info.name!r} was unloaded, and its files have changed, while the request "
                "waited for it",
                remedy="send the request again when the adapter is loaded",
            )
        else:
            for user in reversed(slot.users):
                user.info, user.slot = now, None
                insort_left(self._waiting, user, key=lambda each: each.priority)
            slot.users.clear()

    def _make_room(self) -> bool:
        """Drop the least recently used adapter that is not in use, if all slots are taken; False: none is."""
        if len(self._slots) < self._max_loaded:
            return True
        info = next(self._unused(), None)
        if info is None:
            return False
        del self._slots[info]
        return True

    def _unused(self) -> Iterator[AdapterInfo]:
        """Yield the adapters in memory that are not in use, the least recently used first."""
        return (info for info, slot in self._slots.items() if slot.graphs is not None and not slot.users)

    def _pack_again(self, info: AdapterInfo) -> Sequence[PackedAdapter]:
        _check_files(info)
        try:
            packed = self._pack(PeftAdapter(info.folder))
        except RepositoryError as error:
            raise ModelFailed(error.message, remedy=error.remedy) from error
        _check_files(info)  # they may be written while they are read
        return packed

    def _pack(self, peft: PeftAdapter) -> Sequence[PackedAdapter]:
        packed = self.packer.pack(peft)
        self._metrics.adapter_packed()
        return packed

    def _read(self, name: str, folder: Path) -> tuple[AdapterInfo, Sequence[PackedAdapter]]:
        states = _file_states(folder)
        peft = PeftAdapter(folder)
        packed = self._pack(peft)
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
            file_states=states,
        )
        if _file_states(folder) != states:  # the digest may be that of other files than were packed
            raise RepositoryError(
                f"the files of the adapter in {folder} have changed while they were read",
                remedy="load it when they are written",
            )
        return info, packed


def _check_files(info: AdapterInfo) -> None:
    if _file_states(info.folder) != info.file_states:
        raise ModelNotReady(
            f"the files of the adapter {info.name!r} in {info.folder} have changed since it was loaded",
            remedy="load it again",
        )


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
