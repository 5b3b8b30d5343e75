"""Each kind of logits runtime against transformers' own model of the same checkpoint."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from genserve.backends.device_memory import DeviceMemory
from genserve.backends.logits_growing import GrowingLogits
from genserve.backends.logits_memory import HostMemory, LogitsMemory
from genserve.backends.logits_onnx import OnnxLogits
from genserve.backends.logits_torchscript import TorchLogits
from genserve.backends.logits_whole import WholeLogits
from genserve.backends.pytorch import open_module
from genserve.backends.row_picker import pick_rows
from genserve.export.form import Form
from genserve.generation.beam_search import BeamSearch
from genserve.generation.engine import Engine
from genserve.generation.logits_model import LogitsModel
from tests.backends.inferences import ON_CPU, config_of
from tests.chains import WHOLE_CONFIG, whole_torchscript
from tests.export.graphs import conversion_of, write_conversion, write_graph
from tests.fakes.sequences import Clock, IdText, logits_request, sample_loop, sequence_of
from tests.reference import greedy_ids, reference_model

TOLERANCE = 1e-4
MAX_LENGTH = 128


def whole(checkpoint: Path, folder: Path) -> LogitsModel:
    config = config_of(WHOLE_CONFIG)
    module = open_module(
        whole_torchscript(folder / "model.pt", checkpoint), config=config, placement=ON_CPU
    )
    return WholeLogits(module.run, config, max_length=MAX_LENGTH)


def torchscript(checkpoint: Path, folder: Path) -> LogitsModel:
    conversion = conversion_of(checkpoint, form=Form.TORCHSCRIPT)
    path = write_conversion(conversion, folder).folder / "model.pt"
    return TorchLogits(path, num_slots=8, max_length=MAX_LENGTH)


def onnx(checkpoint: Path, folder: Path, memory: LogitsMemory) -> LogitsModel:
    path = write_graph(checkpoint, folder).folder / "model.onnx"
    return OnnxLogits(path, num_slots=8, max_length=MAX_LENGTH, memory=memory)


def onnx_host(checkpoint: Path, folder: Path) -> LogitsModel:
    return onnx(checkpoint, folder, HostMemory())


def onnx_device(checkpoint: Path, folder: Path) -> LogitsModel:
    """The memory of a GPU is here that of the CPU: tensors of torch, which the graph is bound to alike."""
    return onnx(checkpoint, folder, DeviceMemory("cpu"))


KINDS = {"whole": whole, "torchscript": torchscript, "onnx_host": onnx_host, "onnx_device": onnx_device}


@pytest.fixture(scope="module", params=[*KINDS, "growing"])
def kind(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def reference(kind, request):
    """The model itself; a traced one is of an architecture that no family builds."""
    name = "stablelm_checkpoint" if kind == "growing" else "tiny_checkpoint"
    return reference_model(request.getfixturevalue(name))


@pytest.fixture(scope="module")
def logits(kind, request, tmp_path_factory) -> LogitsModel:
    if kind in KINDS:
        return KINDS[kind](request.getfixturevalue("tiny_checkpoint"), tmp_path_factory.mktemp(kind))
    path = request.getfixturevalue("traced_repository") / "traced_logits" / "1" / "model.onnx"
    return GrowingLogits(path, num_slots=8, max_length=MAX_LENGTH)


def last_row(reference, token_ids) -> np.ndarray:
    with torch.inference_mode():
        return reference(torch.tensor([token_ids])).logits[0, -1].numpy()


def random_ids(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 300, count).tolist()


def assert_equal_to_reference(rows: np.ndarray, histories: list[list[int]], reference) -> None:
    assert rows.shape == (len(histories), 320)
    assert np.asarray(rows).dtype == np.float32
    for row, history in zip(np.asarray(rows), histories, strict=True):
        np.testing.assert_allclose(row, last_row(reference, history), atol=TOLERANCE)


def decode(logits: LogitsModel, histories: list[list[int]]) -> np.ndarray:
    """Run the last token of each history, the others being in the cache."""
    last = np.array([history[-1] for history in histories])
    past = np.array([len(history) - 1 for history in histories])
    return logits.decode(last, past)


def test_a_padded_prefill_and_a_ragged_decode_equal_transformers(logits, reference):
    histories = [random_ids(i, n) for i, n in enumerate((5, 17, 1, 40))]
    assert_equal_to_reference(logits.prefill(histories, first_slot=0, past=0), histories, reference)
    for step in range(5):
        for history in histories:
            history.append(random_ids(100 + step, 1)[0])
        assert_equal_to_reference(decode(logits, histories), histories, reference)


def test_a_prompt_in_chunks_equals_transformers_and_leaves_its_neighbours_alone(logits, reference):
    neighbour, prompt = random_ids(1, 9), random_ids(2, 60)
    logits.prefill([neighbour], first_slot=0, past=0)
    for start in range(0, 60, 16):
        rows = logits.prefill([prompt[start : start + 16]], first_slot=1, past=start)
    assert_equal_to_reference(rows, [prompt], reference)
    histories = [[*neighbour, 7], [*prompt, 8]]
    assert_equal_to_reference(decode(logits, histories), histories, reference)


def test_a_moved_slot_goes_on_where_it_was(logits, reference):
    history = random_ids(3, 20)
    logits.prefill([random_ids(i, 30) for i in range(3)] + [history], first_slot=0, past=0)
    logits.move(source=3, target=0, length=20)
    assert_equal_to_reference(decode(logits, [[*history, 9]]), [[*history, 9]], reference)


def test_a_reused_slot_does_not_see_what_was_there(logits, reference):
    logits.prefill([random_ids(4, 50)], first_slot=0, past=0)
    history = random_ids(5, 3)
    rows = logits.prefill([history], first_slot=0, past=0)
    assert_equal_to_reference(rows, [history], reference)


def test_a_slot_is_filled_to_its_end(logits, reference):
    history = random_ids(6, MAX_LENGTH)
    logits.prefill([history[:-1]], first_slot=0, past=0)
    assert_equal_to_reference(decode(logits, [history]), [history], reference)


def test_the_engine_s_greedy_tokens_are_those_of_generate(logits, reference):
    """Ragged prompts that come and go, beside a request for logits that branches off one of them."""
    engine = Engine(logits, decode=sample_loop, clock=Clock(), picker=pick_rows)
    sizes = {"max_length": MAX_LENGTH, "vocab_size": logits.vocab_size}
    prompts = [random_ids(20 + i, n) for i, n in enumerate((3, 30, 11, 1, 18))]
    sequences = [
        sequence_of(prompt, max_tokens=8 + 3 * i, temperature=0, **sizes) for i, prompt in enumerate(prompts)
    ]
    rows: dict[object, np.ndarray] = {}
    branch = logits_request([*prompts[1][:25], 5, 6], **sizes)
    for number, occupant in enumerate([*sequences, branch]):
        engine.add(occupant)
        if number % 2:
            rows.update(engine.step().answered)
    while not all(s.finished for s in sequences) or not rows:
        rows.update(engine.step().answered)
    np.testing.assert_allclose(rows[branch], last_row(reference, branch.token_ids), atol=TOLERANCE)
    for sequence, prompt in zip(sequences, prompts, strict=True):
        expected = greedy_ids(reference, prompt, num_tokens=sequence.num_new_tokens)
        assert sequence.token_ids[len(prompt) :] == expected


def test_beam_searches_beside_each_other_are_those_of_generate(logits, reference):
    """Their slots are copied while the rows between them go on."""
    engine = Engine(logits, decode=sample_loop, clock=Clock(), picker=pick_rows)
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
