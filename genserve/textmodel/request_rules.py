"""Request rules: what the context and the vocabulary of one text model allow in a request."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from genserve.engine.kv_cache_manager import max_tokens_per_sequence
from genserve.errors import ContextLengthExceeded, InvalidRequest
from genserve.sampling.logits_processors import DryBreakers, TokenizedParams
from genserve.sampling.sampling_params import SamplingParams
from genserve.text.tokenizer import Tokenizer, TooManyTokens
from genserve.text.vocabulary import Spellings
from genserve.textmodel.logits_config import LengthLimit
from genserve.textmodel.logits_runtime import LogitsFigures

logger = logging.getLogger(__name__)


class ContextLimits:
    """Rejects requests that exceed the context or the concurrent sequences of one text model."""

    def __init__(self, name: str, logits: LogitsFigures) -> None:
        """Check requests to the model `name`."""
        self._name = name
        self._logits = logits

    def check(self, num_prompt_tokens: int, params: SamplingParams, *, num_choices: int, field: str) -> int:
        """Return how many tokens prompt and answer of each choice can have together.

        Raises:
            InvalidRequest, ContextLengthExceeded: see `max_length` and `check_length`.
        """
        max_length = self.max_length(params, num_choices=num_choices)
        self.check_length(num_prompt_tokens, max_length=max_length, field=field)
        return max_length

    def max_length(self, params: SamplingParams, *, num_choices: int) -> int:
        """Return how long the sequences of a request can be; beams are to fit into the KV cache together.

        Raises:
            InvalidRequest: the search has more beams than sequences can run concurrently.
        """
        width = beam_width(params, num_choices=num_choices)
        logits = self._logits
        if width > logits.max_num_seqs:
            raise InvalidRequest(
                f"the request has {width} beams; "
                f"{self._name} runs {logits.max_num_seqs} sequences concurrently",
                field="beam_width" if params.beam_width else "n",
                remedy=f"ask for {logits.max_num_seqs} at most, or raise max_batch_size in the logits "
                "stage's config.pbtxt",
            )
        if width == 1:
            return logits.max_length
        return max_tokens_per_sequence(logits, width)

    def check_length(self, num_prompt_tokens: int, *, max_length: int, field: str) -> None:
        """Reject a prompt that is empty, or that leaves no token of `max_length` for an answer.

        Raises:
            InvalidRequest: the prompt is empty.
            ContextLengthExceeded: the prompt is too long; the error has both numbers.
        """
        if num_prompt_tokens == 0:
            raise InvalidRequest(f"{field} is empty", field=field, remedy="give at least one token of text")
        if num_prompt_tokens >= max_length:
            counted = TooManyTokens(num_prompt_tokens, is_least=False)
            raise self.too_long(counted, max_length=max_length, field=field)

    def too_long(self, prompt: TooManyTokens, *, max_length: int, field: str) -> ContextLengthExceeded:
        """Return the error of a prompt that leaves no token of `max_length` for an answer.

        The words are OpenAI's, in which most clients find both numbers.
        """
        own, limit = self._logits.context_length, self._logits.length_limit
        if max_length < self._logits.max_length:  # several beams share the KV cache
            remedy = LengthLimit.MODEL.value
        else:
            remedy = f"{limit}: the model itself takes {own} tokens" if max_length < own else limit.value
            if prompt.num_tokens < own:
                logger.warning(
                    "model %s rejects a prompt of %d tokens, since its context has %d; %s",
                    self._name,
                    prompt.num_tokens,
                    max_length,
                    remedy,
                )
        number = f"at least {prompt.num_tokens}" if prompt.is_least else f"{prompt.num_tokens}"
        name = "messages" if field == "messages" else "prompt"
        return ContextLengthExceeded(
            f"This model's maximum context length is {max_length} tokens{self._per_beam(max_length)}. "
            f"However, your {name} resulted in {number} tokens. Please reduce the length of the {name}.",
            field=field,
            remedy=remedy,
            num_tokens=prompt.num_tokens,
            max_length=max_length,
        )

    def _per_beam(self, max_length: int) -> str:
        return "" if max_length == self._logits.max_length else " for each of its beams"


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


def check_token_ids(token_ids: Sequence[int], *, vocab_size: int, field: str) -> None:
    """Raise InvalidRequest if an id is not in the vocabulary; its `field` is the place in `field`."""
    for index, token_id in enumerate(token_ids):
        if not 0 <= token_id < vocab_size:
            place = f"{field}[{index}]"
            raise InvalidRequest(
                f"{place} is {token_id}; the vocabulary has the ids 0 to {vocab_size - 1}", field=place
            )


def beam_width(params: SamplingParams, *, num_choices: int) -> int:
    """Return the number of beams of a request; 1: no beam search."""
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
