"""On demand: models that requests load, and that leave when they are idle or others need their memory.

One thread loads and unloads, one model at a time, so that what it has reserved is what is loaded. A model in
use is never unloaded: what needs its memory waits, and requests that come later for that model wait behind.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

from genserve.backends.backend import bytes_parameter
from genserve.errors import SEE_LOG, GenserveError, ModelNotReady, Overloaded
from genserve.histogram import Histogram
from genserve.machine import free_memory_bytes, own_memory_bytes
from genserve.repository.index import ModelEntry, all_step_models
from genserve.repository.load_errors import stopping, unexpected_as_failed
from genserve.repository.load_request import LoadRequest
from genserve.repository.model_lifecycle import ModelLifecycle
from genserve.repository.model_versions import ModelTable
from genserve.repository.options import RepositoryOptions
from genserve.repository.text_stages import stage_owners
from genserve.textmodel.logits_config import is_logits_stage, version_files

logger = logging.getLogger(__name__)

_MAX_ROOM_WAIT_S = 300.0  # for models in use, before a load fails: as long as Ollama waits for a load
# The ends of BLS calls, and of sequences between two of their requests, are not announced.
_RECHECK_S = 0.1
# By which the process grows during a load for other reasons: modules that are imported, running requests.
_NOISE_BYTES = 64 * 2**20
_LOAD_BUCKETS_S = (0.25, 0.5, 1, 2, 4, 8, 16, 32, 64, 128)

_Step: TypeAlias = Callable[[], None]


class ModelUse:
    """The use of a model by a request: the model stays loaded until `end`."""

    __slots__ = ("_on_end",)

    def __init__(self, on_end: Callable[[], None]) -> None:
        self._on_end: Callable[[], None] | None = on_end

    def end(self) -> None:
        """End the use; a second call does nothing."""
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model that is loaded, or is being loaded.

    Attributes:
        name: the model's name.
        is_ready: whether it answers.
        size_bytes: the memory that it may take, KV cache and steps of an ensemble included.
        remaining_s: after which time it is unloaded unless it is used; infinite: it stays.
        is_pinned: whether it is unloaded by nothing but a request to unload it.
    """

    name: str
    is_ready: bool
    size_bytes: int
    remaining_s: float
    is_pinned: bool


@dataclass(slots=True, kw_only=True, eq=False)
class _Resident:
    """A model that is loaded for its own sake, not only as a step of an ensemble.

    Attributes:
        sizes: the memory that it may take, and each model of its steps and of theirs, by name, bytes.
        yields: it takes no more uses, since a load waits for its memory.
    """

    name: str
    sizes: Mapping[str, int]
    keep_alive_s: float
    is_pinned: bool = False
    num_uses: int = 0
    used_s: float = field(default_factory=lambda: time.monotonic())
    yields: bool = False

    @property
    def expires_s(self) -> float:
        """When it is to be unloaded if it is idle until then, `time.monotonic()`."""
        return math.inf if self.is_pinned else self.used_s + self.keep_alive_s


@dataclass(slots=True, kw_only=True, eq=False)
class _Load:
    """A load that requests wait for, each with the time for which it wants the model to stay; None: any."""

    name: str
    waiting: list[tuple[Future[ModelUse], float | None]] = field(default_factory=list)
    is_nested: bool = False  # code of a model waits, which may hold memory that another load waits for
    pins: bool = False
    sizes: Mapping[str, int] | None = None  # as of `_Resident`, estimated; None: not yet
    asked_s: float = field(default_factory=lambda: time.monotonic())

    @property
    def is_wanted(self) -> bool:
        """Whether somebody still waits for it."""
        return any(not future.cancelled() for future, _ in self.waiting)


class OnDemandModels:
    """Loads the models that requests need, within a budget of memory. Safe from any thread.

    Attributes:
        budget_bytes: the memory that all models together may take; None: any.
        num_unloads: how many models were unloaded, by the reason: `idle`, `memory` or `request`.
        num_failed_loads: how many loads have failed.
        load_s: how long loads took, in seconds.
    """

    def __init__(self, lifecycle: ModelLifecycle, table: ModelTable, *, options: RepositoryOptions) -> None:
        """Load nothing before `start`."""
        self.budget_bytes = options.memory_budget_bytes
        self.num_unloads = {"idle": 0, "memory": 0, "request": 0}
        self.num_failed_loads = 0
        self.load_s = Histogram(_LOAD_BUCKETS_S)
        self._lifecycle = lifecycle
        self._table = table
        self._options = options
        self._changed = threading.Condition()
        self._residents: dict[str, _Resident] = {}
        self._queue: deque[_Load] = deque()
        self._loading: _Load | None = None
        self._measured: dict[str, Mapping[str, int]] = {}  # the sizes of models that were loaded before
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="on-demand", daemon=True)

    def start(self, pinned: Iterable[str]) -> None:
        """Load models that stay; the errors of failed loads are those of the lifecycle."""
        self._thread.start()
        for name in pinned:
            try:
                self.use(name, pins=True).result().end()
            except GenserveError as error:
                self._lifecycle.errors.setdefault(name, error)

    def use(
        self, name: str, *, keep_alive_s: float | None = None, is_nested: bool = False, pins: bool = False
    ) -> Future[ModelUse]:
        """Return the use of a model, which is loaded first if it is not; to cancel it ends the wait.

        Args:
            name: the name of the model, or of a stage that an engine answers for its text model.
            keep_alive_s: how long the model stays after its last use, from now on; None: as before.
            is_nested: whether code of another model waits for it.
            pins: whether it is to stay until a request asks for its unload.

        The future fails with a GenserveError: the model does not exist, cannot be loaded or does not fit
        into the budget, or too many requests wait for it.
        """
        future: Future[ModelUse] = Future()
        with self._changed:
            resident = self._residents.get(name)
            if resident is None and name not in self._lifecycle.text_models:
                name = stage_owners(self._lifecycle.text_models).get(name, name)
                resident = self._residents.get(name)
            if resident is None or (resident.yields and not is_nested):
                self._wait_for_load(name, future, keep_alive_s, is_nested=is_nested, pins=pins)
                return future
            use = self._taken(resident, keep_alive_s)
            resident.is_pinned |= pins
        future.set_result(use)
        return future

    def _wait_for_load(
        self,
        name: str,
        future: Future[ModelUse],
        keep_alive_s: float | None,
        *,
        is_nested: bool,
        pins: bool,
    ) -> None:
        if self._closing:
            future.set_exception(stopping())
            return
        load = next((load for load in self._loads() if load.name == name), None)
        if load is None:
            load = _Load(name=name)
            self._queue.append(load)
        load.waiting = [one for one in load.waiting if not one[0].cancelled()]
        if len(load.waiting) > self._options.max_queue:
            message = f"{self._options.max_queue} requests wait until model {name[:128]!r} is loaded"
            future.set_exception(Overloaded(message, retry_after_s=1.0, reason="load"))
            return
        load.waiting.append((future, keep_alive_s))
        load.is_nested |= is_nested
        load.pins |= pins
        self._changed.notify_all()

    def _taken(self, resident: _Resident, keep_alive_s: float | None) -> ModelUse:
        resident.num_uses += 1
        if keep_alive_s is not None:
            resident.keep_alive_s = keep_alive_s
        return ModelUse(partial(self._end_use, resident))

    def _end_use(self, resident: _Resident) -> None:
        with self._changed:
            resident.num_uses -= 1
            resident.used_s = time.monotonic()
            self._changed.notify_all()

    def release(self, name: str) -> bool:
        """Unload a model as soon as nothing uses it, also a pinned one; return whether it is loaded."""
        with self._changed:
            resident = self._residents.get(name)
            if resident is None:
                return False
            resident.is_pinned = False
            resident.keep_alive_s = -math.inf
            self._changed.notify_all()
        return True

    def note_reload(self, name: str) -> None:
        """Note what a model in use takes now, if its files have changed."""
        with self._changed:
            resident, before = self._residents.get(name), self._measured.get(name)
        if resident is None:
            return
        sizes = self._loaded_sizes(name, grown_bytes=0)
        with self._changed:
            if sizes != before:
                resident.sizes = sizes
                self._changed.notify_all()

    def loaded(self) -> list[LoadedModel]:
        """Return the models that are loaded or being loaded, by name."""
        now_s = time.monotonic()
        with self._changed:
            found = [
                LoadedModel(
                    name=one.name,
                    is_ready=True,
                    size_bytes=_total(one),
                    remaining_s=max(0.0, one.expires_s - now_s),
                    is_pinned=one.is_pinned,
                )
                for one in self._residents.values()
            ]
            if (load := self._loading) is not None:
                size = sum((load.sizes or {}).values())
                found.append(
                    LoadedModel(
                        name=load.name,
                        is_ready=False,
                        size_bytes=size,
                        remaining_s=math.inf,
                        is_pinned=load.pins,
                    )
                )
        return sorted(found, key=lambda one: one.name)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a load."""
        with self._changed:
            return sum(not future.done() for load in self._loads() for future, _ in load.waiting)

    def _loads(self) -> list[_Load]:
        """Return the load that runs, and those that wait for it."""
        return [*([self._loading] if self._loading else []), *self._queue]

    def close(self) -> None:
        """Load and unload nothing more, and fail the requests that wait; blocks until a running load ends."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()
        for load in self._queue:
            _fail(load, stopping())
        self._queue.clear()

    def _run(self) -> None:
        while True:
            try:
                with self._changed:
                    if self._closing:
                        return
                    step = self._next_step()
                    if step is None:
                        self._changed.wait(self._next_check_s())
                        continue
                step()
            except Exception as error:  # this thread serves all models
                logger.exception("loading or unloading on demand failed")
                self._fail_loading(error)
                time.sleep(_RECHECK_S)

    def _fail_loading(self, error: Exception) -> None:
        """Fail the load that has raised, or all that wait: the next step would fail again."""
        with self._changed:
            failed = [self._loading] if self._loading is not None else list(self._queue)
            self._queue = deque(load for load in self._queue if load not in failed)
            self._loading = None
        for load in failed:
            _fail(load, ModelNotReady(f"model {load.name!r} could not be loaded: {error}", remedy=SEE_LOG))

    def _next_check_s(self) -> float | None:
        """Return the seconds until something may have changed that is not announced; None: nothing will."""
        if self._queue:
            return _RECHECK_S
        ends_s = [one.expires_s for one in self._residents.values() if not one.num_uses]
        wait_s = min(ends_s, default=math.inf) - time.monotonic()
        return None if wait_s == math.inf else max(_RECHECK_S, wait_s)

    def _next_step(self) -> _Step | None:
        """Return what is to be done now, in this order: unload what is over, load what is asked for."""
        now_s = time.monotonic()
        for resident in self._in_order_of_use():
            if resident.expires_s <= now_s and self._is_free(resident, leaving=()):
                reason = "request" if resident.keep_alive_s < 0 else "idle"
                return self._leaves([resident], reason)
        self._queue = deque(load for load in self._queue if load.is_wanted)
        if not self._queue:
            # A model may take more memory than was expected.
            leaving = self._idle_victims({})
            return self._leaves(leaving, "memory") if leaving else None
        # The models that call others may hold the memory that the rest waits for.
        nested = [load for load in self._queue if load.is_nested]
        others = [load for load in self._queue if not load.is_nested]
        candidates = [*nested, *others[:1]]
        for load in candidates:
            if load.name in self._residents:  # which was to give way to a load that is over
                return self._begin(load, partial(self._grant, load, self._residents[load.name]))
            if load.sizes is None:
                return partial(self._estimate, load)
            leaving = self._idle_victims(load.sizes)
            if leaving:
                return self._leaves(leaving, "memory")
            if leaving is not None:
                self._loading = load
                return self._begin(load, partial(self._load, load))
        return self._wait_for_room(candidates[0])

    def _begin(self, load: _Load, step: _Step) -> _Step:
        self._queue.remove(load)
        for resident in self._residents.values():
            resident.yields = False
        return step

    def _wait_for_room(self, load: _Load) -> _Step | None:
        """Let models in use give way to a load; return the step that fails one that does not fit even so."""
        pinned = [one for one in self._residents.values() if one.is_pinned]
        fits = self._fits(pinned, load.sizes or {})
        if not fits or time.monotonic() - load.asked_s > _MAX_ROOM_WAIT_S:
            self._queue.remove(load)
            return partial(_fail, load, self._no_room(load, pinned, fits=fits))
        staying = [*self._residents.values()]
        # Those that yield already go on to, although each use that ends makes them the last ones used.
        for resident in sorted(self._in_order_of_use(), key=lambda one: not one.yields):
            resident.yields = not resident.is_pinned and not self._fits(staying, load.sizes or {})
            if resident.yields:
                staying.remove(resident)
        return None

    def _no_room(self, load: _Load, pinned: Sequence[_Resident], *, fits: bool) -> GenserveError:
        needed, budget = _gib(sum((load.sizes or {}).values())), _gib(self.budget_bytes or 0)
        problem = f"model {load.name!r} needs about {needed}, and the memory budget is {budget}"
        if fits:
            names = ", ".join(self._residents)
            return ModelNotReady(f"{problem}, which {names} still use", remedy="try again in a moment")
        kept = sum(map(_total, pinned))
        names = ", ".join(one.name for one in pinned)
        return ModelNotReady(
            f"{problem}, of which {names} keep {_gib(kept)}" if pinned else problem,
            remedy="raise --model-memory-budget, or lower kv_cache_bytes in the config.pbtxt of its logits "
            "stage",
        )

    def _in_order_of_use(self) -> list[_Resident]:
        """Return the loaded models, the least recently used first."""
        return sorted(self._residents.values(), key=lambda one: one.used_s)

    def _fits(self, residents: Iterable[_Resident], sizes: Mapping[str, int]) -> bool:
        """Whether loaded models and models of these sizes fit into the budget together."""
        together = dict(sizes)
        for one in residents:
            together |= one.sizes
        return self.budget_bytes is None or sum(together.values()) <= self.budget_bytes

    def _idle_victims(self, sizes: Mapping[str, int]) -> list[_Resident] | None:
        """Return the least recently used idle models whose memory a load needs; None: all are not enough."""
        leaving: list[_Resident] = []
        staying = self._in_order_of_use()
        while not self._fits(staying, sizes):
            free = (one for one in staying if not one.is_pinned and self._is_free(one, leaving=leaving))
            victim = next(free, None)
            if victim is None:
                return None
            staying.remove(victim)
            leaving.append(victim)
        return leaving

    def _is_free(self, resident: _Resident, *, leaving: Iterable[_Resident]) -> bool:
        """Whether nothing uses a model, nor any model that is loaded and not `leaving` needs it."""
        if resident.num_uses:
            return False
        for other in self._residents.values():
            if resident.name in other.sizes and other not in (resident, *leaving):
                return False
        for served in self._table.of(resident.name):
            batching = served.config.sequence_batching
            text_model = served.text_model
            if served.num_pending:
                return False
            # The requests of an adapter are uses of it, and its engine is that of its base.
            if text_model is not None and text_model.base is None and text_model.engine.num_accepted:
                return False
            if batching is not None and not batching.iterative:  # its sequences have states
                idle_s = time.monotonic() - resident.used_s
                if idle_s < batching.max_sequence_idle_us / 1e6:
                    return False
        return True

    def _leaves(self, residents: Iterable[_Resident], reason: str) -> _Step:
        """Take models out of those that are loaded; return the step that unloads them."""
        names = [one.name for one in residents]
        for name in names:
            del self._residents[name]
            self.num_unloads[reason] += 1
        return partial(self._unload, names, reason)

    def _unload(self, names: Iterable[str], reason: str) -> None:
        for name in names:
            logger.info("unloading model %s: %s", name, _REASONS[reason])
            self._lifecycle.unload(name, dependents=True)
        self._lifecycle.join_unloads()

    def _estimate(self, load: _Load) -> None:
        """Find out what memory a load needs, or that there is no such model."""
        try:
            if load.name not in self._lifecycle.entries:
                self._lifecycle.scan_folders()
            models = self._with_steps(load.name)
            sizes = {model.name: _files_bytes(model) + self._cache_bytes(model) for model in models}
        except Exception as error:  # the load finds and reports it
            logger.debug("the size of model %s is unknown: %s", load.name, error)
            sizes = {}
        with self._changed:
            load.sizes = self._measured.get(load.name, sizes)

    def _load(self, load: _Load) -> None:
        started_s, memory_bytes = time.monotonic(), own_memory_bytes()
        try:
            with unexpected_as_failed(load.name):
                self._lifecycle.load(LoadRequest(name=load.name))
        except GenserveError as error:
            self._lifecycle.forget_failed(load.name)
            with self._changed:
                self._loading = None
                self.num_failed_loads += 1
            _fail(load, error)
            return
        self.load_s.observe(time.monotonic() - started_s)
        sizes = self._loaded_sizes(load.name, grown_bytes=max(0, own_memory_bytes() - memory_bytes))
        resident = _Resident(name=load.name, sizes=sizes, keep_alive_s=self._options.keep_alive_s)
        with self._changed:
            self._loading = None
            self._residents[load.name] = resident
        self._grant(load, resident)  # on the thread that alone unloads

    def _grant(self, load: _Load, resident: _Resident) -> None:
        """Let the requests that wait use a model."""
        granted: list[tuple[Future[ModelUse], ModelUse]] = []
        with self._changed:
            resident.is_pinned |= load.pins
            for future, keep_alive_s in load.waiting:
                if future.set_running_or_notify_cancel():
                    granted.append((future, self._taken(resident, keep_alive_s)))
        for future, use in granted:  # which may call back
            future.set_result(use)

    def _cache_bytes(self, entry: ModelEntry) -> int:
        config = entry.config
        if config is None or not is_logits_stage(config):
            return 0
        return bytes_parameter(config.parameters, "kv_cache_bytes") or self._options.kv_cache_bytes or 0

    def _loaded_sizes(self, name: str, *, grown_bytes: int) -> Mapping[str, int]:
        """Return the memory that a loaded model may take, and each model of its steps.

        Args:
            name: the model's name.
            grown_bytes: by how much this process has grown during the load. Weights that are mapped are not
                part of it, those that were read are.
        """
        sizes = {model.name: _files_bytes(model) for model in self._with_steps(name)}
        more_bytes = max(0, grown_bytes - _NOISE_BYTES - sum(sizes.values()))
        texts = [served.text_model for served in self._table.of(name) if served.text_model is not None]
        for text in texts:
            owner = (text.base or text).name
            sizes[owner] = sizes.get(owner, 0) + text.kv_cache_bytes
        # Not what it has grown by, of which requests to other models may be the reason.
        self._measured[name] = dict(sizes)
        sizes[name] += more_bytes
        return sizes

    def _with_steps(self, name: str) -> list[ModelEntry]:
        """Return a model, the models of its steps or its base, and the draft models of their engines."""
        entries, texts = self._lifecycle.entries, self._lifecycle.text_models
        if name not in entries:
            return []
        models = [entries[name], *all_step_models(entries[name], entries)]
        drafts = (model.config.parameters.get("draft_model", "") for model in models if model.config)
        return [*models, *(texts[draft]["logits"] for draft in drafts if draft in texts)]


_REASONS: Mapping[str, str] = {
    "idle": "nobody has used it for its keep-alive time",
    "memory": "another model needs its memory",
    "request": "a request asked for it",
}


def _fail(load: _Load, error: GenserveError) -> None:
    """Fail the requests that wait, which may call back: not with the lock held."""
    for future, _ in load.waiting:
        if future.set_running_or_notify_cancel():
            future.set_exception(error)


def _total(resident: _Resident) -> int:
    return sum(resident.sizes.values())


def _files_bytes(entry: ModelEntry) -> int:
    """Return the size of the files of the version that a model serves; 0: they cannot be read.

    Prefixes that came with it do not count, which are read into the KV cache.
    """
    with suppress(GenserveError, OSError):
        return sum(file.stat().st_size for file in version_files(entry.latest_version()))
    return 0


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:,.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:,.1f} MiB"


def default_memory_budget() -> int | None:
    """Return four fifths of the memory that is free now, bytes; None: unknown."""
    free_bytes = free_memory_bytes()
    return None if free_bytes is None else free_bytes * 4 // 5
