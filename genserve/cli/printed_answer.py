"""Printed answer: one streamed answer, written as it comes, and its figures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from genserve.request import FinishReason, Usage
from genserve.stream import Stream

__all__ = ["PrintedAnswer", "print_answer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrintedAnswer:
    """What was written, and how fast."""

    text: str
    num_tokens: int
    first_token_s: float | None = None          # from the question to the first token; None: none came
    last_token_s: float | None = None           # from the question to the last one
    finish_reason: FinishReason | None = None   # None: stopped by Ctrl-C
    usage: Usage | None = None

    @property
    def tokens_per_s(self) -> float | None:
        """The pace after the first token; None if there is nothing to measure."""
        if self.first_token_s is None or self.last_token_s is None or self.last_token_s <= self.first_token_s:
            return None
        return (self.num_tokens - 1) / (self.last_token_s - self.first_token_s)

    def summary(self, *, max_length: int | None) -> str:
        """Return the figures in one line; `max_length` is the model's context, if it is known."""
        parts = [f"{self.num_tokens} tokens"]
        if self.first_token_s is not None:
            parts.append(f"first after {self.first_token_s * 1000:.0f} ms")
        if self.tokens_per_s is not None:
            parts.append(f"{self.tokens_per_s:.1f} tokens/s")
        if self.usage is not None:
            used = self.usage.prompt_tokens + self.usage.completion_tokens
            parts.append(f"context {used}" + (f" of {max_length}" if max_length else ""))
        parts.append(self.finish_reason.value if self.finish_reason else "stopped")
        return " · ".join(parts)


def print_answer(
    open_stream: Callable[[], Stream], *, write: Callable[[str], None], clock: Callable[[], float]
) -> PrintedAnswer:
    """Write an answer as it comes; Ctrl-C closes the stream and keeps what came.

    Args:
        open_stream: asks; the wait for the first token counts from here.
        write: takes each piece of text.
        clock: seconds, monotonic.

    Raises:
        GenserveError: the model failed, or the question was refused.
    """
    asked_s = clock()
    texts: list[str] = []
    times_s: list[float] = []
    finish_reason, usage = None, None
    try:
        with open_stream() as stream:
            for delta in stream:
                times_s += [clock() - asked_s] * len(delta.token_ids)
                texts.append(delta.text)
                write(delta.text)
                finish_reason, usage = delta.finish_reason, delta.usage
    except KeyboardInterrupt:
        pass  # leaving the block has closed the stream
    return PrintedAnswer(
        text="".join(texts),
        num_tokens=usage.completion_tokens if usage else len(times_s),
        first_token_s=times_s[0] if times_s else None,
        last_token_s=times_s[-1] if times_s else None,
        finish_reason=finish_reason,
        usage=usage,
    )
