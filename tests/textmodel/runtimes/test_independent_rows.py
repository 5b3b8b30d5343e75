"""In the default precision a sequence's tokens do not depend on its batch, on the real engine."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from genserve.engine.engine import Engine
from genserve.engine.speculation import Speculation
from genserve.engine.token_sequence import TokenSequence
from genserve.export import CacheType, export_model
from genserve.export.export_options import SilentProgress
from genserve.textmodel.runtimes.onnx_logits import OnnxLogits
from tests.fakes.drafts import Foreseen
from tests.fakes.sequences import sample_loop, sequence_of

NUM_SCHEDULES = 500
MAX_NUM_SEQS, MAX_LENGTH = 6, 192
MAX_TOKENS = 90


def logits_of(file: Path) -> OnnxLogits:
    """A cache with the memory of two sequences for six, so that some must leave and come back."""
    num_bytes = OnnxLogits(file, max_num_seqs=2, max_length=MAX_LENGTH).kv_cache_bytes
    return OnnxLogits(file, max_num_seqs=MAX_NUM_SEQS, max_length=MAX_LENGTH, kv_cache_bytes=num_bytes)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Path) -> Path:
    return exported(tiny_checkpoint, tmp_path_factory.mktemp("default"), kv_cache="float")


def exported(checkpoint: Path, repository: Path, *, kv_cache: CacheType) -> Path:
    export_model(
        str(checkpoint), repository=repository, name="tiny", kv_cache=kv_cache, progress=SilentProgress()
    )
    return repository / "tiny_logits" / "1" / "model.onnx"


def prompts() -> list[list[int]]:
    rng = random.Random(0)
    stems = [[rng.randrange(3, 300) for _ in range(80)] for _ in range(2)]
    return [
        rng.choice(stems)[: rng.choice([0, 20, 50, 80])]
        + [rng.randrange(3, 300) for _ in range(rng.randint(1, 30))]
        for _ in range(16)
    ]


def sequence(prompt: Sequence[int], *, logits: OnnxLogits, max_tokens: int = MAX_TOKENS) -> TokenSequence:
    return sequence_of(prompt, max_length=MAX_LENGTH, vocab_size=logits.vocab_size, max_tokens=max_tokens)


def run(engine: Engine, arrivals: Sequence[TokenSequence], *, rng: random.Random) -> tuple[int, int]:
    """Let them come at random between the steps.

    Returns:
        How often one was preempted, and how many drafted tokens were accepted.
    """
    coming, num_preempted, num_accepted = list(arrivals), 0, 0
    while coming or engine.num_running or engine.num_waiting:
        while coming and rng.random() < 0.4:
            engine.add(coming.pop())
        result = engine.step()
        assert result is None or not result.failed
        if result:
            num_preempted += result.num_preempted
            num_accepted += result.num_accepted
    return num_preempted, num_accepted


def answered_alone(logits: OnnxLogits, prompt: Sequence[int]) -> TokenSequence:
    """Return the answer to a prompt that runs alone, without cached tokens."""
    one = sequence(prompt, logits=logits)
    run(Engine(logits, decode=sample_loop, prefix_cache=False), [one], rng=random.Random(0))
    return one


def compare(file: Path, prompts: Sequence[Sequence[int]], seeds: range) -> None:
    """Run a schedule for each seed: some of the same prompts together, with and without drafts."""
    logits = logits_of(file)
    alone = [answered_alone(logits, prompt) for prompt in prompts]
    num_preempted = num_cached = num_accepted = 0
    for seed in seeds:
        rng = random.Random(seed)
        together = {
            sequence(
                expected.token_ids[: expected.num_prompt_tokens],
                logits=logits,
                max_tokens=MAX_TOKENS if seed % 10 == 0 else rng.choice([3, 8, 12]),
            ): expected
            for expected in rng.sample(alone, rng.randint(2, 8))
        }
        draft = Foreseen(alone, error_rate=0.2)
        speculation = Speculation(draft) if rng.random() < 0.5 else None
        engine = Engine(
            logits,
            decode=sample_loop,
            max_num_batched_tokens=rng.choice([16, 64, 512]),
            speculation=speculation,
        )
        preempted, accepted = run(engine, list(together), rng=rng)
        num_preempted += preempted
        num_accepted += accepted
        for found, expected in together.items():
            assert found.token_ids == expected.token_ids[: len(found.token_ids)], f"schedule {seed}"
        num_cached += sum(found.num_cached_tokens for found in together)
    assert num_preempted > 0
    assert num_cached > 0
    assert num_accepted > 0


@pytest.mark.parametrize(
    "seeds",
    [
        range(15),
        pytest.param(range(15, 100), marks=pytest.mark.extended),
        pytest.param(range(100, NUM_SCHEDULES), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_tokens_of_a_sequence_do_not_depend_on_its_batch(tiny: Path, seeds: range) -> None:
    compare(tiny, prompts(), seeds)


def test_an_int8_cache_does_not_depend_on_the_batch(tiny_checkpoint: Path, tmp_path: Path) -> None:
    compare(exported(tiny_checkpoint, tmp_path / "repository", kv_cache="int8"), prompts(), range(0, 50, 10))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_tokens_of_the_default_model_do_not_depend_on_the_batch(smollm2_repository: Path) -> None:
    """Its 30 layers make a rounding that differs a wide difference of logits; two layers do not."""
    compare(smollm2_repository / "smollm2_logits" / "1" / "model.onnx", prompts()[:8], range(0, 12, 2))
