from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from genserve.errors import SEE_LOG, ModelNotFound, ModelNotReady, RepositoryError
from genserve.repository import text_stages
from genserve.repository.index import scan
from genserve.repository.model_versions import ModelState
from genserve.repository.options import ControlMode, RepositoryOptions
from genserve.repository.repository import Repository
from tests.support.python_models import write_model


@pytest.fixture
def copy(tiny_repository, tmp_path):
    return shutil.copytree(tiny_repository, tmp_path / "repository")


def loaded(root) -> Repository:
    repository = Repository([root])
    repository.start()
    return repository


def test_models_are_listed_by_folder_without_hidden_ones(copy):
    (copy / ".half-written").mkdir()
    assert list(scan([copy])) == ["tiny", "tiny_decoder", "tiny_logits", "tiny_tokenizer"]


def test_the_highest_version_is_served(copy):
    entry = scan([copy])["tiny_decoder"]
    for name in ("2", "10", "010", "x", "-3"):
        (entry.path / name).mkdir()
    assert entry.versions == (1, 2, 10)
    assert entry.latest_version().name == "10"


def test_the_only_model_needs_no_name(copy):
    repository = loaded(copy)
    assert repository.text_model() is repository.text_model("tiny")
    repository.close()


def test_a_broken_model_does_not_stop_a_good_one(copy):
    shutil.copytree(copy / "tiny", copy / "broken")
    text = (copy / "tiny" / "config.pbtxt").read_text().replace('"tiny"', '"broken"')
    (copy / "broken" / "config.pbtxt").write_text(text.replace("tiny_logits", "nowhere"))
    repository = loaded(copy)
    assert repository.text_model("tiny")
    with pytest.raises(ModelNotReady) as caught:
        repository.text_model("broken")
    assert caught.value.remedy == SEE_LOG
    assert "nowhere" in str(repository.errors["broken"])
    assert repository.state is ModelState.UNAVAILABLE
    repository.close()


SLOW = """
import threading
from pathlib import Path

class TritonPythonModel:
    def initialize(self, args):
        while not Path(args["model_repository"], "go").exists():
            threading.Event().wait(0.01)

    def execute(self, requests):
        return []
"""


def test_a_repository_is_loading_until_the_last_model_is_although_one_has_failed(tmp_path):
    write_model(tmp_path, "a_broken", code="def")
    write_model(tmp_path, "slow", code=SLOW)
    repository = Repository([tmp_path])
    with ThreadPoolExecutor(1) as pool:
        started = pool.submit(repository.start)
        while "a_broken" not in repository.errors:
            assert not started.done()
        meanwhile = repository.state
        (tmp_path / "slow" / "go").touch()
        started.result()
    assert (meanwhile, repository.state) == (ModelState.LOADING, ModelState.UNAVAILABLE)
    repository.close()


def test_a_config_that_cannot_be_read_is_listed_with_its_error(copy):
    (copy / "tiny_logits" / "config.pbtxt").write_text("name: 5")
    assert scan([copy])["tiny_logits"].parsed.diagnostics
    repository = loaded(copy)
    assert "config.pbtxt:1:" in str(repository.errors["tiny"])


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ("tiny_logits/1/model.onnx", "model.onnx is missing"),
        ("tiny_tokenizer/1/tokenizer.json", "tokenizer.json"),
        ("tiny_decoder/1/model.py", "model.py is missing"),
    ],
)
def test_a_missing_file_is_named_with_a_remedy(copy, missing, words):
    (copy / missing).unlink()
    error = loaded(copy).errors["tiny"]
    assert words in error.message
    assert error.remedy


@pytest.mark.parametrize(
    ("broken", "asked"),
    [
        ("tiny/config.pbtxt", "tiny"),
        ("tiny_decoder/1/model.py", "tiny"),
        ("tiny_decoder/1/model.py", "tiny_decoder"),
        ("tiny_logits/1/model.onnx", "tiny_logits"),
        ("tiny_tokenizer/1/tokenizer.json", "tiny"),
        ("tiny_tokenizer/1/tokenizer.json", "tiny_tokenizer"),
    ],
)
def test_a_text_model_that_was_broken_at_the_start_is_ready_once_it_is_mended(copy, broken, asked):
    right = (copy / broken).read_bytes()
    (copy / broken).write_bytes(b"nonsense (")
    options = RepositoryOptions(control_mode=ControlMode.EXPLICIT)
    with closing(Repository([copy], options=options)) as repository:
        repository.start()
        assert repository.state is ModelState.UNAVAILABLE
        (copy / broken).write_bytes(right)
        repository.load(asked)
        assert_all_ready(repository)


@pytest.mark.parametrize(
    "broken", ["tiny_decoder/1/model.py", "tiny_decoder/config.pbtxt", "tiny_tokenizer/1/tokenizer.json"]
)
def test_polling_follows_a_text_model_that_is_broken_and_mended(copy, broken):
    options = RepositoryOptions(control_mode=ControlMode.POLL, poll_s=0.02)
    right = (copy / broken).read_bytes()
    with closing(Repository([copy], options=options)) as repository:
        repository.start()
        assert_all_ready(repository)
        (copy / broken).write_bytes(b"nonsense (")
        wait_until(lambda: repository.errors)
        assert broken.endswith(".pbtxt") or repository.text_model("tiny"), "the old version answers"
        (copy / broken).write_bytes(right)
        wait_until(lambda: not repository.errors)
        assert_all_ready(repository)


def test_a_text_model_loads_the_models_of_all_its_steps(copy):
    with closing(Repository([copy])) as repository:
        repository.start(["tiny"])
        assert_all_ready(repository)


def assert_all_ready(repository: Repository) -> None:
    assert repository.state is ModelState.READY
    shown = {entry.name: (entry.state, entry.reason) for entry in repository.index()}
    assert shown == dict.fromkeys(["tiny", "tiny_decoder", "tiny_logits", "tiny_tokenizer"], ("READY", ""))


def wait_until(holds: Callable[[], object]) -> None:
    """Wait for what another thread brings about."""
    while not holds():
        threading.Event().wait(0.01)


def test_an_ensemble_with_a_model_of_tritons_is_no_text_model(copy):
    (copy / "tiny_decoder" / "1" / "model.py").write_text(
        "class TritonPythonModel:\n    def execute(self, requests): ..."
    )
    repository = loaded(copy)
    assert repository.is_ready("tiny")
    with pytest.raises(ModelNotFound, match="'tiny' does not generate text"):
        repository.text_model("tiny")
    repository.close()


@pytest.mark.parametrize(
    ("source", "is_decoder"),
    [
        ("class TritonPythonModel:\n    pass    # no execute: the loop is the default one\n", True),
        ("class TritonPythonModel: ...", True),
        ("class TritonPythonModel():\n    stop_rules = {}", True),
        ("class TritonPythonModel(Base): ...", False),
        ("class TritonPythonModel:\n    execute = other", False),
        ("class Other: ...", False),
    ],
)
def test_a_model_py_without_a_loop_is_a_decoder_stage_if_it_cannot_be_a_model_of_tritons(
    tmp_path, source, is_decoder
):
    path = tmp_path / "model.py"
    path.write_text(source)
    assert text_stages.is_decoder(path) is is_decoder


def test_a_bad_parameter_names_the_file(copy):
    path = copy / "tiny_logits" / "config.pbtxt"
    path.write_text(
        path.read_text() + 'parameters { key: "intra_op_thread_count" value { string_value: "two" } }'
    )
    assert "intra_op_thread_count" in loaded(copy).errors["tiny"].message


def test_the_remedy_for_an_unknown_model_lists_the_known_ones(copy):
    repository = loaded(copy)
    with pytest.raises(ModelNotFound, match="tiny"):
        repository.text_model("nobody")
    with pytest.raises(ModelNotFound, match="tiny"):
        repository.start(["nobody"])
    repository.close()


def test_a_missing_repository_is_named(tmp_path):
    with pytest.raises(RepositoryError, match="genserve pull"):
        Repository([tmp_path / "none"])


def test_a_model_that_is_not_loaded_is_not_ready_instead_of_unknown(copy):
    shutil.copytree(copy / "tiny", copy / "other")
    config = copy / "other" / "config.pbtxt"
    config.write_text(config.read_text().replace('name: "tiny"', 'name: "other"'))
    repository = Repository([copy])
    repository.start(["tiny"])
    with pytest.raises(ModelNotReady, match="models/other/load"):
        repository.text_model("other")
    repository.close()
    with pytest.raises(ModelNotReady, match="models/tiny/load"):
        repository.text_model("tiny")


def test_a_cache_that_cannot_be_reserved_is_an_error_of_that_model(copy):
    path = copy / "tiny_logits" / "config.pbtxt"
    path.write_text(
        path.read_text().replace("max_batch_size: 32", "max_batch_size: 1000000")
        + 'parameters [ { key: "kv_cache_bytes" value: { string_value: "1000000GiB" } } ]'
    )
    assert "cannot be reserved" in loaded(copy).errors["tiny"].message


def test_the_warnings_of_a_loaded_model_are_logged_once(copy, caplog):
    path = copy / "tiny_logits" / "config.pbtxt"
    path.write_text(path.read_text() + 'runtime: "a"')
    repository = loaded(copy)
    repository.close()
    [warning] = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "config.pbtxt:" in warning.getMessage()
    assert "runtime is ignored: the backend's own" in warning.getMessage()


def test_a_model_that_would_answer_wrongly_is_rejected(copy):
    path = copy / "tiny_logits" / "config.pbtxt"
    path.write_text(path.read_text() + "version_policy { specific { versions: 7 } }")
    assert "at least one version must be available" in loaded(copy).errors["tiny"].message
