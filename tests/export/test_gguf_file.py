"""GGUF files are read as the package `gguf` reads them."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter

from genserve.export.gguf.gguf_file import GgufFile

KINDS = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q8_0")

VALUES: dict[str, tuple[Any, GGUFValueType]] = {
    "a.bool": (True, GGUFValueType.BOOL),
    "a.int8": (-3, GGUFValueType.INT8),
    "a.uint16": (65_535, GGUFValueType.UINT16),
    "a.int64": (-(1 << 40), GGUFValueType.INT64),
    "a.float64": (0.1, GGUFValueType.FLOAT64),
    "a.text": ("näive\n", GGUFValueType.STRING),
    "a.numbers": ([1, 2, 3], GGUFValueType.ARRAY),
    "a.texts": (["", "b", "ß"], GGUFValueType.ARRAY),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "all.gguf"
    writer = GGUFWriter(path, "llama")
    for name, (value, kind) in VALUES.items():
        writer.add_key_value(name, value, kind)
    generator = np.random.default_rng(0)
    for name in KINDS:
        kind = GGMLQuantizationType[name]
        weight = generator.normal(size=(2, 70, 4096)).astype(np.float32)    # more than what is read at once
        writer.add_tensor(name, gguf.quantize(weight, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_the_metadata_are_those_of_the_package(path: Path) -> None:
    expected = {name: field.contents() for name, field in GGUFReader(path).fields.items()}
    found = GgufFile.open(path).metadata
    assert found == {name: value for name, value in expected.items() if not name.startswith("GGUF.")}
    assert found["a.texts"] == ["", "b", "ß"]


def test_the_tensors_are_those_of_the_package(path: Path) -> None:
    found = GgufFile.open(path).tensors
    assert set(found) == set(KINDS)
    for tensor in GGUFReader(path).tensors:
        expected = gguf.dequantize(tensor.data, tensor.tensor_type)
        values = found[tensor.name].read()
        assert np.array_equal(values, expected), tensor.name
        assert (values.dtype, values.flags.writeable) == (np.float32, True)


def write_parts(folder: Path) -> list[Path]:
    """Write four tensors in parts of at most two."""
    writer = GGUFWriter(folder / "it.gguf", "llama", split_max_tensors=2)
    for number in range(4):
        writer.add_tensor(f"tensor_{number}", np.full((2, 3), number, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(folder.iterdir())


def test_a_file_in_parts_has_the_tensors_of_all_parts(tmp_path: Path) -> None:
    first, second = write_parts(tmp_path)
    assert first.name == "it-00001-of-00002.gguf"
    tensors = GgufFile.open(first).tensors
    assert {name: tensor.read()[0, 0] for name, tensor in tensors.items()} == {
        f"tensor_{number}": number for number in range(4)
    }
    with pytest.raises(ValueError, match="-00001-of-00002"):
        GgufFile.open(second)
    second.unlink()
    with pytest.raises(FileNotFoundError, match="00002-of-00002"):
        GgufFile.open(first)


@pytest.mark.parametrize("kind", sorted(gguf.quants._type_traits, key=lambda kind: kind.name))
def test_every_number_format_is_dequantized_as_the_package_does_it(
    tmp_path: Path, kind: GGMLQuantizationType
) -> None:
    """Blocks of random bytes, since the package cannot quantize to most formats."""
    _, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(1).integers(0, 256, (6, 3 * size), np.uint8)
    writer = GGUFWriter(path := tmp_path / "it.gguf", "llama")
    writer.add_tensor("it", blocks, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = GgufFile.open(path).tensors["it"]
    with np.errstate(all="ignore"):     # random scales may be infinite, or no numbers
        expected = gguf.dequantize(blocks, kind)
        assert np.array_equal(found.read(), expected, equal_nan=True)
        for rows in (slice(2, 5), np.array([5, 0, 3])):
            assert np.array_equal(found.rows(rows).read(), expected[rows], equal_nan=True)


@pytest.mark.parametrize("size", [3, 20, 60, 200, -1])
def test_a_part_of_a_file_is_rejected(path: Path, tmp_path: Path, size: int) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ValueError, match=r"incomplete|broken"):
        GgufFile.open(cut)


@pytest.mark.parametrize(
    "entries",
    [
        [("general.alignment", 4, struct.pack("<I", 0))],
        [("general.alignment", 8, struct.pack("<Q", 2) + b"32")],
        [("deep", 9, struct.pack("<IQ", 9, 1) * 2000)],
        [("unknown type", 77, b"")],
    ],
    ids=["no alignment", "text for a number", "arrays in arrays", "unknown type"],
)
def test_a_broken_value_is_rejected(tmp_path: Path, entries: Sequence[tuple[str, int, bytes]]) -> None:
    path = tmp_path / "broken.gguf"
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, len(entries))
    keys = (struct.pack("<Q", len(name)) + name.encode() for name, _, _ in entries)
    values = (struct.pack("<I", kind) + value for _, kind, value in entries)
    path.write_bytes(head + b"".join(map(bytes.__add__, keys, values)))
    with pytest.raises(ValueError, match="broken at byte"):
        GgufFile.open(path)
