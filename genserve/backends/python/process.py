"""Process: a python model in a process of its own, where a crash takes nothing else with it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from genserve.backends.python.host import Host
from genserve.backends.python.process_side import ModelSetup
from genserve.backends.python.stub import Stub
from genserve.inference import Inference

__all__ = ["ModelProcess"]

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 30.0
_ENDS_WITHIN_S = 15.0


class ModelProcess:
    """Runs a PythonModel elsewhere; its methods are those of PythonModel.

    When the process dies, its requests fail, and it is started anew, after a pause that doubles each time.
    """

    def __init__(self, setup: ModelSetup, *, host: Host, ends_within_s: float = _ENDS_WITHIN_S) -> None:
        """Start the process, and wait until the model is initialized.

        Args:
            setup: of the model.
            host: what its code may reach.
            ends_within_s: a process that takes longer to finalize its model is terminated, and killed if
                that takes as long again.

        Raises:
            InferenceError: what the model raised.
        """
        self._setup = setup
        self._host = host
        self._ends_within_s = ends_within_s
        self._closing = threading.Event()
        self._lock = threading.Lock()  # `close` reaches each process that is started
        self._start()
        self._reader = threading.Thread(target=self._serve, name=f"process-{host.instance}", daemon=True)
        self._reader.start()

    def execute(self, batch: Sequence[Inference]) -> None:
        """Have the model answer a batch.

        Raises:
            InferenceError: what the model raised; or its process is dead.
        """
        self._stub.execute(batch)

    def is_ready(self) -> bool:
        """Whether the process lives, and the model says that it is ready; one that has nothing to say is."""
        return self._stub.is_ready()

    def close(self) -> None:
        """Finalize the model, and end the process."""
        with self._lock:
            self._closing.set()
        self._stub.close(within_s=self._ends_within_s)
        self._reader.join()

    def abort(self) -> None:
        """Kill the process: what it executes fails, and it is not started again."""
        with self._lock:
            self._closing.set()
        logger.error("the process of %s executes without an end: killed", self._host.instance)
        self._stub.kill()

    def _start(self) -> None:
        with self._lock:
            if self._closing.is_set():
                return
            self._stub = Stub(self._setup, host=self._host)
        self._stub.start()

    def _serve(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            self._stub.serve()
            if self._closing.is_set():
                return
            if self._stub.has_executed:
                pause_s = _FIRST_PAUSE_S
            logger.error("the process of %s died; it is started again in %s s", self._host.instance, pause_s)
            while not self._stub.alive:
                if self._closing.wait(pause_s):
                    return
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                try:
                    self._start()
                except Exception:
                    logger.exception("the process of %s did not start", self._host.instance)
