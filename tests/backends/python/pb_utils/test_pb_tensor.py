from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.dlpack import from_dlpack, to_dlpack

from genserve import tensor as inner
from genserve.backends.python.pb_utils import Tensor, TritonModelException
from genserve.tensor import DataType

NUMPY = [data_type for data_type in DataType if data_type.name not in ("BYTES", "BF16")]


@pytest.mark.parametrize("data_type", NUMPY, ids=lambda data_type: data_type.name)
def test_an_array_is_not_copied(data_type):
    array = np.ones((2, 3), data_type.numpy)
    tensor = Tensor("x", array)
    assert tensor.as_numpy() is array
    assert (tensor.name(), tensor.shape(), tensor.triton_dtype()) == ("x", [2, 3], data_type.number)
    assert tensor.is_cpu()


@pytest.mark.parametrize("data_type", NUMPY, ids=lambda data_type: data_type.name)
def test_dlpack_shares_the_memory_both_ways(data_type):
    tensor = Tensor("x", np.ones((2, 3), data_type.numpy))
    for seen in (from_dlpack(tensor.to_dlpack()), torch.from_dlpack(tensor)):
        assert seen.data_ptr() == tensor.as_numpy().ctypes.data
        for back in (Tensor.from_dlpack("y", seen), Tensor.from_dlpack("y", to_dlpack(seen))):
            assert back.as_numpy().ctypes.data == seen.data_ptr()
            assert (back.name(), back.triton_dtype()) == ("y", data_type.number)
            assert back.as_numpy().flags.writeable


def test_dlpack_of_numpy_and_of_a_tensor_share_the_memory():
    array = np.zeros(3, np.float32)
    assert Tensor.from_dlpack("y", array).as_numpy() is array
    assert Tensor.from_dlpack("y", Tensor("x", array)).as_numpy() is array
    assert Tensor("x", array).__dlpack_device__() == (1, 0)


def test_memory_imported_by_dlpack_outlives_its_maker():
    tensor = Tensor.from_dlpack("y", to_dlpack(torch.arange(1000.0)))
    assert tensor.as_numpy().sum() == 499500


def test_bfloat16_is_only_passed_by_dlpack():
    made = torch.tensor([1.5, 2.5], dtype=torch.bfloat16)
    tensor = Tensor.from_dlpack("x", made)
    assert tensor.triton_dtype() == DataType.BF16.number
    assert from_dlpack(tensor.to_dlpack()).data_ptr() == made.data_ptr()
    with pytest.raises(TritonModelException) as raised:
        tensor.as_numpy()
    assert str(raised.value) == (
        "Tensor dtype is BF16 and cannot be converted to NumPy. Use to_dlpack() and from_dlpack() instead."
    )


def test_bfloat16_from_the_wire_is_bfloat16_to_torch():
    raw = np.array([0x3FC0], np.uint16)
    tensor = Tensor._of(inner.Tensor("x", raw, data_type=DataType.BF16))
    assert torch.equal(torch.from_dlpack(tensor), torch.tensor([1.5], dtype=torch.bfloat16))


def test_received_strings_are_bytes():
    given = np.array([["a", 1], [b"c", "ü"]], dtype=object)
    tensor = Tensor("x", given)
    assert tensor.as_numpy() is given
    assert tensor._wrapped.array.tolist() == [[b"a", b"1"], [b"c", "ü".encode()]]
    assert Tensor("x", np.array([b"a", b"bc"]))._wrapped.array.tolist() == [b"a", b"bc"]


def test_an_array_of_bytes_is_not_copied():
    array = np.array([b"a", b"b\0"], dtype=object)
    assert Tensor("x", array)._wrapped.array is array


def test_string_arrays_work_with_np_char():
    array = np.array([[b"a"], [b"\xc3\xbc\0"]], dtype=object)
    seen = Tensor._of(inner.Tensor("x", array)).as_numpy()
    assert seen.dtype == object
    assert seen.ctypes.data == array.ctypes.data
    assert seen.tolist() == [[b"a"], [b"\xc3\xbc\0"]]
    assert np.char.decode(seen, "utf-8").squeeze(1).tolist() == ["a", "ü"]
    assert np.char.upper(seen[:1].reshape(-1)).tolist() == [b"A"]
    assert np.concatenate([seen, seen]).shape == (4, 1)
    assert Tensor("y", seen)._wrapped.array.tolist() == array.tolist()


def test_an_array_that_is_not_contiguous_is_copied():
    array = np.arange(6.0).reshape(2, 3).T
    tensor = Tensor("x", array)
    assert tensor.as_numpy().flags.c_contiguous
    assert (tensor.as_numpy() == array).all()


def test_a_scalar_has_no_dimensions():
    assert Tensor("x", np.array(3.0)).shape() == []


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Tensor("", np.zeros(1)), "Tensor name cannot be an empty string."),
        (lambda: Tensor("x", np.array(["a"])), "NumPy dtype is not supported."),
        (lambda: Tensor("x", np.zeros(1, complex)), "NumPy dtype is not supported."),
        (lambda: Tensor("x", np.zeros(1, ">f4")), "NumPy dtype is not supported."),
        (
            lambda: Tensor("x", np.array(["a"], object)).to_dlpack(),
            "DLPack does not have support for string tensors.",
        ),
        (lambda: Tensor.from_dlpack("", np.zeros(1)), "Tensor name cannot be an empty string."),
        (
            lambda: Tensor.from_dlpack("x", 3),
            "Provided tensor is not supported. Tensor must be a DLPack capsule         or have `__dlpack__` "
            "and `__dlpack_device__` attributes",
        ),
        *(
            (
                lambda made=made: Tensor.from_dlpack("x", made()),
                "DLPack tensor is not contiguous. Only contiguous DLPack tensors that are stored in C-Order "
                "are supported.",
            )
            for made in (
                lambda: torch.zeros(2, 3).T,
                lambda: to_dlpack(torch.zeros(2, 3).T),
                lambda: np.zeros((2, 3)).T,
            )
        ),
        (lambda: Tensor.from_dlpack("x", torch.zeros(1, dtype=torch.complex64)), "Unsupported triton dtype."),
        (lambda: Tensor.from_dlpack("x", np.zeros(1, complex)), "Unsupported triton dtype."),
        (lambda: Tensor.from_dlpack("x", np.zeros(1, ">f4")), "Unsupported triton dtype."),
    ],
)
def test_a_value_that_is_not_a_tensor_is_rejected_in_tritons_words(make, text):
    with pytest.raises(TritonModelException) as raised:
        make()
    assert str(raised.value) == text


def test_a_value_that_is_not_an_array_is_a_type_error():
    with pytest.raises(TypeError):
        Tensor("x", [1.0])
