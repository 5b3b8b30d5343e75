"""Token sequences for engine tests: text is the ids in angle brackets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, Self

from genserve.engine.engine_request import LogitsRequest
from genserve.engine.generation_request import GenerationRequest
from genserve.engine.sequence_plugins import SequencePlugins
from genserve.engine.token_sequence import TokenSequence
from genserve.errors import GenserveError
from genserve.sampling.grammar_bitmask import StructuredOutputGrammar
from genserve.sampling.logits_array import FloatArray
from genserve.sampling.logits_processors import DryBreakers, TokenizedParams
from genserve.sampling.sampling_params import SamplingParams
from tests.fakes.logits import VOCAB_SIZE


class IdText:
    """`AnswerText` over `<id>` for each token; stops at one given id."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.stop: str | None = None
        self._stop_at = stop_at

    def fork(self) -> Self:
        return copy(self)

    def push(self, token_id: int) -> str:
        if token_id == self._stop_at:
            self.stop = f"<{token_id}>"
            return ""
        return f"<{token_id}>"

    def flush(self) -> str:
        return ""


def sequence_of(
    prompt: Sequence[int],
    *,
    kind: type[TokenSequence] = TokenSequence,
    max_length: int = 64,
    vocab_size: int = VOCAB_SIZE,
    eos_token_ids: Sequence[int] = (),
    stop_at: int | None = None,
    bad_words: Sequence[Sequence[int]] = (),
    dry_breakers: Sequence[Sequence[int]] = (),
    plugins: SequencePlugins | None = None,
    deadline_s: float | None = None,
    xtc_spared_ids: Sequence[int] = (),
    grammar: StructuredOutputGrammar | None = None,
    **params: Any,
) -> TokenSequence:
    sampling = SamplingParams(**params)
    sequence = kind(
        prompt,
        params=sampling,
        seed=sampling.seed or 0,
        eos_token_ids=frozenset(eos_token_ids),
        text=IdText(stop_at),
        max_length=max_length,
        vocab_size=vocab_size,
        tokenized=TokenizedParams(
            bad_words=bad_words, dry_breakers=DryBreakers(dry_breakers), spared_ids=xtc_spared_ids
        ),
        deadline_s=deadline_s,
        plugins=plugins,
        grammar=grammar,
    )
    request_of(sequence)
    return sequence


def request_of(*sequences: TokenSequence) -> GenerationRequest:
    """Return the request of which these sequences are the choices, for an engine with `made_sequences`."""
    prompt: Any = sequences     # which only `made_sequences` reads
    first = sequences[0]
    request = GenerationRequest(
        prompt=prompt,
        prompt_token_ids=tuple(first.token_ids),
        params=first.params,
        seeds=tuple(sequence.sampling.seed for sequence in sequences),
    )
    for choice, sequence in enumerate(sequences):
        sequence.request, sequence.choice = request, choice
    return request


def made_sequences(request: GenerationRequest) -> Sequence[TokenSequence]:
    """Return the sequences that `request_of` was called for."""
    sequences: Any = request.prompt
    return sequences


async def sample_loop(sequence: TokenSequence) -> None:
    """The loop of the shipped decoder stage."""
    while not sequence.finished:
        sequence.append(await sequence.sample())


def logits_request(
    token_ids: Sequence[int],
    *,
    on_logits: Callable[[FloatArray | GenserveError], None] = lambda _: None,
    max_length: int = 64,
    vocab_size: int = VOCAB_SIZE,
) -> LogitsRequest:
    return LogitsRequest(token_ids, on_logits=on_logits, vocab_size=vocab_size, max_length=max_length)


class Clock:
    """A clock that stands still until a test moves it."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s
