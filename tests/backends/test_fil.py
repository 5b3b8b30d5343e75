from __future__ import annotations

import json
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from genserve.backends.fil import FilBackend
from genserve.errors import InferenceError, MissingDependency, RepositoryError, Status
from genserve.repository.model_validation import repository_diagnostics
from tests.backends.inferences import answers, ask, assert_runs_concurrently, config_of, started

needs_treelite = pytest.mark.skipif(
    find_spec("treelite") is None, reason="Treelite is not installed: pip install 'genserve[fil]'"
)
FORESTS = Path(__file__).parent / "forests"
RECORDED = json.loads((FORESTS / "predictions.json").read_text())
ROWS = np.array(RECORDED["rows"], dtype=np.float32)     # a missing value is NaN
TYPES = {"xgboost.json": "xgboost_json", "xgboost.ubj": "xgboost_ubj", "model.txt": "lightgbm"}


def config_text(*, features: int = 4, width: int = 1, more: str = "", **parameters: str) -> str:
    written = "".join(
        f'parameters {{ key: "{name}" value {{ string_value: "{value}" }} }}\n'
        for name, value in parameters.items()
    )
    return f"""
        backend: "fil"
        max_batch_size: 64
        input [ {{ name: "input__0" data_type: TYPE_FP32 dims: [ {features} ] }} ]
        output [ {{ name: "output__0" data_type: TYPE_FP32 dims: [ {width} ] }} ]
        {more}{written}"""


def served(folder: Path, file: str, **options) -> FilBackend:
    """An instance of one of the recorded forests."""
    (folder / "1").mkdir()
    shutil.copy(FORESTS / file, folder / "1")
    return started(FilBackend, config_of(config_text(model_type=TYPES[file], **options)), folder)


def answer(backend: FilBackend, rows=ROWS) -> np.ndarray:
    [output] = answers(backend, ask({"input__0": rows}, batch_size=len(rows)))
    assert output["output__0"].dtype == np.float32
    return output["output__0"]


def recorded(file: str) -> np.ndarray:
    return np.array(RECORDED["predictions"][file])


@needs_treelite
def test_scores_are_those_of_the_library_that_trained_the_trees(tmp_path):
    for file, width, classifies in (("xgboost.ubj", 3, "true"), ("model.txt", 1, "false")):
        folder = tmp_path / file
        folder.mkdir()
        backend = served(folder, file, width=width, is_classifier=classifies, predict_proba="true")
        np.testing.assert_allclose(answer(backend), recorded(file).reshape(-1, width), atol=1e-6)


@needs_treelite
@pytest.mark.parametrize("name", ["is_classifier", "output_class"])
def test_a_classifier_gives_the_likeliest_class(tmp_path, name):
    backend = served(tmp_path, "xgboost.ubj", **{name: "true"})
    assert answer(backend)[:, 0].tolist() == recorded("xgboost.ubj").argmax(axis=1).tolist()


@needs_treelite
@pytest.mark.parametrize("threshold", [None, "0.7"])
def test_a_binary_classifier_gives_one_above_the_threshold(tmp_path, threshold):
    parameters = {"threshold": threshold} if threshold else {}
    backend = served(tmp_path, "xgboost.json", is_classifier="true", **parameters)
    expected = recorded("xgboost.json") > float(threshold or 0.5)
    assert 0 < expected.sum() < len(ROWS)
    assert answer(backend)[:, 0].tolist() == expected.astype(float).tolist()


@needs_treelite
def test_an_output_of_two_numbers_has_the_scores_of_both_classes(tmp_path):
    backend = served(tmp_path, "xgboost.json", width=2, is_classifier="true", predict_proba="true")
    expected = recorded("xgboost.json")
    np.testing.assert_allclose(answer(backend), np.stack([1 - expected, expected], axis=1), atol=1e-6)


@needs_treelite
def test_a_checkpoint_of_treelite_may_have_any_name(tmp_path):
    import treelite

    (tmp_path / "1").mkdir()
    treelite.frontend.load_lightgbm_model(FORESTS / "model.txt").serialize(tmp_path / "1" / "trees.tl")
    text = config_text(
        model_type="treelite_checkpoint", is_classifier="false", more='default_model_filename: "trees.tl"\n'
    )
    backend = started(FilBackend, config_of(text), tmp_path)
    np.testing.assert_allclose(answer(backend)[:, 0], recorded("model.txt"), atol=1e-6)


@needs_treelite
def test_requests_are_batched_and_run_side_by_side(tmp_path):
    backend = served(tmp_path, "model.txt", is_classifier="false")
    batch = [ask({"input__0": ROWS[:2]}, batch_size=2), ask({"input__0": ROWS[2:3]})]
    found = np.concatenate([output["output__0"] for output in answers(backend, *batch)])
    np.testing.assert_allclose(found[:, 0], recorded("model.txt")[:3], atol=1e-6)
    config = config_of(config_text(model_type="lightgbm", is_classifier="false"))
    assert_runs_concurrently(FilBackend, config, tmp_path, requests=[{"input__0": ROWS[:5]}])


@needs_treelite
def test_a_request_with_too_few_features_fails(tmp_path):
    backend = served(tmp_path, "model.txt", features=-1, is_classifier="false")
    asked = ask({"input__0": ROWS[:, :3]}, batch_size=len(ROWS))
    with pytest.raises(InferenceError) as raised:
        backend.execute([asked.inference])
    assert raised.value.status is Status.INVALID_ARG


@needs_treelite
@pytest.mark.parametrize(
    ("options", "status"),
    [
        ({"features": 5, "is_classifier": "false"}, Status.INVALID_ARG),
        ({}, Status.INVALID_ARG),
        ({"is_classifier": "perhaps"}, Status.INVALID_ARG),
        ({"is_classifier": "true", "threshold": "half"}, Status.INVALID_ARG),
        ({"is_classifier": "false", "model_type": "catboost"}, Status.UNSUPPORTED),
        ({"is_classifier": "false", "model_type": "xgboost_ubj"}, Status.UNAVAILABLE),     # no such file
    ],
)
def test_wrong_configs_are_rejected(tmp_path, options, status):
    (tmp_path / "1").mkdir()
    shutil.copy(FORESTS / "model.txt", tmp_path / "1")
    text = config_text(**{"model_type": "lightgbm", **options})
    with pytest.raises(RepositoryError) as raised:
        started(FilBackend, config_of(text), tmp_path)
    assert raised.value.status is status
    assert raised.value.remedy


@needs_treelite
def test_check_names_a_damaged_file_and_a_parameter_without_effect(tmp_path):
    (tmp_path / "trees" / "1").mkdir(parents=True)
    text = config_text(model_type="lightgbm", is_classifier="false", num_trees="2", algo="NAIVE")
    (tmp_path / "trees" / "config.pbtxt").write_text(text)
    file = tmp_path / "trees" / "1" / "model.txt"
    file.write_bytes((FORESTS / "model.txt").read_bytes()[:1000])
    damaged, unknown = repository_diagnostics([tmp_path])["trees"][::-1]
    assert damaged.severity == "error"
    assert unknown.severity == "warning"
    assert "num_trees" in unknown.message
    shutil.copy(FORESTS / "model.txt", file)
    assert repository_diagnostics([tmp_path])["trees"] == (unknown,)


def test_without_treelite_the_load_names_the_package_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "treelite", None)  # importing it raises ModuleNotFoundError
    with pytest.raises(MissingDependency) as raised:
        served(tmp_path, "model.txt", is_classifier="false")
    assert raised.value.remedy == "pip install 'genserve[fil]'"
