"""Each logits runtime, compared with transformers on the same checkpoint."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from genserve.backends.pytorch import open_module
from genserve.engine.beam_search import BeamSearch
from genserve.engine.engine import Engine
from genserve.engine.logits_model import LogitsModel
from genserve.engine.speculation import PromptLookup, Speculation
from genserve.export.export_options import ExportFormat
from genserve.textmodel.logits_config import pipeline_files
from genserve.textmodel.runtimes.growing_logits import GrowingLogits
from genserve.textmodel.runtimes.kv_cache_memory import DeviceMemory, HostMemory, LogitsMemory
from genserve.textmodel.runtimes.onnx_logits import OnnxLogits
from genserve.textmodel.runtimes.pipeline_logits import PipelineLogits
from genserve.textmodel.runtimes.torchscript_logits import TorchLogits
from genserve.textmodel.runtimes.uncached_logits import UncachedLogits
from tests.backends.inferences import ON_CPU, config_of
from tests.export.graphs import conversion_of, write_conversion, write_graph
from tests.fakes.sequences import Clock, IdText, logits_request, sample_loop, sequence_of
from tests.support.stage_chains import WHOLE_CONFIG, whole_torchscript
from tests.support.transformers_reference import greedy_ids, reference_model
from tests.textmodel.runtimes.cached_sequences import CachedSequences

TOLERANCE = 1e-4
MAX_LENGTH = 128


def whole(checkpoint: Path, folder: Path) -> LogitsModel:
    config = config_of(WHOLE_CONFIG)
    module = open_module(whole_torchscript(folder / "model.pt", checkpoint), config=config, placement=ON_CPU)
    return UncachedLogits(module.run, config, max_length=MAX_LENGTH)


def torchscript(checkpoint: Path, folder: Path) -> LogitsModel:
    conversion = conversion_of(checkpoint, export_format=ExportFormat.TORCHSCRIPT)
    path = write_conversion(conversion, folder).folder / "model.pt"
    return TorchLogits(path, max_num_seqs=8, max_length=MAX_LENGTH)


def onnx(checkpoint: Path, folder: Path, memory: LogitsMemory) -> LogitsModel:
    path = write_graph(checkpoint, folder).folder / "model.onnx"
    return OnnxLogits(path, max_num_seqs=8, max_length=MAX_LENGTH, memory=memory)


def onnx_host(checkpoint: Path, folder: Path) -> LogitsModel:
    return onnx(checkpoint, folder, HostMemory())


def onnx_device(checkpoint: Path, folder: Path) -> LogitsModel:
    """Stands for the memory of a GPU: torch tensors on the CPU, bound to the graph in the same way."""
    return onnx(checkpoint, folder, DeviceMemory("cpu"))


def pipeline(checkpoint: Path, folder: Path) -> LogitsModel:
    """Two stages of one layer, with micro-batches that cut the tokens anywhere."""
    first = write_graph(checkpoint, folder, pipeline_stages=2).folder / "model.onnx"
    files = pipeline_files(first, num_stages=2)
    return PipelineLogits(files, max_num_seqs=8, max_length=MAX_LENGTH, max_micro_batch=5)


KINDS = {
    "whole": whole,
    "torchscript": torchscript,
    "onnx_host": onnx_host,
    "onnx_device": onnx_device,
    "pipeline": pipeline,
}


@pytest.fixture(scope="module", params=[*KINDS, pytest.param("growing", marks=pytest.mark.extended)])
def kind(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def reference(kind, request):
    """The model itself; a traced one is of an architecture that no family builds."""
    name = "traced_checkpoint" if kind == "growing" else "tiny_checkpoint"
    return reference_model(request.getfixturevalue(name))


@pytest.fixture(scope="module")
def logits(kind, request, tmp_path_factory) -> LogitsModel:
    if kind in KINDS:
        return KINDS[kind](request.getfixturevalue("tiny_checkpoint"), tmp_path_factory.mktemp(kind))
    path = request.getfixturevalue("traced_repository") / "traced_logits" / "1" / "model.onnx"
    return GrowingLogits(path, max_num_seqs=8, max_length=MAX_LENGTH)


def last_row(reference, token_ids) -> np.ndarray:
    with torch.inference_mode():
        return reference(torch.tensor([token_ids])).logits[0, -1].numpy()


def random_ids(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 300, count).tolist()


def assert_equal_to_reference(rows: list[tuple[list[int], np.ndarray]], reference) -> None:
    for history, row in rows:
        np.testing.assert_allclose(row, last_row(reference, history), atol=TOLERANCE)


def test_prompts_of_different_lengths_and_their_decodes_equal_transformers(logits, reference):
    sequences = CachedSequences(logits)
    prompts = {name: random_ids(name, count) for name, count in enumerate((5, 17, 1, 40))}
    assert_equal_to_reference(sequences.forward(prompts), reference)
    for step in range(5):
        next_ids = {name: random_ids(100 + step + name, 1) for name in prompts}
        assert_equal_to_reference(sequences.forward(next_ids), reference)


def test_chunks_decodes_and_drafts_in_one_forward_equal_transformers_at_every_token(logits, reference):
    sequences = CachedSequences(logits)
    sequences.forward({"decode": random_ids(1, 9), "draft": random_ids(2, 30)})
    prompt = random_ids(3, 60)
    for step, start in enumerate(range(0, 60, 16)):
        new = {
            "decode": random_ids(10 + step, 1),
            "chunk": prompt[start : start + 16],
            "draft": random_ids(20 + step, 4),
            step: random_ids(30 + step, 5),
        }
        rows = sequences.forward(new, wanted="all")
        assert len(rows) == sum(map(len, new.values()))
        assert_equal_to_reference(rows, reference)


def test_logits_are_computed_at_the_requested_tokens(logits, reference):
    sequences = CachedSequences(logits)
    prompts = {"a": random_ids(1, 20), "b": random_ids(2, 3), "c": random_ids(3, 20)}
    assert_equal_to_reference(sequences.forward(prompts, wanted=[0, 7, 19, 21, 42]), reference)
    assert sequences.forward({"a": random_ids(6, 3), "d": random_ids(7, 9)}, wanted=[]) == []
    sequences.forward({"c": random_ids(4, 5), "b": random_ids(5, 1)}, wanted=[0])
    rows = sequences.forward({"b": [7], "c": [8], "a": [9]}, wanted=[1])
    assert rows[0][0] == sequences.history("c")
    assert_equal_to_reference(rows, reference)


def test_rejected_draft_tokens_leave_no_trace(logits, reference):
    sequences = CachedSequences(logits)
    sequences.forward({"a": random_ids(1, 14), "b": random_ids(2, 30)})
    for step, length in enumerate((15, 17, 18)):
        sequences.forward({"a": random_ids(10 + step, 8), "b": [5]}, wanted="all")
        sequences.shorten("a", length)
        rows = sequences.forward({"a": random_ids(20 + step, 1), "b": [6]})
        assert_equal_to_reference(rows, reference)


def test_a_sequence_goes_on_in_copied_blocks_and_the_first_in_its_own(logits, reference):
    sequences = CachedSequences(logits)
    sequences.forward({"a": random_ids(1, 40), "b": random_ids(2, 20)})
    sequences.copy("a", "c", "d", length=37)
    sequences.copy("b", "e", length=16)
    logits.copy_blocks([])
    new = {name: random_ids(number, 1 + number) for number, name in enumerate("abcde")}
    assert_equal_to_reference(sequences.forward(new, wanted="all"), reference)


def test_reused_blocks_do_not_leak_their_old_content(logits, reference):
    sequences = CachedSequences(logits)
    for step in range(3):
        for name in range(8):
            sequences.forward({name: random_ids(step * 8 + name, 70)})
            if step:
                sequences.shorten(name, 0)
                rows = sequences.forward({name: random_ids(name, 3)})
                assert_equal_to_reference(rows, reference)
            sequences.shorten(name, 0)


def test_a_sequence_is_filled_to_its_end(logits, reference):
    sequences, history = CachedSequences(logits), random_ids(6, MAX_LENGTH)
    sequences.forward({"a": history[:-1], "b": [5]})
    assert_equal_to_reference(sequences.forward({"b": [6], "a": history[-1:]}), reference)


@pytest.mark.parametrize(
    "speculation",
    [pytest.param(None, marks=pytest.mark.extended), Speculation(PromptLookup())],
    ids=["plain", "speculating"],
)
def test_the_engine_s_greedy_tokens_are_those_of_generate(logits, reference, speculation):
    """Ragged prompts that come and go, with a logits request that branches off one of them."""
    engine = Engine(logits, decode=sample_loop, clock=Clock(), speculation=speculation)
    sizes = {"max_length": MAX_LENGTH, "vocab_size": logits.vocab_size}
    prompts = [random_ids(20 + i, n) for i, n in enumerate((3, 30, 11, 1, 18))]
    sequences = [
        sequence_of(prompt, max_tokens=8 + 3 * i, temperature=0, **sizes) for i, prompt in enumerate(prompts)
    ]
    rows: dict[object, np.ndarray] = {}
    branch = logits_request([*prompts[1][:25], 5, 6], **sizes)
    for number, sequence in enumerate(sequences):
        engine.add(sequence)
        if number % 2:
            rows.update(engine.step().logits)
    engine.add_logits(branch)
    while not all(s.finished for s in sequences) or not rows:
        rows.update(engine.step().logits)
    np.testing.assert_allclose(rows[branch], last_row(reference, branch.token_ids), atol=TOLERANCE)
    for sequence, prompt in zip(sequences, prompts, strict=True):
        expected = greedy_ids(reference, prompt, num_tokens=sequence.num_new_tokens)
        assert sequence.token_ids[len(prompt) :] == expected


def test_concurrent_beam_searches_equal_those_of_generate(logits, reference):
    """Their blocks are copied while others go on."""
    engine = Engine(logits, decode=sample_loop, clock=Clock())
    answers = {}
    for number, length in enumerate((3, 30)):
        prompt = random_ids(40 + number, length)
        answer = sequence_of(
            prompt,
            max_length=MAX_LENGTH,
            vocab_size=logits.vocab_size,
            max_tokens=7 + number,
            use_beam_search=True,
        )
        BeamSearch([answer], width=3, text=IdText())
        answers[answer] = greedy_ids(reference, prompt, num_tokens=7 + number, num_beams=3)
        engine.add(answer)
        engine.step()
    while not all(answer.finished for answer in answers):
        engine.step()
    for answer, expected in answers.items():
        assert answer.token_ids[answer.num_prompt_tokens :] == expected
