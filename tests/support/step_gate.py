"""Step gate: lets a test decide when the engine of a text model takes its next steps."""

from __future__ import annotations

import threading
from typing import Any

from genserve.textmodel.text_model import TextModel


class StepGate:
    """While the gate is shut, the engine stays in the current forward until the test lets it go on.

    Attributes:
        num_begun: forwards that have begun.
    """

    def __init__(self, model: TextModel) -> None:
        self._model: Any = model.engine._engine._runner._model
        self._forward = self._model.forward
        self._changed = threading.Condition()
        self._allowed = 0
        self._is_shut = False
        self.num_begun = 0
        self._model.forward = self._gated

    def shut(self) -> None:
        with self._changed:
            self._is_shut, self._allowed = True, 0

    def allow(self, count: int) -> None:
        """Let the engine complete `count` forwards, including the current one."""
        with self._changed:
            self._allowed += count
            self._changed.notify_all()

    def open(self) -> None:
        with self._changed:
            self._is_shut = False
            self._changed.notify_all()

    def remove(self) -> None:
        self.open()
        self._model.forward = self._forward

    def _gated(self, batch: Any) -> Any:
        with self._changed:
            self.num_begun += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._is_shut or self._allowed)
            if self._is_shut:
                self._allowed -= 1
        return self._forward(batch)
