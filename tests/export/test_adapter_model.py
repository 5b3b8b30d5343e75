"""`genserve export FOLDER --base MODEL`: an adapter as a model of the repository."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from genserve.cli.local_models import local_models
from genserve.errors import ExportError
from genserve.export.adapters.adapter_model import export_adapter
from genserve.llm import LLM
from tests.export.adapters import write_adapter
from tests.export.ggufs import write_gguf, write_gguf_adapter
from tests.export.tiny_models import TINY_MODELS
from tests.export.tiny_models import tiny_checkpoint as family_checkpoint
from tests.support.command_line import Ended, invoke


@pytest.fixture(scope="module")
def adapter(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter") / "My-LoRA"
    return write_adapter(folder, tiny_checkpoint, targets=("q_proj", "down_proj"))


@pytest.fixture
def repository(tiny_repository: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_repository, tmp_path / "repository"))


def run(repository: Path, *words: str) -> Ended:
    return invoke([*words, "--model-repository", str(repository)])


def export(source: Path, repository: Path, *flags: str) -> int:
    return run(repository, "export", str(source), *flags).exit_code


def answer(repository: Path, model: str | None) -> str:
    with LLM(model, model_repository=repository) as llm:
        return llm.generate("hello there", max_tokens=8, temperature=0).text


def test_the_export_is_a_model_that_answers(adapter, repository, monkeypatch):
    monkeypatch.setattr("genserve.files._MIN_LINKED_BYTES", 0)
    assert export(adapter, repository, "--base", "tiny") == 0
    for file in adapter.iterdir():      # which the next training writes in place
        assert not file.samefile(repository / "my-lora" / "1" / file.name)
    assert answer(repository, "my-lora") != answer(repository, None) == answer(repository, "tiny")
    assert run(repository, "check").exit_code == 0
    listed = {model.name: model.base for model in local_models(repository)}
    assert listed == {"tiny": None, "my-lora": "tiny"}
    assert export(adapter, repository, "--base", "tiny") == 1
    assert export(adapter, repository, "--base", "tiny", "--overwrite") == 0


def test_an_adapter_in_gguf_answers_as_the_folder_that_it_was_converted_from(
    adapter, repository, tiny_checkpoint, tmp_path
):
    file = write_gguf_adapter(adapter, tiny_checkpoint, tmp_path / "Mine.gguf")
    assert export(adapter, repository, "--base", "tiny") == 0
    assert export(file, repository, "--base", "tiny") == 0
    assert answer(repository, "mine") == answer(repository, "my-lora") != answer(repository, "tiny")
    before = sorted(repository.rglob("*"))
    base = write_gguf(tiny_checkpoint, tmp_path / "base.gguf")
    embedding = write_adapter(tmp_path / "embedding", tiny_checkpoint, targets=("embed_tokens",))
    for refused in (base, write_gguf_adapter(embedding, tiny_checkpoint, tmp_path / "embedding.gguf")):
        assert export(refused, repository, "--base", "tiny", "--name", "other") == 1
    assert sorted(repository.rglob("*")) == before


@pytest.mark.parametrize(
    ("family", "target"), [("gpt_neox", "query_key_value"), ("deepseek_v3", "q_a_proj")]
)
def test_an_adapter_in_gguf_for_a_family_that_requests_cannot_adapt_is_refused(
    family: str, target: str, tmp_path: Path
) -> None:
    checkpoint = family_checkpoint(tmp_path / "base", **TINY_MODELS[family])
    folder = write_adapter(tmp_path / "adapter", checkpoint, targets=(target,))
    file = write_gguf_adapter(folder, checkpoint, tmp_path / "adapter.gguf")
    repository = tmp_path / "repository"
    assert export(checkpoint, repository, "--name", "base") == 0
    ended = run(repository, "export", str(file), "--base", "base")
    assert ended.exit_code == 1
    assert "--adapter" in ended.stderr
    assert [each.name for each in repository.glob("adapter*")] == []


@pytest.mark.parametrize("is_gguf", [False, True])
@pytest.mark.parametrize("value", [None, np.nan])
def test_errors_name_the_file_that_the_user_has_given(
    value: float | None, is_gguf: bool, adapter: Path, repository: Path, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(adapter, tmp_path / "adapter"))
    weights = folder / "adapter_model.safetensors"
    tensors = {} if value is None else load_file(weights)
    save_file({name: tensor * value for name, tensor in tensors.items()}, weights)
    source = write_gguf_adapter(folder, tiny_checkpoint, tmp_path / "Mine.gguf") if is_gguf else folder
    with pytest.raises(ExportError) as raised:
        export_adapter(source, repository=repository, name="mine", base="tiny")
    assert str(source) in str(raised.value)
    assert str(repository) not in str(raised.value)


def test_a_receipt_of_an_adapter_is_verified(adapter, repository, tmp_path):
    assert export(adapter, repository, "--base", "tiny") == 0
    with LLM("my-lora", model_repository=repository) as llm:
        usage = llm.generate("hello there", max_tokens=8, temperature=0, return_receipt=True).usage
    receipt = tmp_path / "receipt.json"
    receipt.write_text(json.dumps(usage.receipt))
    assert run(repository, "verify", str(receipt)).exit_code == 0
    assert run(repository, "verify", str(receipt), "--model", "tiny").exit_code == 2
    config = repository / "my-lora" / "1" / "adapter_config.json"
    config.write_text(config.read_text() + " ")     # a digest of the receipt is another one
    assert run(repository, "verify", str(receipt)).exit_code == 2


def test_what_is_no_adapter_of_the_base_leaves_the_repository_as_it_was(adapter, repository, tmp_path):
    before = sorted(repository.rglob("*"))
    assert export(adapter, repository) == 1
    assert export(adapter, repository, "--base", "nobody") == 1
    assert export(adapter, repository, "--base", "tiny", "--name", "tiny", "--overwrite") == 1
    assert export(adapter, repository, "--base", "tiny", "--precision", "int8") == 1
    assert export(adapter / "adapter_model.safetensors", repository, "--base", "tiny") == 1
    broken = Path(shutil.copytree(adapter, tmp_path / "broken"))
    config = json.loads((broken / "adapter_config.json").read_text())
    (broken / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))
    assert export(broken, repository, "--base", "tiny") == 1
    assert sorted(repository.rglob("*")) == before
