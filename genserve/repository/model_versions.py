"""Model versions: the versions of models that answer requests, and the table of their states."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Protocol

from genserve.config.model_config import ModelConfig
from genserve.errors import Closed, GenserveError, InferenceError, Status
from genserve.histogram import Histogram
from genserve.inference import Inference, InferenceRequest, InferenceResponse, ResponseStep
from genserve.inference_statistics import ModelStatistics
from genserve.repository.load_request import Upload
from genserve.repository.request_validation import RequestValidator, decoupled_error
from genserve.repository.response_cache import ResponseCache
from genserve.textmodel.text_model import TextModel
from genserve.tracing import Span

_LOADS = itertools.count()  # part of cache keys: a reloaded model does not use old responses


class ModelRuntime(Protocol):
    """Runs the inferences of one version of a model: instances, an ensemble, or a text engine."""

    @property
    def ready(self) -> bool:
        """Whether it can execute inferences."""

    @property
    def num_waiting(self) -> int:
        """Inferences that wait to be executed."""

    def submit(self, inference: Inference) -> None:
        """Take an inference with a valid request; must not block.

        Raises:
            GenserveError: the inference is rejected; no response was sent.
        """

    def close(self) -> None:
        """Fail the waiting inferences, and release all resources; blocks."""


class ModelVersion:
    """One version of a model that answers requests. Safe from any thread.

    Attributes:
        config: the normalised config.
        version: the number of the version's folder.
        statistics: counts requests and executions of the version.
        load_s: duration of the load, seconds.
        labels: the names of classes by output name, for the outputs that have a `label_filename`.
        text_model: None for any other kind of model.
    """

    def __init__(
        self,
        runtime: ModelRuntime,
        *,
        config: ModelConfig,
        version: int,
        statistics: ModelStatistics,
        cache: ResponseCache | None = None,
        labels: Mapping[str, Sequence[str]] | None = None,
        upload: Upload | None = None,
        load_s: float = 0.0,
        histogram_latencies: bool = False,
        text_model: TextModel | None = None,
    ) -> None:
        """Serve by a runtime.

        Args:
            runtime: the started runtime, which `close` closes.
            config: the normalised config.
            version: the number of the version's folder.
            statistics: the statistics to be updated.
            cache: the response cache; None: the model does not use it.
            labels: the names of classes by output name.
            upload: the temporary folder of the model, which is kept as long as this version.
            load_s: duration of the load, seconds.
            histogram_latencies: measure the time to the first response.
            text_model: the text model of the runtime, most of whose requests do not pass through this class.
        """
        self.config = config
        self.version = version
        self.statistics = statistics
        if histogram_latencies:
            statistics.first_response = Histogram(config.first_response_buckets_ms)
        self.load_s = load_s
        self.labels = labels or {}
        self.text_model = text_model
        self.runtime = runtime
        self._validator = RequestValidator(config)
        self._cache = cache
        self._load = next(_LOADS)
        self._upload = upload
        self._reshapes_inputs = any(spec.reshape is not None for spec in config.inputs)
        self._reshapes_outputs = any(spec.reshape is not None for spec in config.outputs)
        self._lock = threading.Lock()
        # Each response passes these steps, unless it is cached or traced.
        self._plain_steps = self._response_steps(lookup=None, span=None)
        self._idle = threading.Condition(self._lock)  # entered by the lock: a condition is slower to enter
        self._pending: dict[Inference, None] = {}  # in the order of their arrival
        self._closing = False

    @property
    def name(self) -> str:
        """The model's name."""
        return self.config.name

    @property
    def ready(self) -> bool:
        """Whether it accepts requests and can execute them."""
        return not self._closing and self.runtime.ready

    @property
    def num_waiting(self) -> int:
        """Accepted requests that are not executed yet."""
        return self.runtime.num_waiting

    @property
    def num_pending(self) -> int:
        """Accepted requests that have not ended."""
        return len(self._pending)

    def submit(self, inference: Inference) -> None:
        """Validate a request and run it.

        Raises:
            InferenceError: the request does not fit the config, or the queue rejects it.
            Closed: this version is being unloaded; another version may have replaced it.
        """
        request = inference.request
        if self.config.decoupled and not inference.takes_stream:
            raise decoupled_error(self.name)
        batch_size = self._validator.check(request)
        with self._lock:
            if self._closing:
                raise Closed(f"model '{self.name}' is being unloaded")
            self._pending[inference] = None
        lookup, span, steps = None, None, self._plain_steps
        if self._cache is not None or request.cause is not None:
            if self._cache is not None:
                lookup = _CacheLookup(self._cache, statistics=self.statistics)
            span = self._open_span(inference)
            steps = self._response_steps(lookup, span)
        inference.accept(model_version=self.version, batch_size=batch_size, span=span, response_steps=steps)
        if self._reshapes_inputs:
            inference.inputs = self._validator.reshaped(request.inputs)
        if lookup is not None and self._answer_from(lookup, inference):
            return
        inference.when_ended(self._ended)
        try:
            self.runtime.submit(inference)
        except Exception as error:  # whatever it is: an unload waits for pending inferences
            if isinstance(error, GenserveError) and inference.ended:
                return  # this version was closed meanwhile, and has failed it
            self._leave(inference)  # a rejected request is not counted
            if inference.span is not None:
                inference.span.close(started_ns=0)
            if isinstance(error, Closed):  # not to be retried on another version
                raise InferenceError(error.message, status=Status.UNAVAILABLE) from error
            raise

    def close(self, *, timeout_s: float) -> None:
        """Reject new requests, wait for the pending ones, fail the ones that take too long, and close."""
        until_s = time.monotonic() + timeout_s
        if self.text_model is not None:
            self.text_model.drain(timeout_s=timeout_s)
        with self._idle:
            self._closing = True
            self._idle.wait_for(lambda: not self._pending, timeout=until_s - time.monotonic())
            late = tuple(self._pending)
        for inference in late:
            inference.fail(_unloaded(self.name))
        self.runtime.close()

    def _ended(self, inference: Inference) -> None:
        self.statistics.ended(inference)
        self._leave(inference)

    def _leave(self, inference: Inference) -> None:
        self._pending.pop(inference, None)
        if not self._closing:
            return  # `close` looks at what is pending after it has set the flag
        with self._lock:
            if not self._pending:
                self._idle.notify_all()

    def _open_span(self, inference: Inference) -> Span | None:
        request = inference.request
        if request.cause is None:
            return None
        return request.cause.open(
            model=self.name,
            version=self.version,
            request_id=request.id,
            inputs=request.inputs.values(),
            at_ns=inference.submitted_ns,
        )

    def _response_steps(self, lookup: _CacheLookup | None, span: Span | None) -> Sequence[ResponseStep]:
        """Return the steps of a response, in their order: the cache keeps it as the model has sent it."""
        steps: list[ResponseStep] = []
        if lookup is not None:
            steps.append(lookup.keep)
        if self._reshapes_outputs:
            steps.append(self._reshape)
        if span is not None:
            steps.append(_record_in_trace)
        if self.statistics.first_response is not None:
            steps.append(partial(_time_first_response, self.statistics.first_response))
        return steps

    def _reshape(
        self,
        _inference: Inference,
        response: InferenceResponse | None,
        _final: bool,  # noqa: FBT001 - ResponseStep
    ) -> InferenceResponse | None:
        return response and self._validator.reshaped_response(response)

    def _answer_from(self, lookup: _CacheLookup, inference: Inference) -> bool:
        """Answer from the cache; return whether it has the response."""
        found = lookup.find(inference.request, load=self._load)
        if found is None:
            return False
        with suppress(Closed):  # this version was closed meanwhile, and has failed it
            inference.send(found, final=True)
        self.statistics.cache_hit_ended(inference, lookup_ns=lookup.lookup_ns)
        self._leave(inference)
        return True


class _CacheLookup:
    """The lookup of one inference in the response cache, which keeps the model's response if it has none."""

    def __init__(self, cache: ResponseCache, *, statistics: ModelStatistics) -> None:
        self.lookup_ns = 0
        self._cache = cache
        self._statistics = statistics
        self._missed: bytes | None = None  # the key that the cache did not have

    def find(self, request: InferenceRequest, *, load: int) -> InferenceResponse | None:
        started_ns = time.monotonic_ns()
        key = self._cache.key(request, load=load)
        found = self._cache.get(key)
        self.lookup_ns = time.monotonic_ns() - started_ns
        self._missed = key if found is None else None
        return found

    def keep(
        self,
        _inference: Inference,
        response: InferenceResponse | None,
        final: bool,  # noqa: FBT001 - ResponseStep
    ) -> InferenceResponse | None:
        if self._missed is None:
            return response  # it comes from the cache
        started_ns = time.monotonic_ns()
        if response is not None and response.error is None:
            self._cache.put(self._missed, response)
        if final:
            insert_ns = time.monotonic_ns() - started_ns
            self._statistics.cache_missed(lookup_and_insert_ns=self.lookup_ns + insert_ns)
        return response


def _record_in_trace(
    inference: Inference,
    response: InferenceResponse | None,
    final: bool,  # noqa: FBT001 - ResponseStep
) -> InferenceResponse | None:
    assert inference.span is not None
    if response is not None:
        inference.span.answered(() if response.error is not None else response.outputs)
    if final:
        inference.span.close(started_ns=inference.started_ns)
    return response


def _time_first_response(
    histogram: Histogram,
    inference: Inference,
    response: InferenceResponse | None,
    _final: bool,  # noqa: FBT001 - ResponseStep
) -> InferenceResponse | None:
    if response is not None and inference.num_responses == 1:
        histogram.observe((time.monotonic_ns() - inference.submitted_ns) / 1e6)
    return response


def _unloaded(model: str) -> InferenceError:
    return InferenceError(
        f"model '{model}' was unloaded before this request ended",
        status=Status.UNAVAILABLE,
        remedy="send it again once the model is ready; an unload waits for --exit-timeout-secs",
    )


class ModelState(StrEnum):
    """Triton's states of a version."""

    LOADING = "LOADING"
    READY = "READY"
    UNLOADING = "UNLOADING"
    UNAVAILABLE = "UNAVAILABLE"


UNLOADED = "unloaded"  # the reason in the index for a version that was unloaded on request or replaced


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexEntry:
    """One line of the repository's index."""

    name: str
    version: int | None = None  # None: the model was never loaded
    state: ModelState | None = None
    reason: str = ""


class ModelTable:
    """The versions of all models, and their states. Any thread may read it: updates replace the table."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[tuple[str, int], IndexEntry] = {}
        # By name and version; the highest of a name also as version -1. Never changed, only replaced.
        self._routes: Mapping[tuple[str, int], ModelVersion] = {}

    @property
    def served(self) -> list[ModelVersion]:
        """All versions that answer, by name and version."""
        found = [(key, served) for key, served in self._routes.items() if key[1] != -1]
        return [served for _, served in sorted(found, key=lambda item: item[0])]

    def index(self) -> list[IndexEntry]:
        """Return the states of all versions, by name and version."""
        with self._lock:
            return [self._entries[key] for key in sorted(self._entries)]

    def states(self, name: str) -> list[IndexEntry]:
        """Return the states of the versions of one model."""
        return [entry for entry in self.index() if entry.name == name]

    def of(self, name: str) -> list[ModelVersion]:
        """Return the versions of a model that answer, ascending."""
        return [served for served in self.served if served.name == name]

    def get(self, name: str, version: int = -1) -> ModelVersion | None:
        """Return a version of a model, or None; -1: the highest that answers."""
        return self._routes.get((name, version))

    def find(self, name: str, version: int = -1) -> ModelVersion:
        """Return a version of a model; -1: the highest that answers.

        Raises:
            InferenceError: there is no such version, with Triton's text.
        """
        served = self.get(name, version)
        if served is not None:
            return served
        raise self.not_found(name, version)

    def has_steps(self, config: ModelConfig | None) -> bool:
        """Whether the models of all steps of an ensemble answer."""
        steps = config.ensemble_steps if config else ()
        return all(self.get(step.model_name, step.model_version) for step in steps)

    def incomplete_ensembles(self) -> list[str]:
        """Return the names of the ensembles that answer, but whose steps do not all; not of text models.

        Adapters whose bases do not answer are among them.
        """
        alone = [served for served in self.served if served.text_model is None]
        incomplete = [served.name for served in alone if not self.has_steps(served.config)]
        return [*incomplete, *(adapter.name for adapter, base in self._adapters() if base is None)]

    def outdated_adapters(self) -> list[str]:
        """Return the names of the adapters whose base has been replaced by the one that answers."""
        return [
            adapter.name
            for adapter, base in self._adapters()
            if base is not None and adapter.text_model and adapter.text_model.base is not base.text_model
        ]

    def _adapters(self) -> list[tuple[ModelVersion, ModelVersion | None]]:
        """Return the adapters that answer, each with the base that answers; None: it does not."""
        served = self.served
        return [(one, self.get(one.config.base_model)) for one in served if one.config.base_model is not None]

    def not_found(self, name: str, version: int) -> InferenceError:
        """Return the error for a version that does not answer, with Triton's text."""
        known = [entry.version for entry in self.states(name)]
        start, status = f"Request for unknown model: '{name}'", Status.NOT_FOUND
        if not known:
            text = "is not found"
        elif version == -1:
            text = "has no available versions"
        elif version in known:
            text, status = f"version {version} is not at ready state", Status.UNAVAILABLE
        else:
            text = f"version {version} is not found"
        return InferenceError(f"{start} {text}", status=status)

    def set_state(self, name: str, version: int, state: ModelState, *, reason: str = "") -> None:
        """Set the state of a version in the index."""
        with self._lock:
            self._entries[name, version] = IndexEntry(name=name, version=version, state=state, reason=reason)

    def put(self, name: str, fresh: Iterable[ModelVersion]) -> list[ModelVersion]:
        """Serve only the `fresh` versions of a model; return the versions that no longer answer."""
        fresh = list(fresh)
        with self._lock:
            old = [
                served
                for (n, version), served in self._routes.items()
                if n == name and version != -1 and served not in fresh
            ]
            routes = {key: served for key, served in self._routes.items() if key[0] != name}
            self._entries = {
                key: entry
                for key, entry in self._entries.items()
                if key[0] != name or entry.state is not ModelState.LOADING
            }
            for served in sorted(fresh, key=lambda served: served.version):
                routes[name, served.version] = routes[name, -1] = served
                self._entries[name, served.version] = IndexEntry(
                    name=name, version=served.version, state=ModelState.READY
                )
            self._routes = routes
        return old
