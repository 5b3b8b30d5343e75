"""Repository: the models of a server that loads them itself."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

from genserve.backends.onnx_session import ExternalWeights
from genserve.errors import GenserveError, InferenceError, Status
from genserve.generation_metrics import Metrics
from genserve.inference import Inference
from genserve.repository.load_errors import stopping
from genserve.repository.load_request import LoadRequest
from genserve.repository.model_versions import ModelState
from genserve.repository.on_demand import ModelUse, OnDemandModels
from genserve.repository.options import ControlMode, RepositoryOptions
from genserve.repository.served_models import ServedModels, not_found
from genserve.request_context import current_request
from genserve.textmodel.text_model import TextModel

logger = logging.getLogger(__name__)

_SETTLE_S = 1.0  # files that have not changed for this long are complete


class Repository(ServedModels):
    """Models that are loaded in this process: at the start, on request, or when their folders change."""

    def __init__(
        self,
        roots: Iterable[Path],
        *,
        options: RepositoryOptions | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        """Read the folders; nothing is loaded before `start`.

        Raises:
            RepositoryError: a root is not a folder.
        """
        super().__init__(roots, options=options or RepositoryOptions(), metrics=metrics or Metrics())
        self._started = self._stopping = False
        self._pinned: tuple[str, ...] = ()
        if self.options.control_mode is ControlMode.ON_DEMAND:
            self.on_demand = OnDemandModels(self.lifecycle, self.table, options=self.options)
        self._closing = threading.Event()
        self._poller: threading.Thread | None = None

    @property
    def state(self) -> ModelState:
        """LOADING until `start` has tried to load all; UNAVAILABLE if a load failed or an engine died.

        As in Triton, a reload that fails changes nothing: the old versions answer. Of the models that are
        loaded on demand, those count that are to stay.
        """
        if not self._started:
            return ModelState.LOADING
        counted = self.errors if self.on_demand is None else {*self.errors} & {*self._pinned}
        failed = any(self.table.get(name) is None for name in counted)
        is_ready = not failed and all(served.runtime.ready for served in self.table.served)
        return ModelState.READY if is_ready else ModelState.UNAVAILABLE

    def load(
        self,
        name: str,
        *,
        config: str = "",
        files: Mapping[str, bytes | Path] | None = None,
        allow_code: bool = True,
    ) -> None:
        """See `ServedModels.load`. Raises InferenceError."""
        current_request().change = ", ".join([*(["config"] if config else []), *(files or ())])
        if self.on_demand is not None:
            if config or files:
                raise _only_from_folders()
            use = self.on_demand.use(name).result()
            try:
                self.lifecycle.load(LoadRequest(name=name))  # again, if its files have changed
                self.on_demand.note_reload(name)
            finally:
                use.end()
            return
        if self.options.control_mode is not ControlMode.EXPLICIT:
            raise _not_explicit()
        if self._stopping:
            raise stopping()
        request = LoadRequest(name=name, config_json=config, files=files, allow_code=allow_code)
        self.lifecycle.load(request)

    def unload(self, name: str, *, dependents: bool = False) -> None:
        """See `ServedModels.unload`. Raises InferenceError."""
        current_request().change = "with its dependents" if dependents else ""
        if self.on_demand is not None:
            self.on_demand.release(name)
            return
        if self.options.control_mode is not ControlMode.EXPLICIT:
            raise _not_explicit()
        self.lifecycle.unload(name, dependents=dependents)

    def start(self, names: Iterable[str] | None = None) -> None:
        """Load the named models, or all with None; a failed load is recorded in `errors`.

        Raises:
            ModelNotFound: one of `names` is not in the repository.
        """
        entries = self.lifecycle.entries
        self.wanted = list(entries if names is None else names)
        for name in self.wanted:
            if name not in entries:
                raise not_found(name, self.text_model_names)
        if self.on_demand is not None:
            self._pinned, self.wanted = tuple(self.wanted), None
            self.on_demand.start(self._pinned)
            self._started = True
            return
        self.lifecycle.note_folders()
        # Polling means that somebody changes the files of loaded models.
        ExternalWeights.mapped = self.options.control_mode is not ControlMode.POLL
        wanted = self.lifecycle.owners(self.wanted)
        alone = [entry for entry in wanted if not entry.is_ensemble and entry.base_model is None]
        with ThreadPoolExecutor(self.options.load_threads, thread_name_prefix="load") as pool:
            for future in [pool.submit(self.lifecycle.load_noted, entry) for entry in alone]:
                future.result()
        for entry in sorted(wanted, key=lambda entry: entry.base_model is not None):  # adapters last
            if entry not in alone:
                self.lifecycle.load_noted(entry)
        self._started = True
        if self.options.control_mode is ControlMode.POLL:
            self._poller = threading.Thread(target=self._poll, name="repository-poll", daemon=True)
            self._poller.start()

    def start_text_model(self, name: str) -> TextModel:
        """Load one text model with its stages, and return it; see `start`.

        Raises:
            GenserveError: it cannot be loaded, or is none.
        """
        self.start([name])
        if error := next(iter(self.errors.values()), None):
            raise error
        return self.text_model(name)

    def _submit_once_loaded(self, inference: Inference) -> bool:
        """Load the model on demand, which the code of another model may call; see `ServedModels`."""
        name = inference.request.model_name
        if self.on_demand is None or name not in self.lifecycle.entries or self.table.get(name) is not None:
            return False
        loading = self.on_demand.use(name, is_nested=True)
        loading.add_done_callback(partial(self._submit_loaded, inference))
        return True

    def _submit_loaded(self, inference: Inference, loading: Future[ModelUse]) -> None:
        request = inference.request
        try:
            use = loading.result()
            inference.when_ended(lambda _: use.end())
            self.table.find(request.model_name, request.model_version)  # or it would be loaded again
            self.submit(inference)
        except GenserveError as error:
            inference.fail(error)

    def reject_loads(self) -> None:
        """Reject load requests from now on: the server is stopping."""
        self._stopping = True

    def close(self) -> None:
        """Unload everything; a second call does nothing."""
        self._closing.set()
        if self._poller is not None:
            self._poller.join()
        if self.on_demand is not None:
            self.on_demand.close()
        self.lifecycle.close()

    def _poll(self) -> None:
        """Follow changes of the folders until the repository closes."""
        wait_s = self.options.poll_s
        while not self._closing.wait(wait_s):
            wait_s = self.options.poll_s
            try:
                if self.lifecycle.follow_folders():
                    wait_s = min(wait_s, _SETTLE_S)
            except Exception:
                logger.exception("polling the repository failed")


def _only_from_folders() -> InferenceError:
    return InferenceError(
        "a model that is loaded on demand has its config and files from its folder",
        status=Status.UNSUPPORTED,
        remedy="start the server with --model-control-mode explicit, or change the folder",
    )


def _not_explicit() -> InferenceError:
    return InferenceError(
        "explicit model load / unload is not allowed if polling is enabled",
        status=Status.UNAVAILABLE,
        remedy="start the server with --model-control-mode explicit",
    )
