"""Text requests of a simulation, and the answers that they get alone, without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np

from genserve.completion import FinishReason, StopReason
from genserve.engine.beam_search import BeamSearch
from genserve.engine.decoding_loops import DecodeFunction
from genserve.engine.generation_request import GenerationRequest
from genserve.engine.token_sequence import Awaited, TokenSequence
from genserve.errors import GenserveError, InvalidRequest, ModelFailed
from genserve.sampling.batch_sampler import sample
from genserve.sampling.sampling_params import SamplingParams
from tests.fakes.grammars import Steps
from tests.fakes.sequences import IdText, sample_loop
from tests.simulation.simulated_logits import NAN_TOKEN, VOCAB_SIZE, best_after, row_after

EOS, STOP_AT = 1, 2
RAISING_TOKEN = NAN_TOKEN - 1  # the decoding loops of sequences that contain it raise
NUM_WORDS = RAISING_TOKEN  # the tokens of ordinary prompts


async def in_threes(sequence: TokenSequence) -> None:
    """Appends two fixed tokens after each sampled one."""
    while not sequence.finished:
        sequence.append(await sequence.sample())
        for token_id in (3, 4):
            if not sequence.finished:
                sequence.append(token_id)


async def by_logits(sequence: TokenSequence) -> None:
    """Chooses the best token itself, and ends with it after a while."""
    while not sequence.finished:
        sequence.append(int((await sequence.logits()).argmax()))
        if sequence.num_new_tokens == 9:
            return


def raising(decode: DecodeFunction) -> DecodeFunction:
    """The loop, which fails at the second token of a sequence with `RAISING_TOKEN`."""

    async def loop(sequence: TokenSequence) -> None:
        if RAISING_TOKEN in sequence.token_ids:
            sequence.append(await sequence.sample())
            raise RuntimeError("injected")
        await decode(sequence)

    return loop


LOOPS = tuple(raising(loop) for loop in (sample_loop, sample_loop, in_threes, by_logits))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TextRequest:
    """What a client asks for, and how it behaves."""

    prompt: tuple[int, ...]
    params: SamplingParams
    num_choices: int = 1
    is_valid: bool = True  # or its preparation fails
    stop_at: int | None = None
    grammar: tuple[tuple[int, ...], ...] | None = None  # the ids that may come at each step
    stream: bool = True
    arrives_s: float = 0.0
    leaves_s: float | None = None  # when the client disconnects; None: it stays
    read_s: float = 0.0  # how long it takes to read each event
    stalls: bool = False  # it stops reading after the first event, until it leaves

    @property
    def is_poisoned(self) -> bool:
        """Whether the logits or the decoding loop of the request fail."""
        return not {NAN_TOKEN, RAISING_TOKEN}.isdisjoint(self.prompt)

    def generation_request(self, *, params: SamplingParams, arrived_s: float) -> GenerationRequest:
        """Return the request for an engine whose sequences `sequences` makes."""
        if not self.is_valid:
            raise InvalidRequest("injected", field="prompt")
        prompt: Any = self
        seeds = tuple((params.seed or 0) + choice for choice in range(self.num_choices))
        return GenerationRequest(
            prompt=prompt, prompt_token_ids=self.prompt, params=params, seeds=seeds, arrived_s=arrived_s
        )

    def sequences(
        self, *, max_length: int, deadline_s: float | None = None, max_beam_length: int = 0
    ) -> list[TokenSequence]:
        """Return the sequences of its choices, beams included."""
        is_search = self.params.use_beam_search
        sequences = [
            TokenSequence(
                self.prompt,
                params=self.params,
                seed=(self.params.seed or 0) + choice,
                eos_token_ids=frozenset({EOS}),
                text=IdText(self.stop_at),
                max_length=max_beam_length if is_search else max_length,
                vocab_size=VOCAB_SIZE,
                deadline_s=deadline_s,
                grammar=None if self.grammar is None else Steps(*self.grammar),
            )
            for choice in range(self.num_choices)
        ]
        if is_search:
            BeamSearch(sequences, width=self.params.beam_width or 2, text=IdText(self.stop_at))
        return sequences


@dataclass(slots=True, kw_only=True)
class SoloAnswer:
    """The end of a choice that has the model to itself."""

    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: StopReason | None = None
    error: type[GenserveError] | None = None


def solo_answers(
    request: TextRequest, *, decode: DecodeFunction, max_length: int, max_beam_length: int
) -> list[SoloAnswer]:
    """Return the answers of plain loops, one for each choice."""
    sequences = request.sequences(max_length=max_length, max_beam_length=max_beam_length)
    if request.params.use_beam_search:
        return _search(sequences)
    return [_decode(sequence, decode) for sequence in sequences]


def _decode(sequence: TokenSequence, decode: DecodeFunction) -> SoloAnswer:
    params = sequence.params
    is_greedy = not params.temperature and sequence.sampling.grammar is None
    loop, value = decode(sequence), None
    error: type[GenserveError] | None = None
    try:
        while True:
            awaited = loop.send(value)
            if awaited is Awaited.LOGITS:
                value = row_after(sequence.token_ids).copy()
            elif NAN_TOKEN in sequence.token_ids:
                # With a grammar the engine cannot know whose fault it is.
                error = ModelFailed if sequence.sampling.grammar is None else InvalidRequest
                break
            elif is_greedy:
                value = best_after(sequence.token_ids)
            else:
                [picked] = sample(row_after(sequence.token_ids)[None].copy(), [sequence])
                if not picked.finite:
                    error = InvalidRequest
                    break
                value = picked.token_id
    except StopIteration:
        if not sequence.finished:
            sequence.finish(FinishReason.STOP)
    except GenserveError as failure:
        error = type(failure)
    except RuntimeError:
        error = ModelFailed
    loop.close()
    return _answer(sequence, error)


def _search(answers: Sequence[TokenSequence]) -> list[SoloAnswer]:
    search: Any = answers[0].search
    error: type[GenserveError] | None = None
    while not search.done and error is None:
        if search.step(np.stack([row_after(beam.token_ids) for beam in search.requests])) is None:
            error = ModelFailed
    return [_answer(answer, error) for answer in answers]


def _answer(sequence: TokenSequence, error: type[GenserveError] | None) -> SoloAnswer:
    return SoloAnswer(
        token_ids=sequence.token_ids[sequence.num_prompt_tokens :],
        finish_reason=sequence.finish_reason,
        stop_reason=sequence.stop_reason,
        error=error,
    )


class TextRequests:
    """Draws requests whose prompts share beginnings."""

    def __init__(self, rng: Random, *, within_s: float, rates: dict[str, float]) -> None:
        self._rng = rng
        self._within_s = within_s
        self._rates = rates
        self.stems = [tuple(rng.randrange(NUM_WORDS) for _ in range(28)) for _ in range(2)]

    def _has(self, name: str) -> bool:
        return self._rng.random() < self._rates.get(name, 0.0)

    def prompt(self) -> tuple[int, ...]:
        """Return a prompt of at most 32 tokens."""
        rng = self._rng
        own = (rng.randrange(NUM_WORDS) for _ in range(rng.choice([0, 1, 4])))
        return (*rng.choice(self.stems)[: rng.randint(1, 28)], *own)

    def draw_single(self) -> TextRequest:
        """Return a valid request for one choice."""
        while (
            (request := self.draw()).num_choices > 1 or request.params.use_beam_search or not request.is_valid
        ):
            pass
        return request

    def draw(self) -> TextRequest:
        """Return a request."""
        rng = self._rng
        prompt = self.prompt()
        if self._has("nan"):
            prompt = (*prompt, NAN_TOKEN)
        elif self._has("raising_loop"):
            prompt = (*prompt, RAISING_TOKEN)
        num_choices = rng.choice([1, 1, 1, 2, 3])
        params: dict[str, Any] = {
            "temperature": rng.choice([0.0, 0.0, 0.0, 1.0]),
            "seed": rng.randrange(100),
            "max_tokens": rng.choice([1, 2, 4, 8, 14]),
            "priority": rng.choice([0, 0, 0, 1, -1]),
            "cache_salt": rng.choice([None, None, None, "a"]),
            "stream_interval": rng.choice([1, 1, 3]),
        }
        grammar, stop_at = None, rng.choice([None, None, STOP_AT])
        if self._has("deadline"):
            params["max_time_ms"] = rng.choice([1, 20, 100, 400])
        if self._has("beams"):
            stop_at = None
            prompt, width = prompt[:6], rng.choice([2, 3])
            own = {"use_beam_search": True, "beam_width": width, "max_tokens": rng.randint(1, 5)}
            params = {name: params[name] for name in params if name not in ("temperature", "seed")} | own
            num_choices = rng.randint(1, width)
            if rng.random() < 0.5:
                stop_at, params["stop"] = STOP_AT, (f"<{STOP_AT}>",)
        elif self._has("grammar"):
            stop_at = None
            grammar = tuple(tuple(rng.sample(range(3, NUM_WORDS), 3)) for _ in range(rng.randint(1, 4)))
            if rng.random() < 0.4:
                grammar = (*grammar, ())  # which fails
        elif rng.random() < 0.1:
            params["prompt_logprobs"] = 0
        leaves = self._has("disconnect")
        arrives_s = rng.random() * self._within_s
        return TextRequest(
            prompt=prompt,
            params=SamplingParams(**params),
            num_choices=num_choices,
            is_valid=rng.random() > 0.02,
            stop_at=stop_at,
            grammar=grammar,
            stream=rng.random() < 0.7,
            arrives_s=arrives_s,
            leaves_s=arrives_s + rng.random() * 2 * self._within_s if leaves else None,
            read_s=rng.choice([0.001, 0.1]) if self._has("slow_reader") else 0.0,
            stalls=leaves and rng.random() < 0.3,
        )
