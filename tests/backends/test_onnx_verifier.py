from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from genserve.backends.logits_onnx import OnnxLogits
from genserve.backends.onnx_verifier import VERIFICATION_FILE, OnnxVerifier
from genserve.errors import RepositoryError
from genserve.export import CacheType, Precision, export_model
from genserve.export.progress import SilentProgress
from genserve.generation.engine import Engine
from genserve.generation.logits_model import FloatArray
from genserve.generation.prompt_lookup import PromptLookup
from genserve.generation.speculation import Speculation
from genserve.generation.token_sequence import TokenSequence
from tests.checkpoints import tiny_llama_checkpoint
from tests.export.graphs import write_graph
from tests.export.tiny_models import TINY_MODELS, tiny_checkpoint
from tests.fakes.drafts import Foreseen
from tests.fakes.sequences import Clock, sample_loop, sequence_of

PROMPTS = ([5, 6, 7, 8, 9], [11], [20 + i for i in range(40)])
NUM_TOKENS = 18     # behind each prompt; three verifications


def exported(checkpoint: Path, repository: Path, **how: CacheType | Precision) -> Path:
    export_model(str(checkpoint), repository=repository, name="m", progress=SilentProgress(), **how)
    return repository / "m_logits" / "1" / "model.onnx"


def begun(path: Path) -> OnnxLogits:
    logits = OnnxLogits(path, num_slots=3, max_length=96)
    for slot, prompt in enumerate(PROMPTS):
        logits.prefill([prompt], first_slot=slot, past=0)
    return logits


def both_ways(path: Path) -> tuple[list[FloatArray], list[FloatArray], OnnxLogits, OnnxLogits]:
    """The logits behind three prompts by steps of one token and by verifications, and where they were run."""
    ids = np.random.default_rng(0).integers(3, 60, (len(PROMPTS), NUM_TOKENS))
    past = np.array([len(prompt) for prompt in PROMPTS])
    plain, verified = begun(path), begun(path)
    verifier = OnnxVerifier(verified, path)
    for slot, prompt in enumerate(PROMPTS):    # its first run is over what was there
        verified.prefill([prompt], first_slot=slot, past=0)
    expected = [plain.decode(ids[:, i], past + i).copy() for i in range(NUM_TOKENS)]
    width, found = verifier.num_tokens, []
    for i in range(0, NUM_TOKENS, width):
        rows = verifier.verify(ids[:, i : i + width], past + i).reshape(len(PROMPTS), width, -1)
        found += [rows[:, token].copy() for token in range(width)]
    return expected, found, plain, verified


@pytest.mark.parametrize("kv_cache", ["float", "int8"])
def test_in_the_default_precision_a_verification_is_so_many_decodes_to_the_bit(tmp_path, kv_cache):
    checkpoint = tiny_llama_checkpoint(tmp_path / "tiny", head_dim=64)
    path = exported(checkpoint, tmp_path / "repository", kv_cache=kv_cache)
    expected, found, plain, verified = both_ways(path)
    np.testing.assert_array_equal(found, expected)
    for (name, one), (_, other) in zip(
        plain.cache.slots(0, num_slots=3), verified.cache.slots(0, num_slots=3), strict=True
    ):
        for slot, prompt in enumerate(PROMPTS):
            end = len(prompt) + NUM_TOKENS
            np.testing.assert_array_equal(one[slot, :, :end], other[slot, :, :end], err_msg=name)


@pytest.mark.parametrize("name", TINY_MODELS)
def test_every_familys_attention_is_run_token_by_token(tmp_path, name):
    write_graph(tiny_checkpoint(tmp_path / "tiny", **TINY_MODELS[name]), tmp_path / "graph")
    [path] = (tmp_path / "graph").rglob("model.onnx")
    expected, found, _, _ = both_ways(path)
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_an_export_without_the_graph_is_refused_with_what_to_do(tiny_repository, tmp_path):
    path = tiny_repository / "tiny_logits" / "1" / "model.onnx"
    logits = OnnxLogits(path, num_slots=1)
    with pytest.raises(RepositoryError, match=VERIFICATION_FILE) as caught:
        OnnxVerifier(logits, tmp_path / "model.onnx")
    assert "export the model again" in (caught.value.remedy or "")


@pytest.mark.parametrize("precision", ["fp32", "int8"])
@pytest.mark.parametrize("name", ["llama", "bloom_6_heads"])
def test_texts_are_the_same_with_and_without_drafts(tmp_path, name, precision):
    """Greedy and sampled, by all that a draft can get right or wrong, alone and together."""
    source = tiny_checkpoint(tmp_path / "tiny", **TINY_MODELS[name])
    path = write_graph(source, tmp_path / "graph", precision=precision).folder / "model.onnx"
    logits = OnnxLogits(path, num_slots=3, max_length=96)
    verifier, rng = OnnxVerifier(logits, path), random.Random(0)
    num_accepted = 0
    for number in range(12):
        prompts = [[rng.randrange(3, 300) for _ in range(rng.randint(1, 20))] for _ in range(number % 3 + 1)]
        params = rng.choice(
            [{}, {"temperature": 0.5, "seed": number}, {"temperature": 1.0, "top_p": 0.8, "seed": number}]
        )
        plain = [sequence_of(p, max_length=96, vocab_size=logits.vocab_size, **params) for p in prompts]
        run(Engine(logits, decode=sample_loop, prefix_cache=False), plain)
        draft = rng.choice([PromptLookup(), Foreseen(plain, error_rate=0.2)])
        engine = Engine(logits, decode=sample_loop, speculation=Speculation(verifier, draft), clock=Clock())
        found = [sequence_of(p, max_length=96, vocab_size=logits.vocab_size, **params) for p in prompts]
        num_accepted += run(engine, found)
        assert [s.token_ids for s in found] == [s.token_ids for s in plain]
    assert num_accepted > 100


def run(engine: Engine, sequences: list[TokenSequence]) -> int:
    """Answer them; returns how many drafted tokens were accepted."""
    num_accepted = 0
    for sequence in sequences:
        engine.add(sequence)
    while (result := engine.step()) is not None:
        assert not result.failed
        num_accepted += result.num_accepted
    return num_accepted
