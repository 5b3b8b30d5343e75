"""Reasoning fields: how the model reasons before it answers, in the words of several APIs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import Annotated, TypeAlias

from pydantic import BeforeValidator, Field

from genserve.prompt import Reasoning
from genserve.server.http.request_body import Body, TolerantBody

_MOST = 2**31 - 1


def _switch(value: object) -> object:
    return {"enabled": value} if isinstance(value, bool) else value


def _typed_switch(value: object) -> object:
    return {"type": "enabled" if value else "disabled"} if isinstance(value, bool) else value


def _lowered(effort: object) -> object:
    return effort.lower() if isinstance(effort, str) else effort


# One word, so it brings no special tokens into a prompt.
ReasoningEffort: TypeAlias = Annotated[
    Annotated[str, Field(pattern=r"^[a-z_]{1,32}$")] | None,
    BeforeValidator(_lowered),
    Field(
        description="How much the model reasons, such as `low`, `medium` or `high`, as far as its chat "
        "template has variables for that; `none` and `minimal` turn reasoning off.",
    ),
]


def joined_reasoning(asked: Mapping[str, Reasoning], *, has_form: bool) -> Reasoning:
    """Return what several fields ask for together; of two that differ, the first counts.

    Args:
        asked: what each field asks for, by its name.
        has_form: whether the answer has a form, which leaves no place for reasoning. The engine knows that,
            too, but the count of the prompt's tokens does not.
    """
    reasoning = reduce(Reasoning.or_else, asked.values(), Reasoning())
    return Reasoning(enabled=False) if has_form and reasoning != Reasoning() else reasoning


class ReasoningObject(TolerantBody):
    """How the model reasons, as OpenRouter's clients write it."""

    effort: ReasoningEffort = None
    max_tokens: int | None = Field(
        default=None, ge=0, le=_MOST, description="This number of tokens ends the reasoning."
    )
    enabled: bool | None = Field(default=None, description="Whether the model reasons.")
    exclude: bool | None = Field(default=None, description="Leave the reasoning out of the answer.")


class ThinkingObject(TolerantBody):
    """Whether the model reasons, as DeepSeek's, Kimi's and GLM's clients write it."""

    type: str = Field(description="`disabled` turns reasoning off, any other text turns it on.")
    budget_tokens: int | None = Field(
        default=None, ge=0, le=_MOST, description="This number of tokens ends the reasoning."
    )


class ReasoningFields(Body):
    """The fields of chats in OpenAI's dialect; the first that is given counts."""

    reasoning_effort: ReasoningEffort = None
    reasoning: Annotated[ReasoningObject | None, BeforeValidator(_switch)] = Field(
        default=None, description="How the model reasons, as OpenRouter has it."
    )
    thinking: Annotated[ThinkingObject | None, BeforeValidator(_typed_switch)] = Field(
        default=None, description="Whether the model reasons, as DeepSeek, Kimi and GLM have it."
    )
    enable_thinking: bool | None = Field(default=None, description="The same, as Qwen has it.")
    thinking_budget: int | None = Field(
        default=None,
        ge=0,
        le=_MOST,
        description="This number of tokens ends the reasoning; Qwen's name of `thinking_token_budget`.",
    )
    thinking_budget_tokens: int | None = Field(
        default=None,
        ge=-1,
        le=_MOST,
        description="llama-server's name of `thinking_token_budget`; -1: no limit.",
    )
    reasoning_budget_tokens: int | None = Field(
        default=None,
        ge=-1,
        le=_MOST,
        description="llama-server's other name of it; -1: no limit.",
    )
    include_reasoning: bool | None = Field(
        default=None,
        description="Whether the answer has the reasoning.",
        json_schema_extra={"default": True},
    )

    @property
    def hides_reasoning(self) -> bool:
        """Whether the reasoning is left out of the answer."""
        excluded = self.reasoning is not None and self.reasoning.exclude is True
        return excluded or self.include_reasoning is False

    def asked_reasoning(self) -> dict[str, Reasoning]:
        """Return what each field that is given asks for about reasoning, by its name."""
        asked: dict[str, Reasoning] = {}
        if self.reasoning_effort is not None:
            asked["reasoning_effort"] = Reasoning(effort=self.reasoning_effort)
        if self.enable_thinking is not None:
            asked["enable_thinking"] = Reasoning(enabled=self.enable_thinking)
        if (written := self.reasoning) is not None:
            # A budget is a wish to reason.
            enabled = True if written.enabled is None and written.max_tokens else written.enabled
            budget = None if written.enabled is False else written.max_tokens
            asked["reasoning"] = Reasoning(effort=written.effort, enabled=enabled, budget=budget)
        if self.thinking is not None:
            on = self.thinking.type != "disabled"
            asked["thinking"] = Reasoning(enabled=on, budget=self.thinking.budget_tokens if on else None)
        for name in ("thinking_budget", "thinking_budget_tokens", "reasoning_budget_tokens"):
            budget = getattr(self, name)
            if budget is not None and budget != -1:
                asked[name] = Reasoning(budget=budget)
        return asked
