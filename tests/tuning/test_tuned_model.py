"""The chosen setting in all configs of a model, and how these are written."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from genserve.config.diagnostics import Severity
from genserve.errors import GenserveError, ModelNotFound, RepositoryError
from genserve.export import SilentProgress, export_model
from genserve.repository.index import scan
from genserve.repository.model_validation import repository_diagnostics
from genserve.tuning.search_space import Setting
from genserve.tuning.tuned_model import find_model, write_edits


def settings(batch_size: int, *, threads: int = 99, graph: str = "model.onnx") -> Setting:
    return Setting(graph=graph, threads=threads, batch_size=batch_size)


def batch_sizes(repository: Path) -> dict[str, int]:
    entries = scan([repository]).values()
    return {entry.name: entry.config.max_batch_size for entry in entries if entry.config is not None}


@pytest.mark.parametrize("batch_size", [7, 64])
def test_a_setting_is_written_into_all_stages(repository: Path, batch_size: int) -> None:
    version = repository / "tiny_logits" / "1"
    (version / "other").mkdir()
    for file in ("model.onnx", "model.onnx.data"):
        shutil.copy(version / file, version / "other")
    setting = settings(batch_size, graph="other/model.onnx")
    write_edits(find_model("tiny", repository=repository).edits(setting))
    assert set(batch_sizes(repository).values()) == {batch_size}
    model = find_model("tiny", repository=repository)
    assert model.current == setting
    oldest = model.logits.parsed.message.sequence_batching.oldest
    assert oldest.max_candidate_sequences == batch_size
    assert model.edits(setting) == []
    diagnostics = [each for of_model in repository_diagnostics([repository]).values() for each in of_model]
    assert not [diagnostic for diagnostic in diagnostics if diagnostic.severity is Severity.ERROR]


def test_another_graph_changes_the_state_types(repository: Path, tiny_checkpoint: Path) -> None:
    export_model(
        str(tiny_checkpoint),
        repository=repository,
        name="tiny",
        precision="fp16",
        beside="half",
        progress=SilentProgress(),
    )
    for graph, data_type in (("half/model.onnx", "TYPE_FP16"), ("model.onnx", "TYPE_FP32")):
        write_edits(find_model("tiny", repository=repository).edits(settings(8, graph=graph)))
        config = find_model("tiny", repository=repository).logits.config
        assert config is not None
        assert config.default_model_filename == graph
        assert config.sequence_batching is not None
        assert {state.data_type for state in config.sequence_batching.states} == {data_type}


def test_a_graph_that_cannot_be_read_is_named(repository: Path) -> None:
    broken = repository / "tiny_logits" / "1" / "broken"
    broken.mkdir()
    (broken / "model.onnx").write_bytes(b"not a model")
    with pytest.raises(RepositoryError, match=r"broken/model\.onnx cannot be read"):
        find_model("tiny", repository=repository).edits(settings(8, graph="broken/model.onnx"))


def test_the_ensemble_never_exceeds_a_stages_batch_size(repository: Path) -> None:
    for batch_size in (8, 64):
        edits = find_model("tiny", repository=repository).edits(settings(batch_size))
        for edit in edits:
            write_edits([edit])
            sizes = batch_sizes(repository)
            assert sizes["tiny"] == min(sizes.values())


def test_the_model_may_be_named_by_its_logits_stage(repository: Path) -> None:
    by_stage = find_model("tiny_logits", repository=repository)
    assert by_stage.edits(settings(8)) == find_model("tiny", repository=repository).edits(settings(8))


def test_a_logits_stage_without_an_ensemble_is_tuned_alone(repository: Path) -> None:
    for name in ("tiny", "tiny_decoder", "tiny_tokenizer"):
        shutil.rmtree(repository / name)
    model = find_model("tiny_logits", repository=repository)
    write_edits(model.edits(settings(8)))
    assert batch_sizes(repository) == {"tiny_logits": 8}


def test_a_shared_stage_keeps_the_batch_size_of_its_other_ensemble(repository: Path) -> None:
    shutil.copytree(repository / "tiny", repository / "other")
    config = repository / "other" / "config.pbtxt"
    config.write_text(config.read_text().replace('name: "tiny"', 'name: "other"').replace(": 32", ": 20"))
    write_edits(find_model("tiny", repository=repository).edits(settings(8)))
    assert batch_sizes(repository) == {
        "other": 20, "tiny": 8, "tiny_decoder": 20, "tiny_logits": 20, "tiny_tokenizer": 20
    }


def test_later_edits_of_a_config_are_kept(repository: Path) -> None:
    model = find_model("tiny", repository=repository)
    config = repository / "tiny_logits" / "config.pbtxt"
    config.write_bytes(b"# mine\r\n" + config.read_bytes())
    config.chmod(0o640)
    write_edits(model.edits(settings(8)))
    assert config.read_bytes().startswith(b"# mine\r\n# Logits stage")
    assert config.stat().st_mode & 0o777 == 0o640
    assert sorted(path.name for path in config.parent.iterdir()) == ["1", "config.pbtxt"]


def test_a_link_stays_a_link(repository: Path, tmp_path: Path) -> None:
    config = repository / "tiny" / "config.pbtxt"
    target = config.rename(tmp_path / "elsewhere.pbtxt")
    config.symlink_to(target)
    write_edits(find_model("tiny", repository=repository).edits(settings(8)))
    assert config.is_symlink()
    assert "max_batch_size: 8" in target.read_text()


def test_a_diff_has_the_changed_lines(repository: Path) -> None:
    edit = next(
        edit for edit in find_model("tiny", repository=repository).edits(settings(8))
        if edit.path.parent.name == "tiny_tokenizer"
    )
    assert edit.diff().splitlines()[2:] == ["@@ -4 +4 @@", "-max_batch_size: 32", "+max_batch_size: 8"]


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("tinny", ModelNotFound, "no model 'tinny'.*did you mean tiny"),
        ("tiny_tokenizer", RepositoryError, "'tiny_tokenizer' is not a text model.*text models: tiny"),
    ],
)
def test_a_model_that_cannot_be_tuned_is_rejected(
    repository: Path, name: str, kind: type[GenserveError], words: str
) -> None:
    with pytest.raises(kind, match=words):
        find_model(name, repository=repository)


def test_a_python_model_is_not_tuned(repository: Path) -> None:
    (repository / "mine" / "1").mkdir(parents=True)
    (repository / "mine" / "1" / "model.py").touch()
    (repository / "mine" / "config.pbtxt").write_text('backend: "python"')
    with pytest.raises(RepositoryError, match="'mine'"):
        find_model("mine", repository=repository)


def test_the_remedy_for_missing_weights_is_a_command(repository: Path) -> None:
    (repository / "tiny_logits" / "1" / "model.onnx").unlink()
    with pytest.raises(RepositoryError, match=r"model\.onnx is missing"):
        find_model("tiny", repository=repository)


def test_a_folder_that_cannot_be_written_is_named(repository: Path) -> None:
    edits = find_model("tiny", repository=repository).edits(settings(8))
    shutil.rmtree(repository / "tiny")
    with pytest.raises(RepositoryError, match=r"tiny/config\.pbtxt"):
        write_edits(edits)
