from __future__ import annotations

import threading

import numpy as np
import pytest
from tritonclient.utils import serialize_byte_tensor

from genserve.backends.onnxruntime import OnnxRuntimeBackend
from genserve.backends.warmup import run_warmups, warmup_batches
from genserve.errors import InferenceError, RepositoryError
from genserve.inference import InferenceResponse
from tests.backends.inferences import config_of, started
from tests.backends.networks import save_onnx


class Recorder:
    """A backend that answers all requests, and records them."""

    def __init__(self, answer=None):
        self.batches = []
        self._answer = answer or (lambda inference: inference.send(InferenceResponse(), final=True))

    def execute(self, batch):
        self.batches.append([{name: tensor.array for name, tensor in one.inputs.items()} for one in batch])
        for inference in batch:
            self._answer(inference)


def model(sample, *, batch=8, data_type="TYPE_FP32", dims="-1", more=""):
    return config_of(
        f"""max_batch_size: {batch}
        input {{ name: "x" data_type: {data_type} dims: [ {dims} ] {more} }}
        output {{ name: "y" data_type: {data_type} dims: [ {dims} ] }}
        model_warmup {{ name: "w" {sample} }}"""
    )


def one_input(source, *, data_type="TYPE_FP32", dims="3", name="x"):
    return f'inputs {{ key: "{name}" value {{ data_type: {data_type} dims: [ {dims} ] {source} }} }}'


def warmed(config, path, backend=None):
    backend = backend or Recorder()
    run_warmups(backend.execute, warmup_batches(config, path))
    return backend.batches


def rejected(config, path):
    with pytest.raises(RepositoryError) as raised:
        warmup_batches(config, path)
    return raised.value.message


def test_a_sample_has_batch_size_requests_of_one_row(tmp_path):
    [batch] = warmed(model("batch_size: 3 " + one_input("zero_data: true")), tmp_path)
    assert [request["x"].tolist() for request in batch] == [[[0, 0, 0]]] * 3


@pytest.mark.parametrize(("count", "times"), [(0, 1), (1, 1), (3, 3)])
def test_a_sample_is_executed_count_times_and_at_least_once(tmp_path, count, times):
    sample = f"batch_size: 1 count: {count} " + one_input("zero_data: true")
    assert len(warmed(model(sample), tmp_path)) == times


def test_a_sample_of_batch_size_zero_is_left_out(tmp_path):
    assert warmed(model("batch_size: 0 " + one_input("zero_data: true")), tmp_path) == []


def test_a_model_without_batching_gets_the_dims_unchanged(tmp_path):
    [[request]] = warmed(model("batch_size: 1 " + one_input("zero_data: true"), batch=0), tmp_path)
    assert request["x"].shape == (3,)


def test_a_reshape_is_applied(tmp_path):
    config = model(
        "batch_size: 1 " + one_input("zero_data: true", dims="2, 6"),
        dims="-1, 6",
        more="reshape: { shape: [ -1, 2, 3 ] }",
    )
    [[request]] = warmed(config, tmp_path)
    assert request["x"].shape == (1, 2, 2, 3)


def test_random_data_has_the_type_of_the_config(tmp_path):
    sample = "batch_size: 1 " + one_input("random_data: true", data_type="TYPE_INT16", dims="50")
    [[request]] = warmed(model(sample, data_type="TYPE_INT16"), tmp_path)
    assert request["x"].dtype == np.int16
    assert len(set(request["x"][0].tolist())) > 10


@pytest.mark.parametrize("source", ["zero_data", "random_data"])
def test_strings_without_data_are_empty(tmp_path, source):
    sample = "batch_size: 1 " + one_input(f"{source}: true", data_type="TYPE_STRING", dims="2")
    [[request]] = warmed(model(sample, data_type="TYPE_STRING"), tmp_path)
    assert request["x"].tolist() == [[b"", b""]]


def test_a_control_that_is_not_in_the_config_is_passed_through(tmp_path):
    sample = "batch_size: 1 " + one_input("zero_data: true")
    sample += one_input("zero_data: true", data_type="TYPE_INT32", dims="1", name="READY")
    [[request]] = warmed(model(sample), tmp_path)
    assert request["READY"].tolist() == [[0]]


def with_file(tmp_path, content, *, data_type="TYPE_FP32", dims="3"):
    (tmp_path / "warmup").mkdir(exist_ok=True)
    (tmp_path / "warmup" / "raw_data").write_bytes(content)
    source = 'input_data_file: "raw_data"'
    return model("batch_size: 1 " + one_input(source, data_type=data_type, dims=dims), data_type=data_type)


def test_a_file_of_strings_is_as_tritonclient_writes_it(tmp_path):
    text = "我愛你美麗的中國".encode()
    content = serialize_byte_tensor(np.array([text], dtype=object)).item()
    [[request]] = warmed(with_file(tmp_path, content, data_type="TYPE_STRING", dims="1"), tmp_path)
    assert request["x"].tolist() == [[text]]


def test_a_plain_text_file_is_rejected_with_a_remedy(tmp_path):
    config = with_file(tmp_path, b"hello", data_type="TYPE_STRING", dims="1")
    with pytest.raises(RepositoryError, match="raw_data: incomplete string data") as raised:
        warmup_batches(config, tmp_path)
    assert "serialize_byte_tensor" in raised.value.remedy


def test_a_file_that_is_too_long_is_truncated(tmp_path):
    content = np.arange(5, dtype=np.float32).tobytes()
    [[request]] = warmed(with_file(tmp_path, content), tmp_path)
    assert request["x"].tolist() == [[0, 1, 2]]


def test_a_file_that_is_too_short_is_rejected_in_tritons_words(tmp_path):
    assert rejected(with_file(tmp_path, bytes(8)), tmp_path) == (
        "[request id: <id_unknown>] warmup setting expects 12 bytes, but the data provided from raw_dataonly "
        "has 8 bytes"
    )


def test_a_missing_file_is_rejected_in_tritons_words(tmp_path):
    config = model("batch_size: 1 " + one_input('input_data_file: "nothing"'))
    file = tmp_path / "warmup" / "nothing"
    message = f"failed to open text file for read {file}: No such file or directory"
    assert rejected(config, tmp_path) == message


def test_a_dimension_of_any_size_is_rejected_in_tritons_words(tmp_path):
    assert rejected(model("batch_size: 1 " + one_input("zero_data: true", dims="-1")), tmp_path) == (
        "warmup setting expects all variable-size dimensions are specified for input 'x'"
    )


def test_an_input_without_data_is_rejected_in_tritons_words(tmp_path):
    assert rejected(model("batch_size: 1 " + one_input("")), tmp_path) == (
        "[request id: <id_unknown>] warmup setting expects input 'x' to have input_data_type set"
    )


def test_an_error_of_the_model_fails_the_warmup(tmp_path):
    def fail(inference):
        inference.fail(InferenceError("not today"))

    config = model("batch_size: 2 " + one_input("zero_data: true"))
    with pytest.raises(RepositoryError, match="failed to run warmup sample 'w': not today; not today; "):
        warmed(config, tmp_path, Recorder(fail))


def test_an_exception_of_the_model_fails_the_warmup(tmp_path):
    def fail(inference):
        raise ValueError("boom")

    config = model("batch_size: 1 " + one_input("zero_data: true"))
    with pytest.raises(RepositoryError, match="failed to run warmup sample 'w': ValueError: boom; "):
        warmed(config, tmp_path, Recorder(fail))


def test_warmup_waits_for_late_responses(tmp_path):
    ended = []

    def later(inference):
        def answer():
            inference.send(InferenceResponse(), final=False)
            ended.append(inference)
            inference.send(None, final=True)

        threading.Thread(target=answer).start()

    warmed(model("batch_size: 2 " + one_input("zero_data: true")), tmp_path, Recorder(later))
    assert len(ended) == 2


@pytest.mark.parametrize(("let_go_after", "times"), [(3, 3), (10**9, 1000)])
def test_an_iterative_request_is_executed_until_released_or_at_the_limit(
    tmp_path, let_go_after, times
):
    turns = []

    def iterate(inference):
        turns.append(inference)
        if len(turns) < let_go_after:
            inference.reschedule = True
        else:
            inference.send(InferenceResponse(), final=True)

    config = model("batch_size: 1 " + one_input("zero_data: true"))
    assert len(warmed(config, tmp_path, Recorder(iterate))) == times
    assert turns[0].ended


def test_a_graph_is_warmed_up_with_its_whole_batch(tmp_path):
    kind = (1, ["batch", 3])
    only_four_rows = [
        ("ReduceMax", ["x"], ["zero"], {"keepdims": 0}),
        ("Cast", ["zero"], ["none"], {"to": 7}),
        ("Add", ["sizes", "none"], ["shape"], {}),
        ("Reshape", ["x", "shape"], ["y"], {}),
    ]
    sizes = {"sizes": np.array([4, 3])}
    path = tmp_path / "1" / "model.onnx"
    save_onnx(path, only_four_rows, inputs={"x": kind}, outputs={"y": kind}, weights=sizes)
    config = model("batch_size: 4 " + one_input("zero_data: true"), dims="3")
    run_warmups(started(OnnxRuntimeBackend, config, tmp_path).execute, warmup_batches(config, tmp_path))
