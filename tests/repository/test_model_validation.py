"""Validation of files and version folders; see also test_ensemble_rules.py and tests/config."""

from __future__ import annotations

import shutil
from pathlib import Path

import onnx
import pytest

from genserve.repository.model_validation import repository_diagnostics
from genserve.repository.repository import Repository
from tests.backends.networks import save_onnx
from tests.support.tiny_llama import tiny_tokenizer

SHIPPED = Path(__file__).parents[2] / "model_repository"
POLICY = 'backend: "python" version_policy: {{ {} }}'
NO_VERSION = "at least one version must be available under the version policy of model 'm'"
ADD = "add a folder '1' for the first version; `genserve pull` and `genserve export` make it"
BRING = "add the file; `genserve pull` and `genserve export` make those of exported models"


def shipped_with_files(root: Path) -> Path:
    """The repository that comes with the sources, with small files where `genserve pull` puts the weights."""
    shutil.copytree(SHIPPED, root)
    tokenizer = root / "smollm2_tokenizer" / "1"
    tokenizer.mkdir(exist_ok=True)
    tiny_tokenizer(vocab_size=320).save(str(tokenizer / "tokenizer.json"))
    (tokenizer / "tokenizer_config.json").write_text("{}")
    inputs = (
        "input_ids", "position_ids", "cumulative_sequence_length", "past_seqlens", "block_table",
        "logits_indices", "attention_metadata", "past_key_values.0.key",
    )
    file = save_onnx(
        root / "smollm2_logits" / "1" / "model.onnx",
        [("Identity", ["logits_indices"], ["logits"], {})],
        inputs={name: (onnx.TensorProto.FLOAT, [1]) for name in inputs},
        outputs={"logits": (onnx.TensorProto.FLOAT, [1])},
    )
    graph = onnx.load(file)
    graph.metadata_props.add(key="genserve.context_length", value="8192")
    graph.metadata_props.add(key="genserve.operators", value="1")
    onnx.save(graph, file)
    return root


def add(root: Path, *, config: str = 'backend: "python"', files: tuple[str, ...] = ("1/model.py",)) -> None:
    for name in files:
        path = root / "m" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("class TritonPythonModel: pass" if path.suffix == ".py" else "")
    (root / "m" / "config.pbtxt").write_text(config)


def reported(root: Path) -> list[str]:
    """`position: severity: message; remedy` of each diagnostic."""
    diagnostics = [each for of_model in repository_diagnostics([root]).values() for each in of_model]
    lines = [f"{each.where}: {each.severity.value}: {each.message}; {each.remedy}" for each in diagnostics]
    return [line.removeprefix(f"{root}/") for line in lines]


def test_the_shipped_repository_has_no_errors_once_its_files_are_pulled(tmp_path):
    assert repository_diagnostics([shipped_with_files(tmp_path / "r")]) == dict.fromkeys(
        ("smollm2", "smollm2_decoder", "smollm2_logits", "smollm2_tokenizer"), ()
    )


def test_an_exported_model_has_no_diagnostics(tiny_repository):
    assert set(repository_diagnostics([tiny_repository]).values()) == {()}


@pytest.mark.parametrize(
    ("config", "files", "golden"),
    [
        ('backend: "python"', ("x/model.py",),
         [f"m: error: {NO_VERSION}; {ADD}"]),
        ('backend: "python"', ("v1/model.py",),
         ["m/v1: warning: the folder 'v1' is not a version, and is ignored; rename it to '1': a number "
          "without leading zeros",
          f"m: error: {NO_VERSION}; {ADD}"]),
        ('backend: "python"', ("1/model.py", "02/model.py", "configs/a"),
         ["m/02: warning: the folder '02' is not a version, and is ignored; rename it to '2': a number "
          "without leading zeros"]),
        ('backend: "python"', ("1/model.py", "2/other.py"), [f"m/2: error: model.py is missing; {BRING}"]),
        ('backend: "onnxruntime"', ("1/model.pt",), [f"m/1: error: model.onnx is missing; {BRING}"]),
        ('backend: "onnxruntime" default_model_filename: "g.onnx"', ("1/model.onnx",),
         [f"m/1: error: g.onnx is missing; {BRING}"]),
        ('backend: "tokenizer"', ("1/vocab.txt",),
         [f"m/1: error: tokenizer.json is missing; {BRING}",
          f"m/1: error: tokenizer_config.json is missing; {BRING}"]),
        (POLICY.format("specific { versions: [ 1, 7 ] }"), ("1/model.py", "2/other.py"),
         ["m/config.pbtxt:1:19: warning: version 7 is specified for model 'm', but the version directory is "
          "not present; add the folder '7', or leave the version out"]),
        (POLICY.format("all { }"), ("1/other.py", "2/model.py"),
         [f"m/1: error: model.py is missing; {BRING}"]),
        (POLICY.format("latest { }"), ("1/model.py", "2/model.py"),
         [f"m/config.pbtxt:1:19: error: {NO_VERSION}; available versions: 1, 2; "
          "`version_policy { all { } }` serves them all"]),
        (POLICY.format("specific { versions: 2 }"), ("1/model.py", "2/model.py"), []),
        (POLICY.format("latest { num_versions: 2 }"), ("1/model.py",), []),
        ("name: 5", ("1/model.py",), ["m/config.pbtxt:1:7: error: Expected string but found: '5'; "]),
        ('backend: "pytorch"', ("1/model.py",), [f"m/1: error: model.pt is missing; {BRING}"]),
        ('backend: "python" default_model_filename: "loop.py"', ("1/loop.py",), []),
    ],
)  # fmt: skip
def test_missing_files_and_wrong_folders_are_reported(tmp_path, config, files, golden):
    (tmp_path / "m").mkdir()
    add(tmp_path, config=config, files=files)
    assert reported(tmp_path) == golden


def test_a_folder_without_a_config_is_validated_by_its_files(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "1" / "model.py").write_text("class TritonPythonModel: pass")
    lines = reported(tmp_path)
    assert len(lines) == 2
    assert lines[0].startswith("empty/config.pbtxt: error: Invalid model name: Could not determine backend")
    assert lines[1].startswith("empty: error: at least one version must be available")


def test_a_model_of_a_third_party_backend_has_no_diagnostics(tmp_path):
    backend = tmp_path / "backends" / "mine"
    backend.mkdir(parents=True)
    (backend / "model.py").touch()
    (tmp_path / "r" / "m").mkdir(parents=True)
    add(tmp_path / "r", config='backend: "mine"', files=("1/model.json",))
    assert repository_diagnostics([tmp_path / "r"], backend_folders=[backend.parent]) == {"m": ()}
    [diagnostic] = repository_diagnostics([tmp_path / "r"])["m"]
    assert "unable to find backend library for backend 'mine'" in diagnostic.message


def test_a_model_in_two_repositories_is_rejected(tmp_path):
    for root in ("one", "two"):
        (tmp_path / root / "m").mkdir(parents=True)
        add(tmp_path / root)
    [diagnostic] = repository_diagnostics([tmp_path / "one", tmp_path / "two"])["m"]
    assert diagnostic.message == "failed to poll model 'm': not unique across all model repositories"
    assert str(tmp_path / "one" / "m") in diagnostic.remedy
    assert diagnostic.path == tmp_path / "two" / "m"
    assert repository_diagnostics([tmp_path / "one", tmp_path / "one"]) == {"m": ()}


ELSEWHERE = (
    "the file '{name}' is not in the folder of model 'm'; put the file into {folder}, and write its "
    "path from there"
)


@pytest.mark.parametrize("name", ["../../x", "../1/model.py", "/etc/passwd"])
@pytest.mark.parametrize(
    ("field", "folder"),
    [
        ('default_model_filename: "{name}"', "the folder of each version"),
        ('output [ {{ name: "Y" data_type: TYPE_FP32 dims: [ 1 ] label_filename: "{name}" }} ]',
         "the model's folder"),
        ('model_warmup {{ name: "w" inputs {{ key: "X" value {{ data_type: TYPE_FP32 dims: [ 1 ] '
         'input_data_file: "{name}" }} }} }}', "the model's folder `warmup`"),
        ('sequence_batching {{ state {{ input_name: "S" output_name: "T" data_type: TYPE_FP32 dims: [ 1 ] '
         'initial_state {{ name: "i" data_type: TYPE_FP32 dims: [ 1 ] data_file: "{name}" }} }} }}',
         "the model's folder `initial_state`"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("backend", ["python", "onnxruntime", "pytorch", "tensorflow", "tokenizer"])
def test_a_file_outside_of_the_models_folder_is_an_error_with_its_line(
    tmp_path, backend, field, folder, name
):
    add(tmp_path, config=f'backend: "{backend}"\n{field.format(name=name)}')
    [line] = reported(tmp_path)
    position, _, error = line.partition(": error: ")
    assert position.startswith("m/config.pbtxt:2:")
    assert error == ELSEWHERE.format(name=name, folder=folder)


@pytest.mark.parametrize("name", ["a" * 256, "a\\000b", ".", "1/" + "é" * 128])
def test_an_invalid_file_name_is_an_error_of_its_model_only(tmp_path, name):
    add(tmp_path, config=f'backend: "python" default_model_filename: "{name}"')
    (tmp_path / "n" / "1").mkdir(parents=True)
    (tmp_path / "n" / "1" / "model.py").write_text("class TritonPythonModel: pass")
    [line] = reported(tmp_path)
    assert line.startswith("m/config.pbtxt:1:19: error: '")


def test_a_file_that_a_rule_of_configs_cannot_read_is_an_error_of_its_model_only(tmp_path):
    add(tmp_path, config='backend: "python" input { name: "X" }')
    (tmp_path / "n" / "1").mkdir(parents=True)
    (tmp_path / "n" / "1" / "model.py").write_text("class TritonPythonModel: pass")
    file = tmp_path / "m" / "1" / "model.py"
    file.unlink()
    file.symlink_to("/proc/self/mem")   # nobody can read its beginning, not even root
    line, link = reported(tmp_path)
    assert line.startswith("m: error: the folder cannot be read: ")
    assert "the link leads out" in link
    reasons = {entry.name: entry.reason for entry in Repository([tmp_path]).index()}
    assert "cannot be read" in reasons["m"]
    assert not reasons["n"]


def test_a_model_file_outside_of_its_folder_is_not_read(tmp_path):
    (tmp_path / "outside.py").write_text("async def decode(self): (")
    add(tmp_path / "r", config='backend: "python" default_model_filename: "../../../outside.py"')
    [line] = reported(tmp_path / "r")
    assert "outside.py' is not in the folder" in line


def test_a_link_that_leads_out_of_the_repository_is_a_warning(tmp_path):
    add(tmp_path / "r")
    for name in ("a", "b"):
        (tmp_path / "r" / "m" / "1" / name).symlink_to("/etc")
    assert reported(tmp_path / "r") == [
        "m/1/a: warning: the link leads out of the model repository, and 1 more do; the server "
        "follows it, unless started with --strict-repository-paths"
    ]
