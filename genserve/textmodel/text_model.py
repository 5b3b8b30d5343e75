"""Text model: text in, text out, by a tokenizer, an engine and the plug-ins of a decoder stage."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import TypeVar

from genserve.errors import Closed, ContextLengthExceeded, InvalidRequest, ModelFailed
from genserve.generation.beam_search import BeamSearch
from genserve.generation.engine_request import TokenSequence
from genserve.generation.engine_thread import EngineThread
from genserve.generation.sequence_plugins import LogitsProcessor, PluginContext, ThinkingBudget
from genserve.prompt import Chat, Prompt
from genserve.sampling.logits_processors import Breakers
from genserve.sampling.sampling_params import SamplingParams
from genserve.text.grammar_compiler import GrammarCompiler
from genserve.text.reasoning_parser import THINKING_TAGS, ReasoningParser
from genserve.text.stop_regex import StopRegex
from genserve.text.stop_strings import StopChecker, StopFinder, StopStrings
from genserve.text.tokenizer import Spellings, Tokenizer
from genserve.textmodel.decoder_plugins import Plugins

__all__ = ["TextModel"]


T = TypeVar("T")

# Each for prompts, and for prompts with forms: forms may take seconds to compile.
MAX_THREADS = 4


class TextModel:
    """A loaded model that answers text with text. Its methods are safe from any thread.

    Attributes:
        name: of the ensemble in the repository.
        tokenizer: its tokenizer stage.
        engine: over its logits and decoder stages.
        plugins: of its decoder stage.
        max_length: tokens of prompt and answer together.
        max_num_seqs: requests that run together; more wait.
        kv_cache_bytes: the memory that the KV cache takes at the most.
        precision: of the weights, as the exporter wrote it.
        vocab_size: length of a row of logits.
        loaded_s: wall-clock time of the load, seconds since 1970.
    """

    def __init__(
        self,
        *,
        name: str,
        tokenizer: Tokenizer,
        engine: EngineThread,
        plugins: Plugins,
        max_length: int,
        max_num_seqs: int,
        vocab_size: int,
        kv_cache_bytes: int,
        precision: str,
        loaded_s: float,
    ) -> None:
        self.name = name
        self.tokenizer = tokenizer
        self.engine = engine
        self.plugins = plugins
        self.max_length = max_length
        self.max_num_seqs = max_num_seqs
        self.kv_cache_bytes = kv_cache_bytes
        self.precision = precision
        self.loaded_s = loaded_s
        self.vocab_size = vocab_size
        self._grammars = GrammarCompiler(tokenizer, vocab_size=vocab_size)
        self._spellings_within = Spellings(tokenizer)
        self._thinking_ids = [tokenizer.token_id(tag) for tag in THINKING_TAGS]
        self._workers = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix=f"prepare-{name}")
        self._compilers = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix=f"compile-{name}")

    def run_soon(self, work: Callable[[], T], *, compiles: bool) -> Future[T]:
        """Run what prepares a request on a thread of this model, in the order in which they come.

        So nothing that is expensive to prepare holds up another model.

        Args:
            work: runs in the context of this call; is to call `Reservation.check` first.
            compiles: whether the answers have a form; these do not hold up those that have none.

        Raises:
            Closed: after `close`.
        """
        workers = self._compilers if compiles else self._workers
        try:
            return workers.submit(copy_context().run, work)
        except RuntimeError:
            raise Closed(f"model '{self.name}' is being unloaded") from None

    def prepare(self, prompt: Prompt, params: SamplingParams) -> TokenSequence:
        """Turn a prompt into a token sequence; see `prepare_choices`."""
        if params.best_of > 1:
            raise InvalidRequest("best_of cannot be streamed", field="best_of")
        [sequence] = self.prepare_choices(prompt, params, num_choices=1)
        return sequence

    def prepare_choices(
        self, prompt: Prompt, params: SamplingParams, *, num_choices: int, arrived_s: float | None = None
    ) -> list[TokenSequence]:
        """Turn a prompt into so many token sequences, ready to submit to `engine`.

        Takes time in proportion to the prompt: keep it off an event loop. Where there is a seed, the
        choices have it and the ones after it, so that they differ. `max_time_ms` begins at `arrived_s` by the
        clock of `engine`; None: now.

        Raises:
            InvalidRequest: an empty prompt, bad text or messages, ids outside the vocabulary;
                `field` is `prompt`, `messages` or the parameter's name. So is a plug-in that the model has
                not, or not with such arguments.
            ContextLengthExceeded: prompt and `max_tokens` do not fit; says both numbers.
            ModelFailed: the chat template, the tokenizer or a plug-in is at fault.
        """
        width = self._beam_width(params, num_choices=num_choices)
        max_length = self.engine.max_tokens_per_sequence(width) if width > 1 else self.max_length
        deadline_s = None
        if params.max_time_ms is not None:
            deadline_s = (self.engine.now_s if arrived_s is None else arrived_s) + params.max_time_ms / 1000
        field, whole = self._encode(prompt)
        token_ids = self._truncated(whole, params, max_length=max_length)
        thinks = self._begins_thought(
            prompt, token_ids, cut=len(token_ids) < len(whole) and params.truncation_side == "right"
        )
        self._check_lengths(len(token_ids), params, max_length=max_length, field=field)
        self._check_ids(params)
        text = self._text(params)
        begin = partial(
            TokenSequence,
            token_ids,
            params=params,
            eos_token_ids=self.tokenizer.eos_token_ids,
            max_length=max_length,
            vocab_size=self.vocab_size,
            bad_words=[ids for word in params.bad_words for ids in self._spellings(word)],
            dry_breakers=self._dry_breakers(params),
            deadline_s=deadline_s,
            xtc_spared_ids=self._xtc_spared_ids(params),
            begins_thought=thinks,
        )
        contexts = [self._context(token_ids, params, choice) for choice in range(num_choices)]
        sequences = [
            begin(
                seed=context.seed,
                text=self.plugins.parsed(text.fork(), context),
                plugins=self.plugins.for_sequence(context, ours=self._thinking(context, begun=thinks)),
                grammar=self._grammars.compile(outputs) if (outputs := params.structured_outputs) else None,
            )
            for context in contexts
        ]
        if width > 1:
            BeamSearch(sequences, width=width, text=text)
        return sequences

    def reasoned_text(self, params: SamplingParams, *, begun: bool) -> ReasoningParser | None:
        """Return what tells an answer's reasoning from its content; None: all of it is content.

        `begun`: the prompt begins the thought, see `TokenSequence.begins_thought`.

        So it is where the model has no tags of a thought or no text for them, where the answer has a form,
        and where a parser of the request's own reads it.
        """
        start_id, end_id = self._thinking_ids
        if start_id is None or end_id is None or self.tokenizer.is_silent(end_id):
            return None
        if params.structured_outputs is not None or params.output_parser is not None:
            return None
        return ReasoningParser(begun=begun)

    def close(self) -> None:
        """End all requests, the engine's thread, and the process of the chat template.

        What is still to be prepared finds the engine closed.
        """
        self.engine.close()
        self._workers.shutdown(wait=False)
        self._compilers.shutdown(wait=False)
        self.tokenizer.close()

    def _beam_width(self, params: SamplingParams, *, num_choices: int) -> int:
        """Return how many beams a request has; 1: no search."""
        if not params.use_beam_search:
            return 1
        width = params.beam_width or num_choices
        if num_choices > width:
            raise InvalidRequest(f"n is {num_choices}, and beam_width {width}", field="n")
        if width % params.num_beam_groups:
            raise InvalidRequest(
                f"num_beam_groups is {params.num_beam_groups}, which does not divide {width} beams",
                field="num_beam_groups",
            )
        if width > self.max_num_seqs:
            raise InvalidRequest(
                f"{width} beams are asked for; {self.name} runs {self.max_num_seqs} sequences together",
                field="beam_width" if params.beam_width else "n",
                remedy=f"ask for {self.max_num_seqs} at the most, or raise max_batch_size in the logits "
                "stage's config.pbtxt",
            )
        return width

    def _context(self, token_ids: Sequence[int], params: SamplingParams, choice: int) -> PluginContext:
        seed = secrets.randbits(64) if params.seed is None else (params.seed + choice) % 2**64
        return PluginContext(
            tokenizer=self.tokenizer,
            vocab_size=self.vocab_size,
            prompt_token_ids=tuple(token_ids),
            params=params,
            seed=seed,
        )

    def _text(self, params: SamplingParams) -> StopChecker:
        """Return the text of an answer before its first token; forks of it share what took time to make."""
        finders: list[StopFinder] = [StopStrings(params.stop)] if params.stop else []
        finders += map(StopRegex, params.stop_regex)
        return StopChecker(
            self.tokenizer.detokenizer(
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
            ),
            finders,
            include_stop=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )

    def _encode(self, prompt: Prompt) -> tuple[str, Sequence[int]]:
        """Return how the prompt is called, and its token ids."""
        if isinstance(prompt, str):
            return "prompt", self.tokenizer.encode(prompt)
        if isinstance(prompt, Chat):
            return "messages", self._encode_chat(self.tokenizer.encode_chat, prompt)
        for index, token_id in enumerate(prompt):
            if not 0 <= token_id < self.vocab_size:
                field = f"prompt[{index}]"
                raise InvalidRequest(
                    f"{field} is {token_id}; the vocabulary has the ids 0 to {self.vocab_size - 1}",
                    field=field,
                )
        return "prompt", prompt

    def _encode_chat(self, encode: Callable[[Chat], list[int]], chat: Chat) -> list[int]:
        try:
            return encode(chat)
        except ModelFailed as error:
            raise ModelFailed(f"model {self.name!r}: {error.message}", remedy=error.remedy) from error
        finally:
            if not self.engine.alive:  # `close` came before: nobody else ends what this has started
                self.tokenizer.close()

    def _spellings(self, word: str) -> list[list[int]]:
        """Return the ids of a word as it begins a text, and as it follows another."""
        spelled = (self.tokenizer.encode(text, add_special_tokens=False) for text in (word, f" {word}"))
        return [ids for ids in spelled if ids and max(ids) < self.vocab_size]

    def _dry_breakers(self, params: SamplingParams) -> Breakers:
        texts = params.dry_sequence_breakers if params.dry_multiplier else ()
        return Breakers(ids for text in texts for ids in self._spellings_within.of(text))

    def _xtc_spared_ids(self, params: SamplingParams) -> list[int]:
        if not params.xtc_probability:
            return []
        return [*self.tokenizer.eos_token_ids, *self.tokenizer.encode("\n", add_special_tokens=False)[-1:]]

    def _thinking(self, context: PluginContext, *, begun: bool) -> list[tuple[str, LogitsProcessor]]:
        """Return what keeps to the request's budget, if it has one."""
        name = "thinking_token_budget"
        num_tokens = context.params.thinking_token_budget
        if num_tokens is None:
            return []
        start_id, end_id = self._thinking_ids
        if start_id is None or end_id is None:
            tags = " and ".join(THINKING_TAGS)
            raise InvalidRequest(f"{name} needs a model with the tokens {tags}", field=name)
        budget = ThinkingBudget(
            num_tokens=num_tokens,
            start_id=start_id,
            end_id=end_id,
            num_prompt_tokens=len(context.prompt_token_ids),
            begun=begun,
        )
        return [(name, budget)]

    def _begins_thought(self, prompt: Prompt, token_ids: Sequence[int], *, cut: bool) -> bool:
        """Whether the answer to a prompt of these tokens begins within a thought.

        In a chat only the words of the template behind the messages can begin one, or the message that is
        continued; never what somebody else has said. `cut`: the end of the prompt has been left out.
        """
        if not self._ends_within_thought(token_ids):
            return False
        if not isinstance(prompt, Chat):
            return True
        if cut:
            return False
        try:
            behind = self._encode_chat(self.tokenizer.encode_generation_prompt, prompt)
        except InvalidRequest:  # the template takes the messages as they are, and not with marks in them
            return False
        return self._ends_within_thought(behind)

    def _ends_within_thought(self, token_ids: Sequence[int]) -> bool:
        """Whether the tag that begins a thought is there, with no other tag and no special token since."""
        start_id, end_id = self._thinking_ids
        if start_id is None:
            return False
        for token_id in reversed(token_ids):
            if token_id == start_id:
                return True
            if token_id == end_id or self.tokenizer.is_silent(token_id):
                return False
        return False

    def _truncated(
        self, token_ids: Sequence[int], params: SamplingParams, *, max_length: int
    ) -> Sequence[int]:
        """Cut a prompt where the request wants it cut; the token that begins every text stays."""
        limit = params.truncate_prompt_tokens
        if limit == -1:
            limit = max(1, max_length - (params.max_tokens or 1))
        if limit is None or len(token_ids) <= limit:
            return token_ids
        if params.truncation_side == "right":
            return token_ids[:limit]
        begin = [token_ids[0]] if token_ids[0] == self.tokenizer.bos_id else []
        return [*begin, *token_ids[len(token_ids) - limit + len(begin) :]]

    def _check_ids(self, params: SamplingParams) -> None:
        for name, named_ids in params.token_ids().items():
            if any(token_id >= self.vocab_size for token_id in named_ids):
                raise InvalidRequest(
                    f"{name} must be below the vocabulary's size, {self.vocab_size}", field=name
                )
        if params.min_tokens and params.allowed_token_ids:
            ending = {*params.stop_token_ids}.union(() if params.ignore_eos else self.tokenizer.eos_token_ids)
            if ending.union(params.suppress_tokens) >= {*params.allowed_token_ids}:
                raise InvalidRequest("min_tokens leaves no allowed token", field="min_tokens")

    def _check_lengths(
        self, num_prompt_tokens: int, params: SamplingParams, *, max_length: int, field: str
    ) -> None:
        if num_prompt_tokens == 0:
            raise InvalidRequest(f"{field} is empty", field=field, remedy="give at least one token of text")
        beside = "" if max_length == self.max_length else " for each of its beams"
        if num_prompt_tokens >= max_length:
            raise ContextLengthExceeded(
                f"the prompt has {num_prompt_tokens} tokens; "
                f"the context of {self.name} is {max_length}{beside}, answer included",
                field=field,
                remedy="shorten the prompt, or raise max_sequence_length or, if the KV cache holds no more, "
                "kv_cache_bytes in the logits stage's config.pbtxt",
            )
        room = max_length - num_prompt_tokens
        if params.max_tokens is not None and params.max_tokens > room:
            raise ContextLengthExceeded(
                f"max_tokens is {params.max_tokens}; the prompt's {num_prompt_tokens} tokens leave {room} "
                f"of the context of {max_length}{beside}",
                field="max_tokens",
                remedy=f"ask for {room} tokens at the most, or shorten the prompt",
            )
