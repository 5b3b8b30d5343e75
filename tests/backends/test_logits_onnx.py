"""Logits by ONNX Runtime: requests of growing ids, and what spoils a row or a file."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from genserve.backends.device_memory import DeviceMemory
from genserve.backends.logits_memory import HostMemory
from genserve.backends.logits_onnx import OnnxLogits
from genserve.backends.row_picker import pick_rows
from genserve.errors import RepositoryError
from genserve.export.report import Precision
from genserve.generation.engine import Engine
from tests.checkpoints import tiny_llama_checkpoint
from tests.export.graphs import write_graph
from tests.fakes.sequences import Clock, logits_request, sample_loop, sequence_of

TOLERANCE = 1e-4


@pytest.fixture(params=["host", "device"])
def logits(request, tiny_repository):
    # The memory of a GPU is here that of the CPU: tensors of torch, which the graph is bound to alike.
    memory = HostMemory() if request.param == "host" else DeviceMemory("cpu")
    path = tiny_repository / "tiny_logits" / "1" / "model.onnx"
    return OnnxLogits(path, num_slots=4, max_length=128, memory=memory)


def random_ids(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 300, count).tolist()


def test_logits_of_growing_ids_equal_those_computed_afresh(logits, tiny_repository):
    """Two loops beside a sequence that samples: one is away at every third step, one branches off."""
    fresh = OnnxLogits(tiny_repository / "tiny_logits" / "1" / "model.onnx", num_slots=1, max_length=128)
    engine = Engine(logits, decode=sample_loop, clock=Clock(), picker=pick_rows)
    sizes = {"max_length": 128, "vocab_size": logits.vocab_size}
    sequence = sequence_of(random_ids(9, 12), max_tokens=30, **sizes)
    engine.add(sequence)
    steady, fickle = random_ids(7, 40), random_ids(8, 25)
    for step in range(12):
        histories = [steady, fickle] if step % 3 else [steady]
        requests = [logits_request(history, **sizes) for history in histories]
        for request in requests:
            request.submitted_s = engine.clock()
            engine.add(request)
        rows = {}
        while len(rows) < len(requests):
            rows.update(engine.step().answered)
        for request, history in zip(requests, histories, strict=True):
            expected = fresh.prefill([history], first_slot=0, past=0)[0]
            np.testing.assert_allclose(rows[request], expected, atol=1e-5)
            history.append(step + 3)
        if step == 6:
            steady = [*steady[:30], 5, 6, 7]
    while not sequence.finished:
        engine.step()
    assert sequence.token_ids[12:] == greedy(fresh, sequence.token_ids[:12], num_tokens=30)


def greedy(logits: OnnxLogits, prompt: list[int], *, num_tokens: int) -> list[int]:
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(int(logits.prefill([token_ids], first_slot=0, past=0)[0].argmax()))
    return token_ids[len(prompt) :]


def test_the_logits_are_a_view_of_one_buffer(logits):
    first = torch.from_dlpack(logits.prefill([[5, 6]], first_slot=0, past=0))
    second = torch.from_dlpack(logits.decode(np.array([7]), np.array([2])))
    assert first.data_ptr() == second.data_ptr()


def test_a_graph_without_a_cache_is_refused_with_what_to_do(tmp_path):
    onnx = pytest.importorskip("onnx")
    value = onnx.helper.make_tensor_value_info("x", 1, [1])
    out = onnx.helper.make_tensor_value_info("y", 1, [1])
    graph = onnx.helper.make_graph([onnx.helper.make_node("Identity", ["x"], ["y"])], "g", [value], [out])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10)
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.raises(RepositoryError, match=r"no KV cache.*genserve export"):
        OnnxLogits(tmp_path / "model.onnx", num_slots=1)


def test_a_broken_file_is_named(tmp_path):
    (tmp_path / "model.onnx").write_bytes(b"not a model")
    with pytest.raises(RepositoryError, match=r"model\.onnx cannot be loaded"):
        OnnxLogits(tmp_path / "model.onnx", num_slots=1)


@pytest.fixture(scope="module", params=get_args(Precision))
def spoiled(request, tmp_path_factory):
    """A model to which some of the numbers of token 7, and not its first, are none."""
    folder = tmp_path_factory.mktemp(request.param)
    source = tiny_llama_checkpoint(folder / "checkpoint", hidden_size=128, tie_word_embeddings=False)
    weights = load_file(source / "model.safetensors")
    weights["model.embed_tokens.weight"][7, 100] = np.nan
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    with np.errstate(invalid="ignore"):     # to round it
        file = write_graph(source, folder / "graph", precision=request.param).folder / "model.onnx"
    return OnnxLogits(file, num_slots=2, max_length=32)


def test_what_is_no_number_spoils_its_own_row_alone_and_is_gone_with_it(spoiled):
    def run(first: list[int]) -> list[np.ndarray]:
        rows = [first, [5, 6, 9, 8]]
        prefill = np.array(spoiled.prefill(rows, first_slot=0, past=0))
        return [prefill, np.array(spoiled.decode(np.array([9, 9]), np.array([len(row) for row in rows])))]

    sound = run([5, 6])
    for found, expected in zip(run([5, 6, 7, 8, 9, 7]), sound, strict=True):
        assert np.isnan(found[0]).all()
        np.testing.assert_allclose(found[1], expected[1], atol=TOLERANCE)
    for found, expected in zip(run([5, 6]), sound, strict=True):
        np.testing.assert_array_equal(found, expected)
