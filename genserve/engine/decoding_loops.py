"""Decoding loops: the coroutines of the repository's `decode`, one for each token sequence."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from typing import Any

from genserve.completion import FinishReason
from genserve.engine.token_sequence import Awaited, TokenSequence
from genserve.errors import SEE_TRACEBACK, GenserveError, ModelFailed, exception_text

logger = logging.getLogger(__name__)

DecodeFunction = Callable[[TokenSequence], Coroutine[Any, Any, None]]


class DecodingLoops:
    """Starts, resumes and closes the decoding loops of token sequences. Belongs to the engine's thread.

    A loop is a plain coroutine without an event loop: it can only await the next token or the next row of
    logits, and the engine resumes it with it.
    """

    def __init__(self, decode: DecodeFunction) -> None:
        self._decode = decode

    def start(self, sequence: TokenSequence) -> None:
        """Create the loop of a sequence, and run it to its first await or its end.

        Raises:
            GenserveError: the loop raised, or awaited something else.
        """
        sequence.loop = self._decode(sequence)
        self._advance(sequence, None)

    def resume(self, sequence: TokenSequence, value: Any) -> None:
        """Send the loop the value that it awaits, and run it to its next await or its end.

        Raises:
            GenserveError: the loop raised, awaited something else, or did not append a token.
        """
        self._advance(sequence, value)
        if sequence.finish_reason is None and sequence.num_pending == 0:
            raise ModelFailed(
                "the decoding loop awaited again without appending a token",
                remedy="call sequence.append() after each await",
            )

    def close(self, sequence: TokenSequence) -> None:
        """Close the loop of a finished or removed sequence; does nothing if it has none."""
        loop, sequence.loop, sequence.awaited = sequence.loop, None, None
        if loop is None:
            return
        try:
            loop.close()
        except BaseException:  # its `finally` raised, or it awaited again; no request can receive the error
            logger.exception("decoding loop failed while it was closed")

    def _advance(self, sequence: TokenSequence, value: Any) -> None:
        assert sequence.loop is not None
        try:
            awaited = sequence.loop.send(value)
        except StopIteration:
            sequence.awaited = None
            if not sequence.finished:
                sequence.finish(FinishReason.STOP)
            return
        except GenserveError:
            raise
        except BaseException as error:  # sys.exit() in a model.py must not end the engine's thread
            logger.exception("decoding loop failed")
            text = exception_text(error)
            raise ModelFailed(f"the decoding loop failed: {text}", remedy=SEE_TRACEBACK) from error
        if not isinstance(awaited, Awaited):
            logger.error("decoding loop awaited a %s", type(awaited).__name__)
            raise ModelFailed(
                "the decoding loop awaited neither a token nor logits",
                remedy="`decode` may await sequence.sample() and sequence.logits(), nothing else",
            )
        sequence.awaited = awaited
