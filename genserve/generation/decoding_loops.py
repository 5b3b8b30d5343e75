"""Decoding loops: one coroutine of the repository's `decode` per token sequence."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from typing import Any

from genserve.errors import SEE_LOG, GenserveError, ModelFailed
from genserve.generation.request import Request
from genserve.generation.token_sequence import TokenSequence, Want
from genserve.request import FinishReason

__all__ = ["DecodeFunction", "DecodingLoops"]

logger = logging.getLogger(__name__)

DecodeFunction = Callable[[TokenSequence], Coroutine[Any, Any, None]]


class DecodingLoops:
    """The loops that are under way. Belongs to the engine's thread, which runs all of them.

    A loop is a plain coroutine without an event loop: it can wait for the next token or for the
    next row of logits, and the engine resumes it with just that.
    """

    def __init__(self, decode: DecodeFunction) -> None:
        self._decode = decode
        self._loops: dict[Request, Coroutine[Any, Any, None]] = {}
        self._wants: dict[Request, Want] = {}

    def __len__(self) -> int:
        return len(self._loops)

    def want(self, sequence: TokenSequence) -> Want | None:
        """Return what the sequence's loop waits for; None if it has ended. Starts it if need be.

        Raises:
            GenserveError: the loop failed in its first lines.
        """
        if sequence not in self._loops:
            self._loops[sequence] = self._decode(sequence)
            self._advance(sequence, None)
        return self._wants.get(sequence)

    def resume(self, sequence: TokenSequence, value: Any) -> None:
        """Hand the loop what it waits for, and run it up to its next wait or its end.

        Raises:
            GenserveError: the loop raised, or awaited something else, or did not append a token.
        """
        self._advance(sequence, value)
        if not sequence.finished and sequence.num_pending == 0:
            raise ModelFailed("the decoding loop waited again without appending a token")

    def drop(self, request: Request) -> None:
        """Close the loop of a request that leaves; fine if it has none."""
        self._wants.pop(request, None)
        loop = self._loops.pop(request, None)
        if loop is None:
            return
        try:
            loop.close()
        except BaseException:  # its `finally` raised, or it awaits again: nobody is left to be told
            logger.exception("decoding loop failed while it was closed")

    def _advance(self, sequence: TokenSequence, value: Any) -> None:
        try:
            want = self._loops[sequence].send(value)
        except StopIteration:
            self._wants.pop(sequence, None)
            if not sequence.finished:
                sequence.finish(FinishReason.END_OF_SEQUENCE)
            return
        except GenserveError:
            raise
        except BaseException as error:  # sys.exit() in a model.py must not end the engine's thread
            logger.exception("decoding loop failed")
            raise ModelFailed("the decoding loop failed", remedy=SEE_LOG) from error
        if not isinstance(want, Want):
            logger.error("decoding loop awaited a %s", type(want).__name__)
            raise ModelFailed(
                "the decoding loop awaited neither a token nor logits",
                remedy="`decode` may await sequence.sample() and sequence.logits(), nothing else",
            )
        self._wants[sequence] = want
