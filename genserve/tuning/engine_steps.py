"""Engine steps: times whole steps of an engine, from the packed arrays to the text of each token."""

from __future__ import annotations

import itertools
import platform
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import cast

from genserve.engine.decoding_loops import DecodeFunction, DecodingLoops
from genserve.engine.kv_cache_manager import KVCacheManager
from genserve.engine.model_runner import ModelRunner
from genserve.engine.scheduler import Scheduler, SchedulerOutput
from genserve.engine.step_processor import StepProcessor
from genserve.engine.token_sequence import TokenSequence
from genserve.machine import num_cores
from genserve.repository.index import scan
from genserve.repository.repository import Repository
from genserve.repository.text_stages import text_models
from genserve.sampling.sampling_params import SamplingParams
from genserve.textmodel.decoder_stage import load_decoding
from genserve.textmodel.logits_runtime import LoadedLogits
from genserve.textmodel.text_model import TextModel
from genserve.tuning.measured_steps import EngineLimits, MeasuredEngine, MeasuredStep, ServingCost, StepSize

_CONTEXTS = (64, 512)
_PROMPTS = (0, 16, 48, 128)     # tokens; the longest prompt that a step has room for is measured too
_NUM_STEPS = 2                  # consecutive steps of one size
_GROWTH = 128                   # at most this many tokens are added to a sequence during a measurement
_GREEDY = SamplingParams(temperature=0, ignore_eos=True)


def measure_engine(name: str, *, repository: Path, budget_s: float) -> MeasuredEngine:
    """Measure the steps of a text model with its present configs, in rounds until the budget is spent.

    The first round is always complete. Sampling is greedy, without speculation.

    Raises:
        GenserveError: the model cannot be loaded.
    """
    models = Repository([repository])
    try:
        model = models.start_text_model(name)
        decoder = text_models(scan([repository]))[name]["decoder"]
        assert decoder.config is not None   # the model is loaded
        file = decoder.latest_version() / decoder.config.default_model_filename
        bench = _StepBench(model, decode=load_decoding(file, name=decoder.name).decode)
        return MeasuredEngine(
            model=name,
            machine=f"{platform.machine()}, {num_cores()} cores",
            limits=bench.limits,
            serving=ServingCost(),
            steps=bench.measure(budget_s=budget_s),
        )
    finally:
        models.close()


class _StepBench:
    """Runs steps of given sizes with the parts of an engine, but not the scheduler, which chooses sizes."""

    def __init__(self, text_model: TextModel, *, decode: DecodeFunction) -> None:
        model = cast("LoadedLogits", text_model.logits)     # the engine is in this process
        self._text_model = text_model
        self._model = model     # the engine of `text_model` is idle
        self._kv = KVCacheManager(
            num_blocks=model.num_blocks,
            block_size=model.block_size,
            num_state_slots=model.num_state_slots,
            prefix_cache=False,
        )
        max_tokens = Scheduler(self._kv, max_num_seqs=model.max_num_seqs).max_num_batched_tokens
        self.limits = EngineLimits(
            max_num_seqs=model.max_num_seqs,
            max_num_batched_tokens=max_tokens,
            max_length=model.max_length,
            num_blocks=model.num_blocks,
            block_size=model.block_size,
            num_state_slots=model.num_state_slots,
        )
        self._runner = ModelRunner(model, self._kv, max_num_batched_tokens=max_tokens)
        self._loops = DecodingLoops(decode)
        self._processor = StepProcessor(self._kv, self._loops, speculation=None)
        most = max(1, min(model.max_length // 2, model.max_length - _GROWTH))
        self._contexts = sorted({min(context, most) for context in _CONTEXTS})
        self._source = self._sequence(self._contexts[-1] + 1, num_cached=0)
        while self._source.num_pending > 1:
            self._run([], self._source, num_tokens=min(max_tokens, self._source.num_pending - 1))

    def measure(self, *, budget_s: float) -> list[MeasuredStep]:
        """Return the median step of each size, measured in rounds until the budget is spent."""
        end_s = time.perf_counter() + budget_s
        samples: dict[tuple[int, int, int], list[tuple[StepSize, float]]] = defaultdict(list)
        for number in itertools.count():
            for key, size, seconds in self._round():
                if number and time.perf_counter() >= end_s:
                    break
                samples[key].append((size, seconds))
            else:
                continue
            break
        return [_median_step(steps) for steps in samples.values()]

    def _round(self) -> Iterator[tuple[tuple[int, int, int], StepSize, float]]:
        for context in self._contexts:
            sequences = [self._sequence(context, num_cached=context - 1) for _ in range(self._room(context))]
            for count in _counts(len(sequences)):
                room = min(self.limits.max_num_batched_tokens - count, self._model.max_length - context - 1)
                for num_prompt in sorted({min(tokens, room) for tokens in (*_PROMPTS, room)}):
                    if count or num_prompt:
                        for _ in range(_NUM_STEPS):
                            size, seconds = self._step(sequences[:count], num_prompt, context=context)
                            yield (context, count, num_prompt), size, seconds
            self._drop(sequences)

    def _room(self, context: int) -> int:
        """Return the number of sequences that fit in addition to the first one and a prompt."""
        num_blocks = self._kv.num_free_blocks - self._kv.num_blocks_for(
            context + self.limits.max_num_batched_tokens
        )
        most = num_blocks // self._kv.num_blocks_for(min(context + _GROWTH, self._model.max_length))
        return max(0, min(self.limits.max_num_seqs - 1, most))

    def _step(
        self, decodes: Sequence[TokenSequence], num_prompt: int, *, context: int
    ) -> tuple[StepSize, float]:
        """Time a step with some decodes and a prompt, which follows `context` cached tokens."""
        num_cached = context if context == self._contexts[-1] else 0
        prompt = self._sequence(num_cached + num_prompt, num_cached=num_cached) if num_prompt else None
        size = StepSize(
            decodes=len(decodes),
            context_tokens=sum(sequence.num_computed_tokens for sequence in decodes),
            prompt_tokens=num_prompt,
            prompt_pairs=num_prompt * num_cached + num_prompt * (num_prompt + 1) // 2,
            rows=len(decodes) + (prompt is not None),
        )
        seconds = self._run(decodes, prompt, num_tokens=num_prompt)
        if prompt is not None:
            self._drop([prompt])
        return size, seconds

    def _run(
        self, decodes: Sequence[TokenSequence], prompt: TokenSequence | None, *, num_tokens: int
    ) -> float:
        started_s = time.perf_counter()
        output = SchedulerOutput()
        for sequence in decodes:
            self._kv.extend(sequence, 1)
            output.add(sequence, 1)
        output.num_decodes = len(decodes)
        if prompt is not None:
            output.add(prompt, num_tokens)
            output.num_prompt_tokens = num_tokens
        if self._kv.has_states:
            self._kv.schedule_states(output.requests, output.drafts)
        logits, num_rows = self._runner.run(output)
        for sequence in self._processor.process(output, logits, num_rows).generated:
            sequence.pop_delta()
        return time.perf_counter() - started_s

    def _sequence(self, num_tokens: int, *, num_cached: int) -> TokenSequence:
        """Return a sequence whose first tokens are in the KV cache, copied from the first sequence."""
        token_ids = [number % self._model.vocab_size for number in range(num_tokens)]
        [sequence] = self._text_model.builder.sequences(self._text_model.prepare(token_ids, _GREEDY))
        allocated = self._kv.allocate(sequence, num_spare=0)
        assert allocated, "`_room` leaves blocks for all sequences"
        if num_cached:
            num_blocks = self._kv.num_blocks_for(num_cached)
            source, own = self._source.block_table.block_ids, sequence.block_table.block_ids
            self._model.copy_blocks(list(zip(source[:num_blocks], own[:num_blocks], strict=True)))
            sequence.num_computed_tokens = num_cached
        return sequence

    def _drop(self, sequences: Sequence[TokenSequence]) -> None:
        for sequence in sequences:
            self._kv.free(sequence)
            self._loops.close(sequence)


def _counts(most: int) -> list[int]:
    """Return the numbers of decodes to measure: 0, the powers of two, and the most that have room."""
    return sorted({0, *itertools.takewhile(lambda count: count < most, (2**n for n in range(20))), most})


def _median_step(steps: Sequence[tuple[StepSize, float]]) -> MeasuredStep:
    """Return the median time of steps of nearly one size, with the size of the step in the middle."""
    sizes = sorted((size for size, _ in steps), key=lambda size: size.context_tokens)
    return MeasuredStep(size=sizes[len(sizes) // 2], seconds=median(seconds for _, seconds in steps))
