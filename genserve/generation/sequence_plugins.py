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
from typing import Any, Protocol

from genserve.errors import SEE_LOG, GenserveError, ModelFailed
from genserve.generation.logits_model import LogitsArray
from genserve.sampling.logits_edits import RowEdit
from genserve.sampling.sampling_params import SamplingParams

__all__ = [
    "HOOKS",
    "LogitsProcessor",
    "OutputParser",
    "PluginContext",
    "SequencePlugins",
    "StopRule",
    "ThinkingBudget",
    "plugin_call",
]


logger = logging.getLogger(__name__)

# Where a processor acts: before all rules of the request, or after those that change single logits and
# before temperature.
HOOKS = ("pre", "post_penalty")


class Vocabulary(Protocol):
    """What a plug-in may ask of the model's tokenizer."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Each of them ends an answer."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids, without special tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginContext:
    """What a plug-in is told when it is made, besides its arguments."""

    tokenizer: Vocabulary
    vocab_size: int                         # the length of a row of logits
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int                               # of the sequence: draw by it, and a text can be had again


class LogitsProcessor(Protocol):
    """Changes the logits before a token is picked; its attribute `hook` says when, `pre` where it has none.

    Called once for each token that `sample()` picks.
    """

    def __call__(self, token_ids: Sequence[int], logits: LogitsArray) -> LogitsArray | None:
        """Change `logits` in place, or return others.

        Args:
            token_ids: prompt and answer; read only.
            logits: [vocab_size] float32, of numpy, or of torch where the model runs on a GPU.
        """


class StopRule(Protocol):
    """Ends the answer; called after each token that does not end it by itself."""

    def __call__(self, token_ids: Sequence[int], text: str) -> bool:
        """Return whether the answer ends here.

        Args:
            token_ids: prompt and answer, the new token included; read only.
            text: what the token has added to the text; may be empty.
        """


class OutputParser(Protocol):
    """Rewrites the text of an answer while it streams."""

    def push(self, text: str) -> str:
        """Take the next piece of text; return what is now sure of the text to show."""

    def flush(self) -> str:
        """Return the rest; called once, at the end."""


class SequencePlugins:
    """The plug-ins of one token sequence. Belongs to the engine's thread.

    Attributes:
        failure: what a processor has raised; its row is NaN since.
        stop_rules: by name, in their order.
    """

    __slots__ = ("_processors", "failure", "stop_rules")

    def __init__(
        self,
        *,
        processors: Sequence[tuple[str, LogitsProcessor]] = (),
        stop_rules: Sequence[tuple[str, StopRule]] = (),
    ) -> None:
        """Take the named plug-ins, in their order."""
        self._processors = {
            hook: [(name, p) for name, p in processors if getattr(p, "hook", HOOKS[0]) == hook]
            for hook in HOOKS
        }
        self.stop_rules = tuple(stop_rules)
        self.failure: GenserveError | None = None

    @property
    def processes(self) -> bool:
        """Whether there is a logits processor."""
        return any(self._processors.values())

    def edits(self, hook: str, token_ids: Sequence[int], *, row: int) -> tuple[RowEdit, ...]:
        """Return what is done to the logits after these tokens, which lie in row `row`, at one hook."""
        processors = self._processors[hook]
        return (RowEdit(row=row, apply=partial(self._process, processors, token_ids)),) if processors else ()

    def stopped_by(self, token_ids: Sequence[int], text: str) -> str | None:
        """Return the first rule that ends the answer after these tokens, the last of which added `text`.

        Raises:
            ModelFailed: a rule raised.
        """
        for name, rule in self.stop_rules:
            with plugin_call("stop rule", name):
                if rule(token_ids, text):
                    return name
        return None

    def _process(
        self, processors: Sequence[tuple[str, LogitsProcessor]], token_ids: Sequence[int], row: LogitsArray
    ) -> None:
        for name, processor in processors:
            try:
                with plugin_call("logits processor", name):
                    _replace(row, processor(token_ids, row), name=name)
            except GenserveError as error:  # the other rows have done nothing
                self.failure = self.failure or error
                row[:] = float("nan")
                return


@contextmanager
def plugin_call(kind: str, name: str) -> Iterator[None]:
    """Name the plug-in in whatever it raises.

    Raises:
        ModelFailed: it raised.
    """
    try:
        yield
    except GenserveError:
        raise
    except BaseException as error:  # sys.exit() in a model.py must not end the engine's thread
        logger.exception("%s %s failed", kind, name)
        raise ModelFailed(f"the {kind} {name!r} failed", remedy=SEE_LOG) from error


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


class ThinkingBudget:
    """Picks the end tag where the budget is used up; a `LogitsProcessor` of one token sequence.

    A text may think several times; each time has the whole budget.
    """

    hook = "post_penalty"   # no rule of the request forbids the end

    def __init__(
        self, *, num_tokens: int, start_id: int, end_id: int, num_prompt_tokens: int, begun: bool
    ) -> None:
        """Begin before the first token.

        Args:
            num_tokens: the budget, 0 or more.
            start_id: of the tag that begins a thought.
            end_id: of the tag that ends it.
            num_prompt_tokens: what follows them is the answer.
            begun: the prompt ends within a thought, of which its own tokens do not count.
        """
        self._num_tokens = num_tokens
        self._start_id = start_id
        self._end_id = end_id
        self._num_read = num_prompt_tokens
        # How many tokens there were before the thought, its tag included.
        self._began = num_prompt_tokens if begun else None

    def __call__(self, token_ids: Sequence[int], logits: LogitsArray) -> None:
        """Forbid all but the end tag, or nothing."""
        for position in range(self._num_read, len(token_ids)):
            if token_ids[position] == self._start_id:
                self._began = position + 1
            elif token_ids[position] == self._end_id:
                self._began = None
        self._num_read = len(token_ids)
        if self._began is not None and len(token_ids) - self._began >= self._num_tokens:
            logits[:] = float("-inf")
            logits[self._end_id] = 0.0
