from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from torch import nn

from genserve.backends.backend import Placement
from genserve.backends.pytorch import PyTorchBackend
from genserve.errors import InferenceError, RepositoryError
from genserve.tensor import DataType, Tensor
from tests.backends.inferences import (
    answers,
    ask,
    assert_runs_concurrently,
    assert_share_a_network,
    config_of,
    started,
)
from tests.backends.networks import chat_torchscript, save_torchscript, two_outputs_torchscript

CHAT = """
platform: "pytorch_libtorch"
max_batch_size: 64
input [ { name: "INPUT__0" data_type: TYPE_INT64 dims: [-1] },
        { name: "INPUT__1" data_type: TYPE_INT64 dims: [-1] },
        { name: "INPUT__2" data_type: TYPE_INT64 dims: [-1] } ]
output [ { name: "OUTPUT__0" data_type: TYPE_FP32 dims: [13088] } ]
version_policy: { latest {num_versions: 1}}
dynamic_batching { }
parameters: { key: "INFERENCE_MODE" value: { string_value:"true" } }
"""

TWO_OUTPUTS = """
platform: "pytorch_libtorch"
max_batch_size : 64
input [ { name: "input__0" data_type: TYPE_INT64 dims: [ -1 ] } ]
output [ { name: "output__0" data_type: TYPE_FP32 dims: [ -1, -1, 4 ] },
         { name: "output__1" data_type: TYPE_FP32 dims: [ -1, -1, 8 ] } ]
"""


def direct(path, *arrays):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        module = torch.jit.load(str(path)).eval()
    with torch.inference_mode():
        return module(*(torch.from_numpy(array) for array in arrays))


def tensor_spec(kind, name, data_type="TYPE_FP32", dims="-1", more=""):
    return f'{kind} {{ name: "{name}" data_type: {data_type} dims: [ {dims} ] {more} }}\n'


def plain(inputs=("x",), outputs=("y",), *, batch=4, data_type="TYPE_FP32", dims="-1", more=""):
    specs = [tensor_spec("input", name, data_type, dims) for name in inputs]
    specs += [tensor_spec("output", name, data_type, dims) for name in outputs]
    return config_of(f"max_batch_size: {batch}\n{''.join(specs)}{more}")


def parameter(key, value):
    return f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n'


def chat(num_rows, length, *, seed):
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 13088, (num_rows, length))
    return {"INPUT__0": ids, "INPUT__1": np.ones_like(ids), "INPUT__2": ids[:, ::-1].copy()}


class Subtract(nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor):
        return a - b


class Identity(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def identity(tmp_path):
    return save_torchscript(tmp_path / "1" / "model.pt", Identity())


def address(array):
    return array.__array_interface__["data"][0]


def test_a_batch_is_answered_as_the_module_answers_each_request_alone(tmp_path):
    file = chat_torchscript(tmp_path / "1" / "model.pt")
    backend = started(PyTorchBackend, config_of(CHAT), tmp_path)
    asked = [ask(chat(rows, 6, seed=rows), batch_size=rows) for rows in (2, 1, 3)]
    for rows, answer in zip((2, 1, 3), answers(backend, *asked), strict=True):
        expected = direct(file, *chat(rows, 6, seed=rows).values())
        np.testing.assert_allclose(answer["OUTPUT__0"], expected.numpy(), rtol=1e-5, atol=1e-6)


def test_outputs_are_matched_by_index_even_if_their_dims_are_wrong(tmp_path, caplog):
    file = two_outputs_torchscript(tmp_path / "1" / "model.pt")
    backend = started(PyTorchBackend, config_of(TWO_OUTPUTS), tmp_path)
    ids = np.array([[1, 2, 3], [4, 5, 6]])
    [answer] = answers(backend, ask({"input__0": ids}, batch_size=2))
    first, second = direct(file, ids)
    np.testing.assert_allclose(answer["output__0"], first.numpy(), rtol=1e-6)
    np.testing.assert_allclose(answer["output__1"], second.numpy(), rtol=1e-6)
    warning = "returns shape [2, 3, 4] for output output__0, but config.pbtxt says [-1, -1, -1, 4]"
    assert warning in caplog.text


def test_a_request_in_read_only_memory_is_not_copied_and_causes_no_warning(tmp_path):
    identity(tmp_path)
    backend = started(PyTorchBackend, plain(), tmp_path)
    x = np.frombuffer(np.arange(4, dtype=np.float32).tobytes(), dtype=np.float32).reshape(1, 4)
    assert not x.flags.writeable
    [answer] = answers(backend, ask({"x": x}))
    assert address(answer["y"]) == address(x)


def test_a_module_that_writes_into_its_input_gets_a_copy(tmp_path):
    class AddInPlace(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.size(0) > 0:
                x.add_(1)
            return x

    save_torchscript(tmp_path / "1" / "model.pt", AddInPlace())
    backend = started(PyTorchBackend, plain(), tmp_path)
    x = np.zeros((1, 2), dtype=np.float32)
    [answer] = answers(backend, ask({"x": x}))
    assert answer["y"].tolist() == [[1, 1]]
    assert x.tolist() == [[0, 0]]


def test_a_buffer_that_the_module_returns_is_copied(tmp_path):
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(1, 2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.total.add_(x)

    save_torchscript(tmp_path / "1" / "model.pt", Sum())
    backend = started(PyTorchBackend, plain(), tmp_path)
    one = {"x": np.ones((1, 2), dtype=np.float32)}
    [first] = answers(backend, ask(one))
    [second] = answers(backend, ask(one))
    assert (first["y"].tolist(), second["y"].tolist()) == ([[1, 1]], [[2, 2]])


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("a", "b"), 1),                # arguments
        (("b", "a"), -1),
        (("X__0", "X__1"), 1),          # indexes
        (("X__1", "X__0"), -1),
        (("minuend", "b"), 1),          # neither: the order
        (("b", "minuend"), 1),
    ],
)
def test_inputs_are_matched_by_argument_then_index_then_order(tmp_path, names, expected):
    save_torchscript(tmp_path / "1" / "model.pt", Subtract())
    backend = started(PyTorchBackend, plain(names), tmp_path)
    first, second = (np.full((1, 1), value, dtype=np.float32) for value in (3, 2))
    [answer] = answers(backend, ask({names[0]: first, names[1]: second}))
    assert answer["y"].tolist() == [[expected]]


def test_a_module_of_one_dictionary_takes_the_inputs_by_name(tmp_path):
    class OfDictionary(nn.Module):
        def forward(self, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
            return tensors["a"] - tensors["b"]

    save_torchscript(tmp_path / "1" / "model.pt", OfDictionary())
    backend = started(PyTorchBackend, plain(("b", "a")), tmp_path)
    [answer] = answers(
        backend, ask({"a": np.full((1, 1), 3, np.float32), "b": np.full((1, 1), 2, np.float32)})
    )
    assert answer["y"].tolist() == [[1]]


def test_strings_are_passed_as_lists_of_str(tmp_path):
    class Greet(nn.Module):
        def forward(self, names: list[str]) -> list[str]:
            return ["hello " + name for name in names]

    save_torchscript(tmp_path / "1" / "model.pt", Greet())
    specs = tensor_spec("input", "names", "TYPE_STRING", "1", "reshape: { shape: [ ] }")
    specs += tensor_spec("output", "greetings", "TYPE_STRING", "1", "reshape: { shape: [ ] }")
    backend = started(PyTorchBackend, config_of(f"max_batch_size: 4 {specs}"), tmp_path)
    one = ask({"names": np.array([b"Ann"], dtype=object)})
    two = ask({"names": np.array(["Zoé".encode(), b"Bo"], dtype=object)}, batch_size=2)
    first, second = answers(backend, one, two)
    assert first["greetings"].tolist() == [b"hello Ann"]
    assert second["greetings"].tolist() == ["hello Zoé".encode(), b"hello Bo"]


@pytest.mark.parametrize("data_type", [kind for kind in DataType if kind is not DataType.BYTES])
def test_each_type_of_elements_passes_through(tmp_path, data_type):
    identity(tmp_path)
    backend = started(PyTorchBackend, plain(data_type=data_type.config_name), tmp_path)
    x = np.array([[0, 1, 1]]).astype(data_type.numpy)
    asked = ask({"x": x}, types={"x": data_type})
    backend.execute([asked.inference])
    [output] = asked.responses[0].outputs
    assert output.data_type is data_type
    np.testing.assert_array_equal(output.array, x)


def test_a_torch_tensor_is_not_copied(tmp_path):
    identity(tmp_path)
    backend = started(PyTorchBackend, plain(), tmp_path)
    x = torch.ones(1, 3)
    asked = ask({})
    asked.inference.inputs["x"] = Tensor("x", x, data_type=DataType.FP32)
    assert address(answers(backend, asked)[0]["y"]) == x.data_ptr()


def test_an_output_that_is_not_contiguous_becomes_row_major(tmp_path):
    class Turn(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.transpose(1, 2)

    save_torchscript(tmp_path / "1" / "model.pt", Turn())
    backend = started(PyTorchBackend, plain(dims="-1, -1"), tmp_path)
    x = np.arange(6, dtype=np.float32).reshape(1, 2, 3)
    [answer] = answers(backend, ask({"x": x}))
    assert answer["y"].flags.c_contiguous
    np.testing.assert_array_equal(answer["y"], x.transpose(0, 2, 1))


def run_error(tmp_path, module, config, inputs):
    save_torchscript(tmp_path / "1" / "model.pt", module)
    backend = started(PyTorchBackend, config, tmp_path)
    asked = ask(inputs)
    with pytest.raises(InferenceError) as raised:
        backend.execute([asked.inference])
    assert not asked.responses
    return raised.value


def test_an_error_of_the_module_fails_the_batch_with_its_text(tmp_path):
    inputs = {"a": np.zeros((1, 2), np.float32), "b": np.zeros((1, 3), np.float32)}
    error = run_error(tmp_path, Subtract(), plain(("a", "b")), inputs)
    assert error.message.startswith("PyTorch execute failure: ")
    assert "must match the size of tensor b" in error.message
    assert error.status == "INVALID_ARG"
    assert error.remedy.endswith("it got a FP32 [1, 2], b FP32 [1, 3]")


def test_an_output_of_another_type_fails_in_tritons_words(tmp_path):
    config = config_of(
        "max_batch_size: 4 " + tensor_spec("input", "x") + tensor_spec("output", "y", "TYPE_INT64")
    )
    message = run_error(tmp_path, Identity(), config, {"x": np.zeros((1, 2), np.float32)}).message
    assert message == "configuration expects datatype TYPE_INT64 for output 'y', model provides TYPE_FP32"


def test_an_output_that_the_module_lacks_fails_in_tritons_words(tmp_path):
    config = plain(outputs=("y__0", "y__1"))
    message = run_error(tmp_path, Identity(), config, {"x": np.zeros((1, 2), np.float32)}).message
    assert message == (
        "The output y__1 in the model configuration refers to an output index which doesn't exist. "
        "This model has 1 outputs"
    )


def test_an_output_without_a_dimension_fails_in_tritons_words(tmp_path):
    class Total(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sum()

    message = run_error(tmp_path, Total(), plain(), {"x": np.zeros((1, 2), np.float32)}).message
    assert message == "output 'y' is a scalar which is not supported."


def test_an_output_with_fewer_rows_than_the_batch_fails(tmp_path):
    class First(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[:1]

    save_torchscript(tmp_path / "1" / "model.pt", First())
    backend = started(PyTorchBackend, plain(), tmp_path)
    asked = [ask({"x": np.zeros((1, 2), np.float32)}) for _ in range(2)]
    with pytest.raises(InferenceError, match="expected batch size of at least 2 in model output, got 1"):
        backend.execute([one.inference for one in asked])


def load_error(tmp_path, config, module=None):
    save_torchscript(tmp_path / "1" / "model.pt", module or Subtract())
    with pytest.raises(RepositoryError) as raised:
        started(PyTorchBackend, config, tmp_path)
    return raised.value.message


def test_a_config_with_another_number_of_inputs_is_rejected(tmp_path):
    assert load_error(tmp_path, plain()) == (
        "unable to load model 'm', configuration expects 1 inputs, model provides 2"
    )


def test_indexes_that_are_not_the_arguments_are_rejected(tmp_path):
    message = load_error(tmp_path, plain(("X__1", "X__2")))
    assert message.startswith("the inputs of model 'm' have the indexes 1 (X__1), 2 (X__2)")


def test_strings_of_more_than_one_dimension_are_rejected(tmp_path):
    message = load_error(tmp_path, plain(data_type="TYPE_STRING", inputs=("a", "b")))
    assert message == (
        "Triton only supports 1 dimensional List of String as input for 'a' for model 'm'"
    )


def test_an_argument_that_is_not_a_tensor_is_rejected(tmp_path):
    class OfNumber(nn.Module):
        def forward(self, x: torch.Tensor, n: int) -> torch.Tensor:
            return x + n

    message = load_error(tmp_path, plain(("x", "n")), OfNumber())
    assert message.startswith("An input of type 'int' was detected in the model.")


def test_a_file_that_is_not_a_module_is_rejected(tmp_path):
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "model.pt").write_bytes(b"junk")
    with pytest.raises(RepositoryError, match="failed to load model 'm'"):
        started(PyTorchBackend, plain(), tmp_path)


def test_a_missing_file_is_an_error_in_tritons_words(tmp_path):
    with pytest.raises(RepositoryError, match=r"unable to find '.*1/model.pt' for model instance 'm'"):
        started(PyTorchBackend, plain(), tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [("INFERENCE_MODE", "false"), ("DISABLE_OPTIMIZED_EXECUTION", "true"), ("DISABLE_CUDNN", "true")],
)
def test_the_modes_of_torch_do_not_change_the_answer(tmp_path, key, value):
    file = two_outputs_torchscript(tmp_path / "1" / "model.pt")
    backend = started(PyTorchBackend, config_of(TWO_OUTPUTS + parameter(key, value)), tmp_path)
    ids = np.array([[1, 2, 3]])
    [answer] = answers(backend, ask({"input__0": ids}))
    np.testing.assert_allclose(answer["output__1"], direct(file, ids)[1].numpy(), rtol=1e-6)


def test_the_number_of_threads_is_set_in_torch(tmp_path):
    identity(tmp_path)
    before = torch.get_num_threads()
    started(PyTorchBackend, plain(more=parameter("INTRA_OP_THREAD_COUNT", before + 1)), tmp_path)
    assert torch.get_num_threads() == before + 1
    torch.set_num_threads(before)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_an_instance_without_its_gpu_runs_on_the_cpu_with_a_warning(tmp_path, caplog):
    identity(tmp_path)
    backend = started(
        PyTorchBackend, plain(), tmp_path, placement=Placement(name="m_0_gpu0", kind="GPU")
    )
    assert "m_0_gpu0 runs on the CPU" in caplog.text
    assert answers(backend, ask({"x": np.ones((1, 1), np.float32)}))[0]["y"].tolist() == [[1]]


def test_instances_share_one_module(tmp_path):
    identity(tmp_path)
    assert_share_a_network(PyTorchBackend, plain(), tmp_path)


def test_instances_run_at_the_same_time(tmp_path):
    chat_torchscript(tmp_path / "1" / "model.pt")
    assert_runs_concurrently(
        PyTorchBackend, config_of(CHAT), tmp_path, requests=[chat(1, 5, seed=i) for i in range(8)]
    )
