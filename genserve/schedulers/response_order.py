"""Response order: responses leave in the order in which their requests were executed."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from functools import partial

from genserve.inference import Inference, InferenceResponse, OnResponse

__all__ = ["ResponseOrder"]


class _Turn:
    """The responses of one request that have not left yet."""

    def __init__(self, on_response: OnResponse) -> None:
        self.on_response = on_response
        self.responses: deque[tuple[InferenceResponse | None, bool]] = deque()


class ResponseOrder:
    """Holds responses back until those of all earlier requests have left; safe from any thread.

    The responses of one request are passed on as they come, once it is first.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._turns: deque[_Turn] = deque()
        self._is_passing_on = False

    def enter(self, inference: Inference) -> None:
        """Give an inference the last place; from now on its responses go through here."""
        turn = _Turn(inference.on_response)
        with self._lock:
            self._turns.append(turn)
        inference.on_response = partial(self._respond, turn)

    def _respond(self, turn: _Turn, response: InferenceResponse | None, final: bool) -> None:  # noqa: FBT001
        with self._lock:
            turn.responses.append((response, final))
            if self._is_passing_on:
                return  # whoever does it now finds this one too; so there is no lock around the callbacks
            self._is_passing_on = True
        for on_response, passed, is_final in self._due():
            on_response(passed, is_final)

    def _due(self) -> Iterator[tuple[OnResponse, InferenceResponse | None, bool]]:
        while True:
            with self._lock:
                if not self._turns or not self._turns[0].responses:
                    self._is_passing_on = False
                    return
                turn = self._turns[0]
                response, final = turn.responses.popleft()
                if final:
                    self._turns.popleft()
            yield turn.on_response, response, final
