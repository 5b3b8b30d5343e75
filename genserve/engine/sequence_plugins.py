"""Sequence plug-ins: code of the repository, or of genserve, that takes part in decoding one sequence.

The three kinds are plain callables and objects of a decoder stage's model.py. Each is made for one sequence
and lives as long as it does, preemptions included. An exception in a plug-in ends its own sequence, with an
error that names the plug-in.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from genserve.errors import SEE_TRACEBACK, GenserveError, ModelFailed, exception_text
from genserve.sampling.logits_array import LogitsArray
from genserve.sampling.logits_processors import RowEdit
from genserve.sampling.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

T = TypeVar("T")

# When a processor is called: before the request's own rules, or after its penalties and before temperature.
HOOKS = ("pre", "post_penalty")


class Vocabulary(Protocol):
    """The part of the model's tokenizer that plug-ins may use."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The ids that end an answer."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids, without special tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginContext:
    """The first argument of a plug-in's factory; the arguments of the request follow it."""

    tokenizer: Vocabulary
    vocab_size: int                         # the length of a row of logits
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int                               # the sequence's seed; draws that use it are reproducible


class LogitsProcessor(Protocol):
    """Changes the logits before a token is sampled; its attribute `hook` says when, by default `pre`.

    Called once for each token that `sample()` returns.
    """

    def __call__(self, token_ids: Sequence[int], logits: LogitsArray) -> LogitsArray | None:
        """Change `logits` in place, or return new ones.

        Args:
            token_ids: prompt and answer; read only.
            logits: [vocab_size] float32, of numpy, or of torch if the model runs on a GPU.
        """


class StopRule(Protocol):
    """Ends the answer; called after each token that does not end it anyway."""

    def __call__(self, token_ids: Sequence[int], text: str) -> bool:
        """Return whether the answer ends here.

        Args:
            token_ids: prompt and answer, the new token included; read only.
            text: the text that the token has added; may be empty.
        """


class OutputParser(Protocol):
    """Rewrites the text of an answer while it streams."""

    def push(self, text: str) -> str:
        """Add a piece of text; return the text that can be shown now."""

    def flush(self) -> str:
        """Return the rest of the text; called once, at the end."""


class SequencePlugins:
    """The plug-ins of one token sequence. Belongs to the engine's thread.

    Attributes:
        failure: the error of a processor that failed; its row has been NaN since.
        stop_rules: names and rules, in the order in which they are called.
    """

    __slots__ = ("_processors", "failure", "stop_rules")

    def __init__(
        self,
        *,
        processors: Sequence[tuple[str, LogitsProcessor]] = (),
        stop_rules: Sequence[tuple[str, StopRule]] = (),
    ) -> None:
        """Store the named plug-ins, in the order in which they are called."""
        self._processors = {
            hook: [(name, p) for name, p in processors if getattr(p, "hook", HOOKS[0]) == hook]
            for hook in HOOKS
        }
        self.stop_rules = tuple(stop_rules)
        self.failure: GenserveError | None = None

    def processor(self, kind: type[T]) -> T | None:
        """Return the first processor of a kind; None: there is none."""
        return next((p for each in self._processors.values() for _, p in each if isinstance(p, kind)), None)

    def add(self, name: str, processor: LogitsProcessor) -> None:
        """Call one more processor, after the others of its hook."""
        self._processors[getattr(processor, "hook", HOOKS[0])].append((name, processor))

    @property
    def processes(self) -> bool:
        """Whether there is a logits processor."""
        return any(self._processors.values())

    def edits(self, hook: str, token_ids: Sequence[int], *, row: int) -> tuple[RowEdit, ...]:
        """Return the edits of one hook to the logits after `token_ids`, row `row` of the step's."""
        processors = self._processors[hook]
        return (RowEdit(row=row, apply=partial(self._process, processors, token_ids)),) if processors else ()

    def stopped_by(self, token_ids: Sequence[int], text: str) -> str | None:
        """Return the name of the first rule that ends the answer after `token_ids`; None: none does.

        Raises:
            ModelFailed: a rule raised.
        """
        for name, rule in self.stop_rules:
            with plugin_errors("stop rule", name):
                if rule(token_ids, text):
                    return name
        return None

    def _process(
        self, processors: Sequence[tuple[str, LogitsProcessor]], token_ids: Sequence[int], row: LogitsArray
    ) -> None:
        for name, processor in processors:
            try:
                with plugin_errors("logits processor", name):
                    _replace(row, processor(token_ids, row), name=name)
            except GenserveError as error:  # fails this request only: its row becomes NaN
                self.failure = self.failure or error
                row[:] = float("nan")
                return


@contextmanager
def plugin_errors(kind: str, name: str) -> Iterator[None]:
    """Convert an exception of a plug-in.

    Raises:
        ModelFailed: the plug-in raised; the message has its kind and name, and the exception's message.
    """
    try:
        yield
    except GenserveError:
        raise
    except BaseException as error:  # sys.exit() in a model.py must not end the engine's thread
        logger.exception("%s %s failed", kind, name)
        text = f"the {kind} {name!r} failed: {exception_text(error)}"
        raise ModelFailed(text, remedy=SEE_TRACEBACK) from error


def _replace(row: LogitsArray, processed: Any, *, name: str) -> None:
    if processed is None or processed is row:
        return
    shape = getattr(processed, "shape", None)
    if shape != row.shape:
        logger.error("logits processor %s returned a %s", name, type(processed).__name__)
        found = "no logits" if shape is None else f"logits of shape {tuple(shape)}"
        raise ModelFailed(
            f"the logits processor {name!r} returned {found}",
            remedy=f"return nothing, or logits of shape {tuple(row.shape)}",
        )
    row[:] = processed
