"""Reasoning tokens: the tags around the reasoning in the answers of one text model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cached_property

from genserve.engine.sequence_plugins import LogitsProcessor, PluginContext
from genserve.engine.thinking_budget import ThinkingBudget
from genserve.errors import InvalidRequest
from genserve.prompt import Chat, Prompt
from genserve.sampling.grammar_bitmask import ForkableGrammar
from genserve.sampling.sampling_params import SamplingParams
from genserve.text.harmony import HarmonyTokens
from genserve.text.reasoning import (
    REASONING_FORMATS,
    THINKING_TAGS,
    ReasoningGrammar,
    ReasoningParser,
    ThinkingTags,
)
from genserve.text.tokenizer import Tokenizer
from genserve.text.tool_call_parser import ToolCallParser

_BUDGET = "thinking_token_budget"
# Qwen3's, with which it was evaluated: https://arxiv.org/abs/2505.09388, section 4.3.
BUDGET_MESSAGE = (
    "\n\nConsidering the limited time by the user, I have to give the solution based on the thinking "
    "directly now.\n"
)


class ReasoningTokens:
    """The tags around the reasoning of a model's answers; many models have none."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        harmony: HarmonyTokens | None = None,
        reasoning_format: str | None = None,
    ) -> None:
        """Look up the tags in the vocabulary.

        Args:
            tokenizer: the tokenizer of the model.
            harmony: the model reasons in messages instead.
            reasoning_format: a name of `REASONING_FORMATS`; None: the first format whose tags are tokens.
        """
        self._tokenizer = tokenizer
        self._harmony = harmony
        named = None if reasoning_format is None else REASONING_FORMATS[reasoning_format]
        known = THINKING_TAGS if named is None else (named,)
        self._tags = next((tags for tags in known if _has_tokens(tokenizer, tags)), known[0])
        self._start_id, self._end_id = None, None
        if reasoning_format != "none":
            self._start_id, self._end_id = map(tokenizer.token_id, self._tags[:2])
        self._note_id = tokenizer.token_id(self._tags.note) if self._tags.note else None
        self._tag_ids = {each for each in (self._start_id, self._end_id) if each is not None}

    @property
    def has_marks(self) -> bool:
        """Whether the model marks its reasoning."""
        has_tags = self._start_id is not None and self._end_id is not None
        return has_tags or self._harmony is not None

    def can_end(self, params: SamplingParams) -> bool:
        """Whether reasoning in the answer can be ended: the model marks it, and no form leaves it out."""
        return self.has_marks and params.structured_outputs is None and not params.use_beam_search

    def shown_ids(self, prompt: Prompt, params: SamplingParams) -> Collection[int]:
        """Return the special tokens that the parser of an answer must see."""
        if not isinstance(prompt, Chat) or self.parser(prompt, params, begun=False) is None:
            return ()
        return {token_id for token_id in self._tag_ids if self._tokenizer.is_silent(token_id)}

    def parser(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        begun: bool,
        new_calls: Callable[[], ToolCallParser] | None = None,
    ) -> ReasoningParser | None:
        """Return a parser that splits an answer into reasoning and content; None: all of it is content.

        All of it is content if the vocabulary lacks the tags, if the answer has a required structure, if a
        parser of the request reads it, and, in an answer to no chat, if the tags are special tokens.

        Args:
            prompt: the prompt.
            params: the sampling parameters; they decide whether the answer has a required structure, or a
                parser of its own.
            begun: whether the prompt begins the reasoning, see `GenerationRequest.begins_reasoning`.
            new_calls: returns a parser of the calls in the answer; None: the answer has no calls.
        """
        if self._start_id is None or self._end_id is None or self._harmony is not None:
            return None
        if not isinstance(prompt, Chat) and self._tokenizer.is_silent(self._end_id):
            return None
        if params.structured_outputs is not None or params.output_parser is not None:
            return None
        tag_ids = (self._start_id, self._end_id)
        return ReasoningParser(begun=begun, tags=self._tags, tag_ids=tag_ids, new_calls=new_calls)

    def budget(self, context: PluginContext, *, begun: bool) -> list[tuple[str, LogitsProcessor]]:
        """Return the named processor that enforces the request's budget for reasoning; empty: no budget.

        Raises:
            InvalidRequest: the request has a budget and the vocabulary lacks the tags, or its message has
                special tokens or one of the tags.
        """
        params = context.params
        if params.reasoning_budget_message is not None:
            self._message_ids(params)
        if params.thinking_token_budget is None:
            return []
        if not self.has_marks:
            tags = " and ".join(self._tags[:2])
            message = f"{_BUDGET} needs a model with tokens around its reasoning, such as {tags}"
            raise InvalidRequest(message, field=_BUDGET)
        return [(_BUDGET, self._thinking_budget(context, begun=begun))]

    def ending(self, context: PluginContext, *, begun: bool) -> tuple[str, ThinkingBudget]:
        """Return the named processor that ends the reasoning of a running answer; the model has the tags."""
        return _BUDGET, self._thinking_budget(context, begun=begun)

    def _thinking_budget(self, context: PluginContext, *, begun: bool) -> ThinkingBudget:
        start_ids: tuple[int, ...]
        if self._harmony is not None:
            start_ids, end_id = self._harmony.thought_start, self._harmony.end
        else:
            assert self._start_id is not None
            assert self._end_id is not None
            start_ids, end_id = (self._start_id,), self._end_id
        return ThinkingBudget(
            num_tokens=context.params.thinking_token_budget,
            start_ids=start_ids,
            end_ids=(end_id,),
            num_prompt_tokens=len(context.prompt_token_ids),
            begun=begun,
            message_ids=self._message_ids(context.params),
            decode=self._tokenizer.decode,
        )

    def _message_ids(self, params: SamplingParams) -> Sequence[int]:
        """Return the tokens of the last message of reasoning that is ended; raises InvalidRequest."""
        name, text = "reasoning_budget_message", params.reasoning_budget_message
        if text is None:
            return self._default_message_ids
        token_ids = self._tokenizer.encode(text, add_special_tokens=False) if text else []
        tags = (self._start_id, self._end_id)
        if any(token_id in tags or self._tokenizer.is_silent(token_id) for token_id in token_ids):
            problem = "must not have special tokens, nor the marks of reasoning"
            raise InvalidRequest(f"{name} {problem}", field=name)
        return token_ids

    @cached_property
    def _default_message_ids(self) -> Sequence[int]:
        return self._tokenizer.encode(BUDGET_MESSAGE, add_special_tokens=False)

    def before(self, grammar: ForkableGrammar, *, begun: bool) -> ReasoningGrammar:
        """Return a grammar of answers that may reason before they follow another one.

        Args:
            grammar: the grammar of the text after the reasoning; the request has a `parser`.
            begun: whether the prompt begins the reasoning.
        """
        assert self._start_id is not None
        assert self._end_id is not None
        return ReasoningGrammar(
            grammar,
            start_id=self._start_id,
            end_id=self._end_id,
            ending_ids=self._tokenizer.eos_token_ids,
            begun=begun,
            newline_ids=self._newline_ids,
        )

    @cached_property
    def _newline_ids(self) -> Collection[int]:
        encoded = (self._tokenizer.encode(text, add_special_tokens=False) for text in ("\n", "\n\n"))
        return {ids[0] for ids in encoded if len(ids) == 1}

    def is_open_after(self, token_ids: Sequence[int]) -> bool:
        """Whether the tokens end within reasoning: after its start tag come no other tag or special token."""
        if self._start_id is None or self._harmony is not None:
            return False
        for token_id in reversed(token_ids):
            if token_id == self._start_id:
                return True
            if token_id == self._end_id:
                return False
            if self._tokenizer.is_silent(token_id) and token_id != self._note_id:
                return False
        return False


def _has_tokens(tokenizer: Tokenizer, tags: ThinkingTags) -> bool:
    return all(tokenizer.token_id(tag) is not None for tag in tags[:2])
