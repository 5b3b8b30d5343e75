"""Input processor: validates a prompt and its sampling parameters, and turns them into token sequences."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from genserve.errors import ContextLengthExceeded, InvalidRequest, ModelFailed
from genserve.generation.beam_search import BeamSearch
from genserve.generation.engine_request import TokenSequence
from genserve.generation.resumption import ResumedSequence, resumed_kind
from genserve.generation.sequence_plugins import LogitsProcessor, PluginContext, ThinkingBudget
from genserve.generation.text_engine import TextEngine
from genserve.prompt import Chat, Prompt
from genserve.sampling.defaults import with_model_defaults
from genserve.sampling.grammar_bitmask import ForkableGrammar, StructuredOutputGrammar
from genserve.sampling.logits_processors import DryBreakers, TokenizedParams
from genserve.sampling.sampling_params import SamplingParams
from genserve.text.closing_grammar import ClosingGrammar
from genserve.text.grammar_compiler import GrammarCompiler
from genserve.text.message_parser import MessageParser
from genserve.text.reasoning import THINKING_TAGS, ReasoningGrammar, ReasoningParser
from genserve.text.stop_conditions import StopChecker, StopFinder, StopRegex, StopStrings
from genserve.text.tokenizer import Tokenizer, TooManyTokens
from genserve.text.vocabulary import Spellings
from genserve.textmodel.decoder_stage import Decoding
from genserve.textmodel.logits_runtime import LogitsFigures
from genserve.textmodel.tool_calling import ToolCalling


class ReasoningTokens:
    """The tags around the reasoning of a model's answers; many models have none."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Look up the tags in the vocabulary."""
        self._tokenizer = tokenizer
        self._start_id, self._end_id = map(tokenizer.token_id, THINKING_TAGS)

    def parser(self, params: SamplingParams, *, begun: bool) -> ReasoningParser | None:
        """Return a parser that splits an answer into reasoning and content; None: all of it is content.

        All of it is content if the vocabulary lacks the tags or decodes them to no text, if the answer has
        a required structure, and if a parser of the request reads it.

        Args:
            params: of the request.
            begun: whether the prompt begins the reasoning, see `TokenSequence.begins_reasoning`.
        """
        if self._start_id is None or self._end_id is None or self._tokenizer.is_silent(self._end_id):
            return None
        if params.structured_outputs is not None or params.output_parser is not None:
            return None
        return ReasoningParser(begun=begun, tag_ids=(self._start_id, self._end_id))

    def budget(self, context: PluginContext, *, begun: bool) -> list[tuple[str, LogitsProcessor]]:
        """Return the named processor that enforces the request's budget for reasoning; empty: it has none.

        Raises:
            InvalidRequest: the request has a budget and the vocabulary lacks the tags.
        """
        name = "thinking_token_budget"
        num_tokens = context.params.thinking_token_budget
        if num_tokens is None:
            return []
        if self._start_id is None or self._end_id is None:
            tags = " and ".join(THINKING_TAGS)
            raise InvalidRequest(f"{name} needs a model with the tokens {tags}", field=name)
        budget = ThinkingBudget(
            num_tokens=num_tokens,
            start_id=self._start_id,
            end_id=self._end_id,
            num_prompt_tokens=len(context.prompt_token_ids),
            begun=begun,
        )
        return [(name, budget)]

    def before(self, grammar: ForkableGrammar, *, begun: bool) -> ReasoningGrammar:
        """Return a grammar of answers that may reason before they follow another one.

        Args:
            grammar: of what follows; the request has a `parser`.
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
        )

    def is_open_after(self, token_ids: Sequence[int]) -> bool:
        """Whether the tokens end within reasoning: after its start tag come no other tag or special token."""
        if self._start_id is None:
            return False
        for token_id in reversed(token_ids):
            if token_id == self._start_id:
                return True
            if token_id == self._end_id or self._tokenizer.is_silent(token_id):
                return False
        return False


class ContextLimits:
    """Rejects requests that exceed the context or the concurrent sequences of one text model."""

    def __init__(self, name: str, logits: LogitsFigures) -> None:
        """Check requests to the model `name`."""
        self._name = name
        self._max_length = logits.max_length
        self._max_num_seqs = logits.max_num_seqs

    def check_beams(self, params: SamplingParams, *, width: int) -> None:
        """Reject a search with more beams than sequences can run concurrently. Raises InvalidRequest."""
        if width > self._max_num_seqs:
            raise InvalidRequest(
                f"the request has {width} beams; "
                f"{self._name} runs {self._max_num_seqs} sequences concurrently",
                field="beam_width" if params.beam_width else "n",
                remedy=f"ask for {self._max_num_seqs} at most, or raise max_batch_size in the logits stage's "
                "config.pbtxt",
            )

    def check_lengths(
        self, num_prompt_tokens: int, params: SamplingParams, *, max_length: int, field: str
    ) -> None:
        """Reject a prompt that is empty, or that does not fit into `max_length` tokens with its answer.

        Raises:
            InvalidRequest: it is empty.
            ContextLengthExceeded: it is too long; has both numbers.
        """
        if num_prompt_tokens == 0:
            raise InvalidRequest(f"{field} is empty", field=field, remedy="give at least one token of text")
        if num_prompt_tokens >= max_length:
            counted = TooManyTokens(num_prompt_tokens, is_least=False)
            raise self.too_long(counted, max_length=max_length, field=field)
        room = max_length - num_prompt_tokens
        if "max_tokens" in params.stated and params.max_tokens is not None and params.max_tokens > room:
            raise ContextLengthExceeded(
                f"max_tokens is {params.max_tokens}; the prompt's {num_prompt_tokens} tokens leave {room} "
                f"of the context of {max_length}{self._per_beam(max_length)}",
                field="max_tokens",
                remedy=f"ask for {room} tokens at most, or shorten the prompt",
            )

    def too_long(self, prompt: TooManyTokens, *, max_length: int, field: str) -> ContextLengthExceeded:
        """Return the error of a prompt with more than `max_length` tokens."""
        number = f"at least {prompt.num_tokens}" if prompt.is_least else f"{prompt.num_tokens}"
        return ContextLengthExceeded(
            f"the prompt has {number} tokens; "
            f"the context of {self._name} is {max_length}{self._per_beam(max_length)}, answer included",
            field=field,
            remedy="shorten the prompt, or raise max_sequence_length or, if the KV cache holds no more, "
            "kv_cache_bytes in the logits stage's config.pbtxt",
        )

    def _per_beam(self, max_length: int) -> str:
        return "" if max_length == self._max_length else " for each of its beams"


class ParamTokens:
    """The token ids in sampling parameters, and the texts in them as token ids, of one vocabulary."""

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int) -> None:
        """Check and read the parameters of requests to a model with rows of `vocab_size` logits."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._spellings_within = Spellings(tokenizer)

    def check(self, params: SamplingParams) -> None:
        """Raise InvalidRequest if an id is not in the vocabulary, or `min_tokens` leaves none to sample."""
        vocab_size = self._vocab_size
        for name, named_ids in params.token_ids().items():
            if any(token_id >= vocab_size for token_id in named_ids):
                raise InvalidRequest(f"{name} must be below the vocabulary's size, {vocab_size}", field=name)
        if params.min_tokens and params.allowed_token_ids:
            ending = {*params.stop_token_ids}
            ending.update(() if params.ignore_eos else self._tokenizer.eos_token_ids)
            if ending.union(params.suppress_tokens) >= {*params.allowed_token_ids}:
                raise InvalidRequest("min_tokens leaves no allowed token", field="min_tokens")

    def tokenized(self, params: SamplingParams) -> TokenizedParams:
        """Return the token ids of the words in the parameters."""
        breakers = params.dry_sequence_breakers if params.dry_multiplier else ()
        spared: list[int] = []
        if params.xtc_probability:
            newline = self._tokenizer.encode("\n", add_special_tokens=False)[-1:]
            spared = [i for i in (*self._tokenizer.eos_token_ids, *newline) if i < self._vocab_size]
        return TokenizedParams(
            bad_words=[ids for word in params.bad_words for ids in self._spellings(word)],
            dry_breakers=DryBreakers(ids for text in breakers for ids in self._spellings_within.of(text)),
            spared_ids=spared,
        )

    def _spellings(self, word: str) -> list[list[int]]:
        """Return the ids of a word at the beginning of a text, and after another word."""
        spelled = (self._tokenizer.encode(text, add_special_tokens=False) for text in (word, f" {word}"))
        return [ids for ids in spelled if ids and max(ids) < self._vocab_size]


class InputProcessor:
    """Makes the token sequences of requests to one text model. Safe from any thread.

    Attributes:
        reasoning: the tags around the reasoning of answers.
    """

    def __init__(
        self,
        *,
        name: str,
        tokenizer: Tokenizer,
        engine: TextEngine,
        decoding: Decoding,
        logits: LogitsFigures,
        default_sampling_params: Mapping[str, Any],
    ) -> None:
        """Process the requests of the model `name`."""
        self.reasoning = ReasoningTokens(tokenizer)
        self._name = name
        self._tokenizer = tokenizer
        self._engine = engine
        self._plugins = decoding.plugins
        self._only_samples = decoding.only_samples
        self._logits = logits
        self._limits = ContextLimits(name, logits)
        self._defaults = default_sampling_params
        self._tools = ToolCalling(tokenizer, tool_format=decoding.tool_format)
        self._grammars = GrammarCompiler(tokenizer, vocab_size=logits.vocab_size)
        self._param_tokens = ParamTokens(tokenizer, vocab_size=logits.vocab_size)

    def process(
        self, prompt: Prompt, params: SamplingParams, *, num_choices: int, arrived_s: float | None = None
    ) -> list[TokenSequence]:
        """Return one token sequence for each choice; see `TextModel.prepare_choices`."""
        params = with_model_defaults(params, self._defaults)
        max_length = self._max_length(params, num_choices=num_choices)
        field = _field(prompt)
        try:
            is_truncated = params.truncate_prompt_tokens is not None
            whole = self.encode(prompt, max_tokens=None if is_truncated else max_length)
        except TooManyTokens as error:
            raise self._limits.too_long(error, max_length=max_length, field=field) from None
        token_ids = _truncated(whole, params, max_length=max_length, bos_id=self._tokenizer.bos_id)
        is_cut = len(token_ids) < len(whole) and params.truncation_side == "right"
        begun = self._begins_reasoning(prompt, token_ids, is_cut=is_cut)
        seeds = [_seed(params, choice) for choice in range(num_choices)]
        return self.sequences(
            prompt, params, token_ids=token_ids, begins_reasoning=begun, seeds=seeds, arrived_s=arrived_s
        )

    def sequences(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        token_ids: Sequence[int],
        begins_reasoning: bool,
        seeds: Sequence[int],
        arrived_s: float | None = None,
        resumed_token_ids: Sequence[Sequence[int]] = (),
    ) -> list[TokenSequence]:
        """Turn a prompt that `process`, maybe of another process, has tokenized into token sequences.

        Args:
            prompt: of the request, whose tools and choice of a tool the grammar follows.
            params: of the sequences, with the model's defaults.
            token_ids: of the prompt, truncated.
            begins_reasoning: see `TokenSequence.begins_reasoning`.
            seeds: of the sequences to make; several are the answers of one beam search.
            arrived_s: when `max_time_ms` begins, by the clock of the engine; None: now.
            resumed_token_ids: of each answer, the first tokens, which another engine has generated with the
                same seed and the caller has received; empty: none. What is delivered begins after them.

        Raises:
            InvalidRequest, ContextLengthExceeded, ModelFailed: see `TextModel.prepare_choices`.
            NotResumable: an answer cannot begin with the tokens received of it.
        """
        max_length = self._max_length(params, num_choices=len(seeds))
        self._limits.check_lengths(len(token_ids), params, max_length=max_length, field=_field(prompt))
        self._param_tokens.check(params)
        text = self._stop_checker(params, shown=self._tools.shown_ids(prompt))
        begin = self._begin(
            prompt, params, token_ids, max_length=max_length, begins_reasoning=begins_reasoning,
            arrived_s=arrived_s, is_resumed=any(resumed_token_ids),
        )
        room = min(params.max_tokens or max_length, max_length - len(token_ids))
        grammar = self._grammar_of(prompt, params, begun=begins_reasoning, room=room)
        contexts = [self._context(token_ids, params, seed=seed) for seed in seeds]
        sequences = [
            begin(
                seed=context.seed,
                text=self._plugins.parsed(text.fork(), context),
                plugins=self._plugins.for_sequence(
                    context, ours=self.reasoning.budget(context, begun=begins_reasoning)
                ),
                grammar=grammar(),
            )
            for context in contexts
        ]
        width = _beam_width(params, num_choices=len(seeds))
        if width > 1:
            BeamSearch(sequences, width=width, text=text)
        for sequence, received in zip(sequences, resumed_token_ids, strict=False):
            if isinstance(sequence, ResumedSequence) and received:
                sequence.resume(received)
        return sequences

    def _begin(
        self,
        prompt: Prompt,
        params: SamplingParams,
        token_ids: Sequence[int],
        *,
        max_length: int,
        begins_reasoning: bool,
        arrived_s: float | None,
        is_resumed: bool,
    ) -> Callable[..., TokenSequence]:
        """Return the class of a request's sequences, with the arguments that they share."""
        return partial(
            resumed_kind(params, only_samples=self._only_samples) if is_resumed else TokenSequence,
            token_ids,
            params=params,
            eos_token_ids=self._tokenizer.eos_token_ids,
            max_length=max_length,
            vocab_size=self._logits.vocab_size,
            tokenized=self._param_tokens.tokenized(params),
            deadline_s=self._deadline_s(params, arrived_s),
            begins_reasoning=begins_reasoning,
            prompt=prompt,
        )

    def _max_length(self, params: SamplingParams, *, num_choices: int) -> int:
        """Return how long the sequences of a request can be; raises InvalidRequest for too many beams."""
        width = _beam_width(params, num_choices=num_choices)
        self._limits.check_beams(params, width=width)
        return self._engine.max_tokens_per_sequence(width) if width > 1 else self._logits.max_length

    def message_parser(self, prompt: Prompt, params: SamplingParams, *, begun: bool) -> MessageParser | None:
        """Return a parser of one answer; see `TextModel.message_parser`."""
        reasoning = self.reasoning.parser(params, begun=begun)
        tools = self._tools.parser(prompt)
        if reasoning is None and tools is None:
            return None
        return MessageParser(reasoning=reasoning, tools=tools)

    def _grammar_of(
        self, prompt: Prompt, params: SamplingParams, *, begun: bool, room: int
    ) -> Callable[[], StructuredOutputGrammar | None]:
        """Return a function that returns the grammar of one answer; None: any text will do."""
        outputs = params.structured_outputs
        may_reason = self.reasoning.parser(params, begun=begun) is not None
        tools = self._tools.grammar(prompt, params, may_reason=may_reason)
        if tools is None:
            return lambda: self._grammars.compile(outputs) if outputs else None
        json_tokens = self._grammars.json_tokens

        def compiled() -> StructuredOutputGrammar:
            grammar: ForkableGrammar = self._grammars.compile_tools(tools, text=outputs)
            if may_reason:
                grammar = self.reasoning.before(grammar, begun=begun)
            return grammar if json_tokens is None else ClosingGrammar(grammar, json_tokens, room=room)

        return compiled

    def _deadline_s(self, params: SamplingParams, arrived_s: float | None) -> float | None:
        if params.max_time_ms is None:
            return None
        return (self._engine.now_s if arrived_s is None else arrived_s) + params.max_time_ms / 1000

    def _context(self, token_ids: Sequence[int], params: SamplingParams, *, seed: int) -> PluginContext:
        return PluginContext(
            tokenizer=self._tokenizer,
            vocab_size=self._logits.vocab_size,
            prompt_token_ids=tuple(token_ids),
            params=params,
            seed=seed,
        )

    def _stop_checker(self, params: SamplingParams, *, shown: Collection[int]) -> StopChecker:
        """Return the text of an answer before its first token; its forks share what is slow to build.

        Args:
            params: of the request.
            shown: the special tokens that are part of the text.
        """
        finders: list[StopFinder] = [StopStrings(params.stop)] if params.stop else []
        finders += map(StopRegex, params.stop_regex)
        return StopChecker(
            self._tokenizer.detokenizer(
                skip_special_tokens=params.skip_special_tokens,
                shown=shown,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
            ),
            finders,
            include_stop=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )

    def encode(self, prompt: Prompt, *, max_tokens: int | None = None) -> Sequence[int]:
        """Return the token ids of a prompt; raises TooManyTokens for a text of more than `max_tokens`."""
        if isinstance(prompt, str):
            return self._tokenizer.encode(prompt, max_tokens=max_tokens)
        if isinstance(prompt, Chat):
            encode = partial(self._tokenizer.encode_chat, max_tokens=max_tokens)
            return self._encode_chat(encode, self._tools.rendered(prompt))
        for index, token_id in enumerate(prompt):
            if not 0 <= token_id < self._logits.vocab_size:
                field = f"prompt[{index}]"
                raise InvalidRequest(
                    f"{field} is {token_id}; the vocabulary has the ids 0 to {self._logits.vocab_size - 1}",
                    field=field,
                )
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
            prompt: of the request.
            token_ids: of the prompt, as the engine gets them.
            is_cut: whether the end of the prompt was truncated.
        """
        if not self.reasoning.is_open_after(token_ids):
            return False
        if not isinstance(prompt, Chat):
            return True
        if is_cut:
            return False
        try:
            suffix = self._encode_chat(
                self._tokenizer.encode_generation_prompt, self._tools.rendered(prompt)
            )
        except InvalidRequest:  # the template accepts the messages, but not with marks in them
            return False
        return self.reasoning.is_open_after(suffix)


def _field(prompt: Prompt) -> str:
    """Return the name of the field that a prompt comes from."""
    return "messages" if isinstance(prompt, Chat) else "prompt"


def _seed(params: SamplingParams, choice: int) -> int:
    return secrets.randbits(64) if params.seed is None else (params.seed + choice) % 2**64


def _beam_width(params: SamplingParams, *, num_choices: int) -> int:
    """Return the number of beams of a request; 1: it has no beam search."""
    if not params.use_beam_search:
        return 1
    width = params.beam_width or num_choices
    if num_choices > width:
        raise InvalidRequest(
            f"n is {num_choices}, but beam_width is {width}; a search returns at most beam_width answers",
            field="n",
        )
    if width % params.num_beam_groups:
        raise InvalidRequest(
            f"num_beam_groups is {params.num_beam_groups}, which does not divide {width} beams",
            field="num_beam_groups",
        )
    return width


def _truncated(
    token_ids: Sequence[int], params: SamplingParams, *, max_length: int, bos_id: int | None
) -> Sequence[int]:
    """Truncate a prompt as the request asks; the token that begins every text stays."""
    limit = params.truncate_prompt_tokens
    if limit == -1:
        # A default of the model may be as long as the context.
        longest = max_length if "max_tokens" in params.stated else max_length // 2
        limit = max(1, max_length - min(params.max_tokens or 1, longest))
    if limit is None or len(token_ids) <= limit:
        return token_ids
    if params.truncation_side == "right":
        return token_ids[:limit]
    begin = [token_ids[0]] if token_ids[0] == bos_id else []
    return [*begin, *token_ids[len(token_ids) - limit + len(begin) :]]
