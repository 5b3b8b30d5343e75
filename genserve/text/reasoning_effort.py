"""Reasoning effort: the variables by which a chat template controls how much its model reasons.

Templates differ in the variables that they read, and in the words that they take as an effort: some take
any, some raise for all but two. What a template does is learnt from it when it is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import Any

from genserve.prompt import NO_EFFORTS, NO_REASONING, Reasoning

# Turn reasoning on and off: the first in Qwen's, GLM's, Gemma's and SmolLM3's templates, the second in
# Granite's, DeepSeek's and Kimi's.
_SWITCHES = ("enable_thinking", "thinking")
_EFFORT = "reasoning_effort"
_BUDGET = "thinking_budget"     # Seed-OSS's, in tokens
# The efforts of all APIs and templates, in their order; `no_think` is Hunyuan's word for none.
_RANKS: Mapping[str, int] = {
    "none": 0, "no_think": 0, "minimal": 1,
    "low": 2, "medium": 3, "high": 4, "xhigh": 5, "max": 6, "ultra": 7,
}  # fmt: skip
# The words that models know whose template writes any word into the prompt, such as gpt-oss.
_SPOKEN = frozenset({"low", "medium", "high"})
_NO_WORD = "zzzz"


class ReasoningVariables:
    """The variables of one template."""

    def __init__(self, names: Set[str], render: Callable[[Mapping[str, Any]], str | None]) -> None:
        """Learn what a template takes.

        Args:
            names: the variables that it reads.
            render: returns what it writes for a short chat with these variables; None: it rejects them.
        """
        self._switches = [name for name in _SWITCHES if name in names]
        self._has_effort = _EFFORT in names
        self._has_budget = _BUDGET in names
        self._words = self._learnt_words(render) if self._has_effort else None

    def _learnt_words(self, render: Callable[[Mapping[str, Any]], str | None]) -> Set[str] | None:
        """Return the efforts that the template takes; None: it does something of its own with any word."""
        on = dict.fromkeys(self._switches, True)
        written = render(on | {_EFFORT: _NO_WORD})
        if written is not None:
            return _SPOKEN if _NO_WORD in written else None
        return {word for word in _RANKS if render(on | {_EFFORT: word}) is not None} or None

    def values(self, reasoning: Reasoning) -> dict[str, Any]:
        """Return the variables to set; empty: the template reads nothing of what is asked."""
        enabled, effort = reasoning.is_enabled, reasoning.effort
        values: dict[str, Any] = {} if enabled is None else dict.fromkeys(self._switches, enabled)
        budget = 0 if enabled is False else reasoning.budget
        if self._has_budget and budget is not None:
            values[_BUDGET] = budget
        if enabled is False:
            if values:
                return values
            effort = effort if effort in NO_EFFORTS else NO_REASONING
        word = self._word(effort) if self._has_effort and effort is not None else None
        return values if word is None else values | {_EFFORT: word}

    def _word(self, effort: str) -> str | None:
        """Return the effort that the template takes and that is the nearest; None: there is none.

        Between two the greater one is the nearest, and none is never near to some.
        """
        if self._words is None or effort in self._words:
            return effort
        rank = _RANKS.get(effort)
        if rank is None:
            return None
        words = [word for word in self._words if rank < _RANKS["low"] or _RANKS[word] >= _RANKS["low"]]
        return min(words, key=lambda word: (abs(_RANKS[word] - rank), -_RANKS[word]), default=None)
