"""Input processor: turns a prompt and its sampling parameters into a valid generation request."""

from __future__ import annotations

import secrets
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from genserve.engine.generation_request import GenerationRequest
from genserve.engine.text_engine import TextEngine
from genserve.errors import InvalidRequest, ModelFailed
from genserve.prompt import Chat, Prompt, Reasoning
from genserve.request_context import current_request
from genserve.sampling.defaults import with_model_defaults
from genserve.sampling.sampling_params import SamplingParams
from genserve.text.tokenizer import Tokenizer, TooManyTokens
from genserve.textmodel.adapters import Adapters
from genserve.textmodel.request_rules import check_token_ids
from genserve.textmodel.sequence_builder import SequenceBuilder, prompt_field


class InputProcessor:
    """Makes the requests to the engine of one text model. Safe from any thread."""

    def __init__(
        self,
        *,
        name: str,
        tokenizer: Tokenizer,
        engine: TextEngine,
        builder: SequenceBuilder,
        vocab_size: int,
        default_sampling_params: Mapping[str, Any],
        adapters: Adapters | None = None,
    ) -> None:
        """Process the requests to the model `name`."""
        self._name = name
        self._tokenizer = tokenizer
        self._engine = engine
        self._builder = builder
        self._vocab_size = vocab_size
        self._defaults = default_sampling_params
        self._adapters = adapters

    def process(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        num_choices: int,
        adapter: str | None = None,
        arrived_s: float | None = None,
        return_progress: bool = False,
    ) -> GenerationRequest:
        """Return the request for some choices; see `TextModel.prepare`."""
        if adapter is not None and self._adapters is not None:
            self._adapters.get(adapter)
        params = with_model_defaults(params, self._defaults)
        limits = self._builder.limits
        max_length = limits.max_length(params, num_choices=num_choices)
        field, num_dropped = prompt_field(prompt), 0
        if isinstance(prompt, Chat):
            prompt, params = self._reasoning(prompt, params)
        if isinstance(prompt, Chat) and prompt.drops_oldest_turns:
            prompt, num_dropped = self._fitting(prompt, limit=_longest_prompt(params, max_length=max_length))
        try:
            is_truncated = params.truncate_prompt_tokens is not None
            whole = self.encode(
                prompt,
                add_special_tokens=params.add_special_tokens,
                max_tokens=None if is_truncated else max_length,
            )
        except TooManyTokens as error:
            raise limits.too_long(error, max_length=max_length, field=field) from None
        token_ids = _truncated(whole, params, max_length=max_length, bos_id=self._tokenizer.bos_id)
        limits.check_length(len(token_ids), max_length=max_length, field=field)
        params = _clamped(params, room=max_length - len(token_ids))
        self._builder.param_tokens.check(params)
        is_cut = len(token_ids) < len(whole) and params.truncation_side == "right"
        context = current_request()
        return GenerationRequest(
            id=context.id,
            model=self._name,
            share=context.key,
            prompt=prompt,
            prompt_token_ids=tuple(token_ids),
            params=params,
            seeds=tuple(_seed(params, choice) for choice in range(num_choices)),
            begins_reasoning=self._begins_reasoning(prompt, token_ids, is_cut=is_cut),
            num_truncated_tokens=num_dropped + len(whole) - len(token_ids),
            arrived_s=self._engine.now_s if arrived_s is None else arrived_s,
            return_progress=return_progress,
            adapter=adapter,
        )

    def _reasoning(self, chat: Chat, params: SamplingParams) -> tuple[Chat, SamplingParams]:
        """Return the chat and the parameters with the budget for reasoning in both.

        The form of a structured output leaves no place for reasoning.
        """
        asked, budget = chat.reasoning, params.thinking_token_budget
        if params.structured_outputs is not None:
            off = asked if asked == Reasoning() else Reasoning(enabled=False)
            return replace(chat, reasoning=off), params
        if budget is not None:
            return replace(chat, reasoning=replace(asked, budget=budget)), params
        if asked.budget is not None and self._builder.reasoning.has_marks and not params.use_beam_search:
            params = replace(params, thinking_token_budget=asked.budget)
        return chat, params

    def _fitting(self, chat: Chat, *, limit: int) -> tuple[Chat, int]:
        """Return the chat without its oldest turns that do not fit, and how many tokens these turns had.

        The last turn stays even if it does not fit.
        """
        num_tokens, turns = len(self.encode(chat)), chat.later_turns
        if num_tokens <= limit or not turns:
            return chat, 0
        num_left_out = bisect_left(
            turns, -limit, hi=len(turns) - 1, key=lambda turn: -len(self.encode(chat.from_turn(turn)))
        )
        kept = chat.from_turn(turns[num_left_out])
        return kept, num_tokens - len(self.encode(kept))

    def encode(
        self, prompt: Prompt, *, add_special_tokens: bool | None = None, max_tokens: int | None = None
    ) -> Sequence[int]:
        """Return the token ids of a prompt; raises TooManyTokens for a text of more than `max_tokens`.

        `add_special_tokens`: see `SamplingParams`.
        """
        if isinstance(prompt, str):
            return self._tokenizer.encode(
                prompt, add_special_tokens=add_special_tokens is not False, max_tokens=max_tokens
            )
        if isinstance(prompt, Chat):
            encode = partial(
                self._tokenizer.encode_chat,
                add_special_tokens=bool(add_special_tokens),
                max_tokens=max_tokens,
            )
            return self._encode_chat(encode, self._builder.tools.rendered(prompt))
        check_token_ids(prompt, vocab_size=self._vocab_size, field="prompt")
        return prompt

    def _encode_chat(self, encode: Callable[[Chat], list[int]], chat: Chat) -> list[int]:
        try:
            return encode(chat)
        except ModelFailed as error:
            raise ModelFailed(f"model {self._name!r}: {error.message}", remedy=error.remedy) from error
        finally:
            if not self._engine.alive:  # the model was closed before, so only this ends the process
                self._tokenizer.close()

    def _begins_reasoning(self, prompt: Prompt, token_ids: Sequence[int], *, is_cut: bool) -> bool:
        """Whether the answer to a prompt begins within reasoning.

        In a chat, reasoning can only be begun by the template's text after the messages, or by the message
        that is continued; never by a message of somebody else.

        Args:
            prompt: the text, token ids or chat.
            token_ids: the tokens of the prompt, as the engine receives them.
            is_cut: whether the end of the prompt was truncated.
        """
        if not self._builder.reasoning.is_open_after(token_ids):
            return False
        if not isinstance(prompt, Chat):
            return True
        if is_cut:
            return False
        try:
            suffix = self._encode_chat(
                self._tokenizer.encode_generation_prompt, self._builder.tools.rendered(prompt)
            )
        except InvalidRequest:  # the template accepts the messages, but not with marks in them
            return False
        return self._builder.reasoning.is_open_after(suffix)


def _seed(params: SamplingParams, choice: int) -> int:
    return secrets.randbits(64) if params.seed is None else (params.seed + choice) % 2**64


def _clamped(params: SamplingParams, *, room: int) -> SamplingParams:
    """Lower the lengths of an answer that exceed the room in the context; it then ends with the context."""
    if params.min_tokens <= room and (params.max_tokens is None or params.max_tokens <= room):
        return params
    max_tokens = None if params.max_tokens is None else min(params.max_tokens, room)
    return replace(params, max_tokens=max_tokens, min_tokens=min(params.min_tokens, room))


def _longest_prompt(params: SamplingParams, *, max_length: int) -> int:
    """Return how many tokens a prompt may have that leaves room for its answer.

    A default of the model, or a number that many programs send to all models, may exceed the context; the
    answer then gets half of it.
    """
    num_wanted = params.max_tokens or 1
    is_exact = "max_tokens" in params.stated and num_wanted < max_length
    return max(1, max_length - (num_wanted if is_exact else min(num_wanted, max_length // 2)))


def _truncated(
    token_ids: Sequence[int], params: SamplingParams, *, max_length: int, bos_id: int | None
) -> Sequence[int]:
    """Truncate a prompt as the request asks; the token that begins every text stays."""
    limit = params.truncate_prompt_tokens
    if limit == -1:
        limit = _longest_prompt(params, max_length=max_length)
    if limit is None or len(token_ids) <= limit:
        return token_ids
    if params.truncation_side == "right":
        return token_ids[:limit]
    begin = [token_ids[0]] if token_ids[0] == bos_id else []
    return [*begin, *token_ids[len(token_ids) - limit + len(begin) :]]
