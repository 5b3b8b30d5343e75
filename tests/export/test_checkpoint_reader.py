"""Checkpoint folders: reading them, and errors."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from safetensors.torch import save_file

from genserve.errors import ExportError
from genserve.export.checkpoint_reader import read_checkpoint
from genserve.export.hub import locate
from genserve.export.source_model import source_model
from tests.support.tiny_llama import CHAT_TEMPLATE, tiny_llama_checkpoint

QUERY = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_llama_checkpoint(tmp_path / "tiny")


def test_tensors_come_by_name_as_float32(folder: Path) -> None:
    checkpoint = read_checkpoint(folder, source="tiny")
    expected = load_file(folder / "model.safetensors")
    assert checkpoint.tensor_names == expected.keys()
    assert np.array_equal(checkpoint.tensor(QUERY), expected[QUERY])


def test_sharded_bfloat16_checkpoints_are_read(folder: Path) -> None:
    tensors = {
        name: torch.from_numpy(value).bfloat16()
        for name, value in load_file(folder / "model.safetensors").items()
    }
    (folder / "model.safetensors").unlink()
    shards = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(tensors)}
    for file in set(shards.values()):
        save_file({name: tensors[name] for name in tensors if shards[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    checkpoint = read_checkpoint(folder, source="tiny")
    assert checkpoint.tensor_names == tensors.keys()
    assert checkpoint.tensor(QUERY).dtype == np.float32
    assert np.array_equal(checkpoint.tensor(QUERY), tensors[QUERY].float().numpy())


def test_the_chat_template_may_come_from_the_tokenizer_config(folder: Path) -> None:
    files = read_checkpoint(folder, source="tiny").tokenizer_files
    assert files["chat_template.jinja"].decode() == CHAT_TEMPLATE


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ([{"name": "rag", "template": "R"}, {"name": "default", "template": "D"}], b"D"),
        ([{"name": "rag", "template": "R"}], None),
        ([{"template": "D"}, 5], None),
    ],
)
def test_the_default_one_of_several_chat_templates_is_used(
    folder: Path, entries: list[object], expected: bytes | None
) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": entries}))
    assert read_checkpoint(folder, source="tiny").tokenizer_files.get("chat_template.jinja") == expected


def test_a_chat_template_file_takes_precedence(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    files = read_checkpoint(folder, source="tiny").tokenizer_files
    assert files["chat_template.jinja"] == b"{{ messages }}"


def test_without_a_generation_config_the_config_has_the_eos_token(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    files = read_checkpoint(folder, source="tiny").tokenizer_files
    assert json.loads(files["generation_config.json"]) == {"eos_token_id": 2}


def test_a_missing_tokenizer_config_becomes_an_empty_one(folder: Path) -> None:
    (folder / "tokenizer_config.json").unlink()
    files = read_checkpoint(folder, source="tiny").tokenizer_files
    assert json.loads(files["tokenizer_config.json"]) == {}


def test_a_shard_that_is_missing_is_named(folder: Path) -> None:
    index = {"weight_map": {QUERY: "model-1.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ExportError, match=r"model-1\.safetensors cannot be read"):
        read_checkpoint(folder, source="tiny")


@pytest.mark.parametrize("num_shards", [1, 2])
def test_checkpoints_in_pytorch_s_bin_format_are_read(folder: Path, num_shards: int) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    shards = {name: f"pytorch_model-{i % 2}.bin" for i, name in enumerate(tensors)}
    if num_shards == 2:
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": shards}))
    else:
        shards = dict.fromkeys(tensors, "pytorch_model.bin")
    for file in set(shards.values()):
        part = {name: torch.from_numpy(tensors[name]).half() for name in tensors if shards[name] == file}
        torch.save(part, folder / file)
    checkpoint = read_checkpoint(folder, source="tiny", allow_pickled_weights=True)
    assert checkpoint.tensor_names == tensors.keys()
    assert checkpoint.tensor(QUERY).dtype == np.float32
    assert np.array_equal(checkpoint.tensor(QUERY), tensors[QUERY].astype(np.float16))


def test_bin_files_are_read_only_on_request(folder: Path) -> None:
    torch.save({"model.norm.weight": torch.ones(2)}, folder / "pytorch_model.bin")
    assert QUERY in read_checkpoint(folder, source="tiny").tensor_names
    (folder / "model.safetensors").unlink()
    with pytest.raises(ExportError, match=r"no model\.safetensors") as caught:
        read_checkpoint(folder, source="tiny")
    assert "--allow-pickled-weights" in caught.value.remedy


def test_code_in_a_bin_file_does_not_run(folder: Path, tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, ...]:
            return (tmp_path.joinpath("sprung").touch, ())

    (folder / "model.safetensors").unlink()
    torch.save({"model.norm.weight": Trap()}, folder / "pytorch_model.bin")
    with pytest.raises(ExportError, match=r"pytorch_model\.bin") as caught:
        read_checkpoint(folder, source="tiny", allow_pickled_weights=True)
    assert "save_pretrained" in caught.value.remedy
    assert not (tmp_path / "sprung").exists()


def test_code_that_a_config_names_does_not_run(folder: Path, tmp_path: Path) -> None:
    (folder / "planted.py").write_text(f"open({str(tmp_path / 'sprung')!r}, 'w')\nclass Model: pass\n")
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "planted.Model", "AutoModelForCausalLM": "planted.Model"}
    config["trust_remote_code"] = True
    (folder / "config.json").write_text(json.dumps(config))
    assert source_model(read_checkpoint(folder, source=str(folder))).num_parameters()
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("content", [b"", b"not a model" * 100])
def test_a_broken_bin_file_is_named(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(ExportError, match=r"pytorch_model\.bin"):
        read_checkpoint(folder, source="tiny", allow_pickled_weights=True)


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_named(folder: Path, file: str) -> None:
    (folder / file).unlink()
    with pytest.raises(ExportError, match=file.replace(".", r"\.")):
        read_checkpoint(folder, source="tiny")


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json", "model.safetensors"])
def test_a_broken_file_is_named(folder: Path, file: str) -> None:
    (folder / file).write_bytes(b"\xff{")
    with pytest.raises(ExportError, match=file.replace(".", r"\.")):
        read_checkpoint(folder, source="tiny")


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("content", ["[]", '"text"'])
def test_a_file_that_is_not_a_json_object_is_named(folder: Path, file: str, content: str) -> None:
    (folder / file).write_text(content)
    with pytest.raises(ExportError, match=file.replace(".", r"\.")):
        read_checkpoint(folder, source="tiny")


@pytest.mark.parametrize("content", ["{}", '{"weight_map": {"model.norm.weight": 5}}'])
def test_an_index_without_a_weight_map_is_named(folder: Path, content: str) -> None:
    (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ExportError, match=r"model\.safetensors\.index\.json.*weight_map"):
        read_checkpoint(folder, source="tiny")


def test_the_error_for_a_tensor_missing_in_its_shard_names_the_shard(folder: Path) -> None:
    index = {"weight_map": {"model.absent.weight": "model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ExportError, match=r"model\.safetensors.*model\.absent\.weight"):
        read_checkpoint(folder, source="tiny").tensor("model.absent.weight")


@pytest.mark.parametrize("content", [[1, 2], 5, {"model": {"norm.weight": torch.ones(2)}, "epoch": 3}])
def test_a_bin_file_without_named_tensors_is_named(folder: Path, content: object) -> None:
    (folder / "model.safetensors").unlink()
    torch.save(content, folder / "pytorch_model.bin")
    with pytest.raises(ExportError, match=r"pytorch_model\.bin"):
        read_checkpoint(folder, source="tiny", allow_pickled_weights=True)


def test_a_missing_tensor_is_named(folder: Path) -> None:
    with pytest.raises(ExportError, match=r"model\.layers\.9"):
        read_checkpoint(folder, source="tiny").tensor("model.layers.9.mlp.up_proj.weight")


@pytest.mark.parametrize("source", ["./no-such-folder", "no/such/folder", "nothing", "model.bin"])
def test_the_error_for_an_unknown_source_lists_the_known_kinds(source: str) -> None:
    with pytest.raises(ExportError, match="not a checkpoint") as caught:
        locate(source)
    assert "ORG/NAME" in caught.value.remedy


def test_an_unreachable_hub_is_an_export_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ExportError, match="hub"):
        locate("genserve-tests/not-in-any-cache")
