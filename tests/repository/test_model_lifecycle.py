"""Loading, unloading, swapping: over real Python models in real folders."""

from __future__ import annotations

import gc
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import genserve
from genserve.batching.rate_limiter import ResourceCapacity
from genserve.errors import InferenceError, Status
from genserve.inference import Inference, InferenceRequest
from genserve.repository.model_versions import ModelState
from genserve.repository.options import ControlMode, RepositoryOptions
from genserve.repository.repository import Repository
from genserve.tensor import Tensor
from tests.support.python_models import CONFIG, ask, value, write_model

ENSEMBLE = """
    platform: "ensemble"
    input [ { name: "X" data_type: TYPE_FP32 dims: [ -1 ] } ]
    output [ { name: "Y" data_type: TYPE_FP32 dims: [ -1 ] } ]
    ensemble_scheduling { step [
      { model_name: "one" model_version: -1
        input_map { key: "X" value: "X" } output_map { key: "Y" value: "M" } },
      { model_name: "two" model_version: -1
        input_map { key: "X" value: "M" } output_map { key: "Y" value: "Y" } }
    ] }
"""
OUTER = """
    platform: "ensemble"
    input [ { name: "X" data_type: TYPE_FP32 dims: [ -1 ] } ]
    output [ { name: "Y" data_type: TYPE_FP32 dims: [ -1 ] } ]
    ensemble_scheduling { step [
      { model_name: "both" model_version: -1
        input_map { key: "X" value: "X" } output_map { key: "Y" value: "Y" } }
    ] }
"""


@contextmanager
def opened(
    root: Path, *names: str, mode: ControlMode = ControlMode.EXPLICIT, **options
) -> Iterator[Repository]:
    repository = Repository([root], options=RepositoryOptions(control_mode=mode, **options))
    if names:
        repository.start(names)
    elif mode is not ControlMode.EXPLICIT:
        repository.start()
    try:
        yield repository
    finally:
        repository.close()


def index(repository: Repository) -> dict[str, tuple[str | None, str]]:
    return {entry.name: (entry.state, entry.reason) for entry in repository.index()}


def until(holds: Callable[[], bool]) -> None:
    """Wait for what another thread brings about."""
    arrived = threading.Event()
    while not holds():
        assert not arrived.wait(0.01)


def test_a_model_is_loaded_called_and_unloaded(tmp_path: Path) -> None:
    write_model(tmp_path, "one", number=1)
    with opened(tmp_path) as repository:
        assert index(repository) == {"one": (None, "")}
        with pytest.raises(InferenceError, match="Request for unknown model: 'one' is not found"):
            ask(repository, "one", X=[1])
        repository.load("one")
        assert index(repository) == {"one": ("READY", "")}
        assert value(ask(repository, "one", X=[1])) == [2]
        repository.unload("one")
        until(lambda: index(repository) == {"one": ("UNAVAILABLE", "unloaded")})
        with pytest.raises(InferenceError, match="'one' has no available versions"):
            ask(repository, "one", X=[1])


def test_an_unload_of_an_unknown_model_leaves_nothing_behind(tmp_path: Path) -> None:
    write_model(tmp_path, "one")
    with opened(tmp_path) as repository:
        for number in range(3):
            repository.unload(f"unknown-{number}")
        assert not repository.lifecycle._models.keys() - {"one"}


def test_a_failed_load_holds_none_of_its_memory(tmp_path: Path) -> None:
    code = """
        class WeightsThatFailed:
            pass
        class TritonPythonModel:
            def initialize(self, args):
                weights = WeightsThatFailed()
                raise MemoryError
    """
    write_model(tmp_path, "one", code=code)
    with opened(tmp_path, "one") as repository:
        assert "MemoryError" in str(repository.errors["one"])
        gc.collect()
        assert not [each for each in gc.get_objects() if type(each).__name__ == "WeightsThatFailed"]


MEETING = """
import pathlib, time
class TritonPythonModel:
    def initialize(self, args):
        folder = pathlib.Path(args["model_repository"])
        (folder / "came").touch()
        for _ in range(2000):
            if len(list(folder.parent.glob("*/came"))) == 4:
                return
            time.sleep(0.01)
        raise ValueError("the others do not load")
    def execute(self, requests):
        return []
"""


def test_four_models_load_in_parallel_at_the_start(tmp_path: Path) -> None:
    names = ["one", "two", "three", "four"]
    for name in names:
        write_model(tmp_path, name, code=MEETING)
    with opened(tmp_path, *names) as repository:
        assert not repository.errors


def test_an_unchanged_model_is_not_loaded_again(tmp_path: Path) -> None:
    write_model(tmp_path, "one")
    with opened(tmp_path, "one") as repository:
        served = repository.find("one")
        repository.load("one")
        assert repository.find("one") is served
        write_model(tmp_path, "one", number=5)
        repository.load("one")
        assert value(ask(repository, "one", X=[1])) == [6]


def test_a_failed_reload_leaves_the_old_version_serving(tmp_path: Path) -> None:
    write_model(tmp_path, "one")
    with opened(tmp_path, "one") as repository:
        write_model(tmp_path, "one", code="raise ValueError('no weights')")
        with pytest.raises(InferenceError, match=r"load failed for model 'one': .*no weights") as caught:
            repository.load("one")
        assert caught.value.status is Status.INVALID_ARG
        assert value(ask(repository, "one", X=[1])) == [2]
        state, reason = index(repository)["one"]
        assert state == "READY"
        assert "the last load has failed" in reason
        assert "no weights" in reason
        assert repository.state is ModelState.READY  # as in Triton
        write_model(tmp_path, "one", number=3)
        repository.load("one")
        assert index(repository) == {"one": ("READY", "")}


def test_a_model_that_could_never_be_loaded_is_missing_until_it_is_mended_or_unloaded(tmp_path: Path) -> None:
    write_model(tmp_path, "one")
    write_model(tmp_path, "bad", code="raise ValueError('no weights')")
    with opened(tmp_path, "one") as repository:
        with pytest.raises(InferenceError, match="no weights"):
            repository.load("bad")
        assert repository.state is ModelState.UNAVAILABLE
        repository.unload("bad")
        assert repository.state is ModelState.READY
        with pytest.raises(InferenceError, match="no weights"):
            repository.load("bad")
        write_model(tmp_path, "bad")
        repository.load("bad")
        assert repository.state is ModelState.READY
        with pytest.raises(InferenceError, match="failed to poll"):
            repository.load("invented")
        assert repository.state is ModelState.READY


@pytest.mark.parametrize("name", ["1/model.py", "config.pbtxt"])
def test_polling_reports_a_failed_reload_until_the_old_file_is_put_back(tmp_path: Path, name: str) -> None:
    file = write_model(tmp_path / "models", "one") / name
    old = shutil.copy2(file, tmp_path / "old")
    with opened(tmp_path / "models", mode=ControlMode.POLL, poll_s=0.02) as repository:
        served = repository.find("one")
        file.write_text("nonsense (")
        until(lambda: "the last load has failed" in index(repository)["one"][1])
        assert repository.state is ModelState.READY
        shutil.copy2(old, file)  # with the time that it had
        until(lambda: index(repository) == {"one": ("READY", "")})
        assert not repository.errors
        assert repository.find("one") is served  # nothing was loaded


@pytest.mark.parametrize("content", ["nonsense (", 'backend: "nobody"', 'backend: "onnxruntime"'])
@pytest.mark.parametrize("stage", ["tokenizer", "logits", "decoder"])
def test_a_text_model_outlives_a_broken_config_of_a_stage(
    tiny_repository: Path, tmp_path: Path, stage: str, content: str
) -> None:
    root = shutil.copytree(tiny_repository, tmp_path / "models")
    file = root / f"tiny_{stage}" / "config.pbtxt"
    old = shutil.copy2(file, tmp_path / "old")
    with opened(root, mode=ControlMode.POLL, poll_s=3600) as repository:
        served = repository.text_model("tiny")
        for is_broken in (True, False):
            if is_broken:
                file.write_text(content)
            else:
                shutil.copy2(old, file)
            assert repository.lifecycle.follow_folders()
            repository.lifecycle.follow_folders()
            assert ("the last load has failed" in index(repository)["tiny"][1]) is is_broken
            assert repository.state is ModelState.READY
            assert repository.text_model("tiny") is served
        assert not repository.errors


def test_polling_unloads_what_another_scan_has_missed_first(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "models", "one")
    write_model(tmp_path / "models", "two")
    with opened(tmp_path / "models", mode=ControlMode.POLL, poll_s=0.2) as repository:
        shutil.rmtree(folder)
        repository.lifecycle.scan_folders()  # as a copy of a model does
        until(lambda: not repository.is_ready("one"))
        assert repository.is_ready("two")


COUNTED = """
import pathlib
class TritonPythonModel:
    def initialize(self, args):
        with pathlib.Path(args["model_repository"]).parent.parent.joinpath("loads").open("a") as file:
            file.write(args["model_version"])
    def execute(self, requests):
        return []
"""
KEEP_TWO = CONFIG + "version_policy { latest { num_versions: 2 } }"


@pytest.mark.parametrize("mode", [ControlMode.EXPLICIT, ControlMode.POLL])
def test_a_version_that_comes_goes_or_changes_leaves_the_others_alone(
    tmp_path: Path, mode: ControlMode
) -> None:
    root, loads = tmp_path / "models", tmp_path / "loads"
    loads.touch()

    def follow(*versions: int, loaded: str) -> None:
        """Load the model, and compare what answers with these versions, and with those that were loaded."""
        if mode is ControlMode.EXPLICIT:
            repository.load("one")
        until(lambda: (repository.versions("one"), loads.read_text()) == ([*versions], loaded))
        loads.write_text("")

    folder = write_model(root, "one", code=COUNTED, config=KEEP_TWO)
    with opened(root, "one", mode=mode, poll_s=0.02) as repository:
        follow(1, loaded="1")
        first = repository.find("one", 1)
        write_model(root, "one", version=2, code=COUNTED, config=KEEP_TWO)
        follow(1, 2, loaded="2")
        write_model(root, "one", version=2, code=COUNTED + "# new", config=KEEP_TWO)
        follow(1, 2, loaded="2")
        shutil.rmtree(folder / "2")
        follow(1, loaded="")
        write_model(root, "one", version=2, code=COUNTED, config=KEEP_TWO)
        follow(1, 2, loaded="2")
        assert repository.find("one", 1) is first
        second = repository.find("one", 2)
        write_model(root, "one", version=3, code=COUNTED, config=KEEP_TWO)
        follow(2, 3, loaded="3")
        (folder / "config.pbtxt").write_text(KEEP_TWO.replace("latest { num_versions: 2 }", "all { }"))
        follow(1, 2, 3, loaded="1")  # as in Triton, the policy is no reason to load a version again
        assert repository.find("one", 2) is second
        assert second.config.message.version_policy.HasField("all")
        (folder / "config.pbtxt").write_text(KEEP_TWO + 'parameters { key: "a" value { string_value: "b" } }')
        follow(2, 3, loaded="23")
        (folder / "labels.txt").write_text("a")
        follow(2, 3, loaded="23")


def test_a_version_that_fails_leaves_the_others_alone(tmp_path: Path) -> None:
    write_model(tmp_path, "one", config=KEEP_TWO)
    with opened(tmp_path, "one") as repository:
        first = repository.find("one", 1)
        write_model(tmp_path, "one", version=2, code="raise ValueError('no weights')", config=KEEP_TWO)
        with pytest.raises(InferenceError, match="version 2 is at UNAVAILABLE state"):
            repository.load("one")
        assert repository.find("one") is first
        assert value(ask(repository, "one", X=[1])) == [2]


def test_the_index_has_the_reason_of_a_failed_load(tmp_path: Path) -> None:
    code = """
        class TritonPythonModel:
            def initialize(self, args):
                raise ValueError("no weights")
    """
    write_model(tmp_path, "one", code=code)
    with opened(tmp_path) as repository:
        with pytest.raises(InferenceError, match="no weights"):
            repository.load("one")
        state, reason = index(repository)["one"]
        assert state == "UNAVAILABLE"
        assert reason.startswith("Internal: ValueError: no weights")


def test_the_index_shows_which_of_several_versions_failed(tmp_path: Path) -> None:
    config = CONFIG + "version_policy { all { } }"
    write_model(tmp_path, "one", version=1, config=config, code="raise ValueError('no')")
    write_model(tmp_path, "one", version=2, config=config)
    with opened(tmp_path) as repository:
        with pytest.raises(InferenceError, match="version 1 is at UNAVAILABLE state: Internal: ValueError"):
            repository.load("one")
        first, second = repository.index()
        assert (first.version, first.reason.splitlines()[0]) == (1, "Internal: ValueError: no")
        assert (second.version, second.state, second.reason) == (2, "UNAVAILABLE", "unloaded")


def test_a_model_in_two_repositories_is_rejected_in_tritons_words(tmp_path: Path) -> None:
    roots = [tmp_path / "first", tmp_path / "second"]
    for root in roots:
        write_model(root, "one")
    write_model(roots[1], "two")
    repository = Repository(roots, options=RepositoryOptions(control_mode=ControlMode.EXPLICIT))
    try:
        repository.start(["one", "two"])
        assert index(repository)["one"] == ("UNAVAILABLE", "model appears in two or more repositories")
        assert index(repository)["two"][0] == "READY"
        with pytest.raises(InferenceError, match="not unique across all model repositories"):
            repository.load("one")
        assert index(repository)["one"] == ("UNAVAILABLE", "model appears in two or more repositories")
    finally:
        repository.close()


def test_an_invalid_config_gives_the_model_no_version(tmp_path: Path) -> None:
    write_model(tmp_path, "one", config=CONFIG + "max_batch_sise: 4")
    with opened(tmp_path) as repository:
        with pytest.raises(InferenceError, match="failed to load 'one', failed to poll") as caught:
            repository.load("one")
        assert caught.value.status is Status.INTERNAL
        assert "config.pbtxt:" in caught.value.remedy
        [entry] = repository.index()
        assert (entry.version, entry.state) == (None, "UNAVAILABLE")
        assert "config.pbtxt:" in entry.reason
        with pytest.raises(InferenceError, match="'one' is not found"):
            repository.find("one")


@pytest.mark.parametrize(
    ("config", "file", "reason"),
    [
        (CONFIG, "1/model.py", "Unavailable: model.py is missing"),
        (CONFIG + 'default_model_filename: "m.zip"', "1/m.zip", "Unavailable: m.zip is missing"),
    ],
)
def test_a_missing_file_has_tritons_status(tmp_path: Path, config: str, file: str, reason: str) -> None:
    folder = write_model(tmp_path, "one", config=config)
    (folder / file).unlink(missing_ok=True)
    with opened(tmp_path) as repository:
        with pytest.raises(InferenceError):
            repository.load("one")
        assert index(repository)["one"][1].startswith(reason)
        with pytest.raises(InferenceError, match="'one' version 1 is not at ready state") as caught:
            repository.find("one", 1)
        assert caught.value.status is Status.UNAVAILABLE


def test_an_onnx_file_that_cannot_be_read_is_an_internal_error(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    folder = write_model(tmp_path, "one", config=CONFIG.replace("python", "onnxruntime"))
    (folder / "1" / "model.onnx").write_bytes(b"none")
    with opened(tmp_path) as repository:
        with pytest.raises(InferenceError):
            repository.load("one")
        assert index(repository)["one"][1].startswith("Internal: onnx runtime error")


def test_polling_follows_changes_in_the_steps_of_an_ensemble(nested: Path) -> None:
    write_model(nested, "both", config=ENSEMBLE.replace('"two"', '"late"'))
    with opened(nested, mode=ControlMode.POLL, poll_s=0.02) as repository:
        assert "both contains models that are not available" in str(repository.errors["both"])
        write_model(nested, "late", number=5)
        until(lambda: not repository.errors)
        assert value(ask(repository, "both", X=[1])) == [7]
        write_model(nested, "late", config=CONFIG.replace("TYPE_FP32", "TYPE_INT32"))
        until(lambda: "inconsistent data type" in str(repository.errors.get("both")))


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ('"two"', '"nowhere"', "ensemble both contains models that are not available or ambiguous: nowhere"),
        (
            '"Y" data_type: TYPE_FP32',
            '"Y" data_type: TYPE_INT32',
            "in ensemble both, ensemble tensor Y: inconsistent data type: TYPE_INT32 is inferred from model "
            "both while TYPE_FP32 is inferred from model two",
        ),
        ('"two"', '"outer"', "circular dependency between ensembles: both -> ... -> outer -> both"),
    ],
)
def test_an_ensemble_that_does_not_fit_its_steps_is_rejected_and_the_old_one_stays(
    nested: Path, old: str, new: str, why: str
) -> None:
    with opened(nested, "both") as repository:
        write_model(nested, "both", config=ENSEMBLE.replace(old, new))
        with pytest.raises(InferenceError) as caught:
            repository.load("both")
        assert caught.value.message == f"load failed for model 'both': {why}\n"
        assert caught.value.status is Status.INVALID_ARG
        assert "config.pbtxt:" in caught.value.remedy
        assert value(ask(repository, "both", X=[1])) == [12]


def test_an_unloaded_model_is_freed_even_in_a_reference_cycle(tmp_path: Path) -> None:
    code = (
        "import sys, weakref\n"
        "class TritonPythonModel:\n"
        "    def initialize(self, args):\n"
        "        self.me = self\n"
        "        sys.modules['genserve'].seen_by_a_test = weakref.ref(self)\n"
        "    def execute(self, requests):\n"
        "        return []\n"
    )
    write_model(tmp_path, "one", code=code)
    with opened(tmp_path, "one") as repository:
        model = vars(genserve).pop("seen_by_a_test")
        assert model() is not None
        gc.disable()  # so that nobody else finds it
        try:
            repository.unload("one")
            until(lambda: index(repository)["one"] == ("UNAVAILABLE", "unloaded"))
        finally:
            gc.enable()
        assert model() is None


def test_a_version_replaced_by_a_later_one_is_unloaded(tmp_path: Path) -> None:
    write_model(tmp_path, "one", number=1)
    with opened(tmp_path, "one") as repository:
        write_model(tmp_path, "one", number=2, version=2)
        repository.load("one")

        def lines() -> list[tuple[int | None, str | None]]:
            return [(entry.version, entry.state) for entry in repository.index()]

        until(lambda: lines() == [(1, "UNAVAILABLE"), (2, "READY")])


CALLS = """
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        def execute(self, requests):
            [request] = requests
            call = pb_utils.InferenceRequest(
                model_name="two", requested_output_names=["Y"], inputs=request.inputs()
            )
            answer = call.exec()
            return [pb_utils.InferenceResponse(answer.output_tensors(), answer.error())]
"""
LIMITED = "instance_group { count: %d kind: KIND_CPU rate_limiter { resources { name: 'r' count: 1 } } }"


@pytest.mark.parametrize("count", [1, 2])
def test_a_call_to_a_model_that_needs_a_resource_of_the_caller_fails(tmp_path: Path, count: int) -> None:
    write_model(tmp_path, "one", code=CALLS, config=CONFIG + LIMITED % 1)
    write_model(tmp_path, "two", config=CONFIG + LIMITED % count)
    with opened(tmp_path, "one", "two", rate_limiter=True) as repository:
        with pytest.raises(InferenceError, match="'two'") as caught:
            value(ask(repository, "one", X=[1]))
        assert caught.value.status is Status.UNAVAILABLE
        assert value(ask(repository, "two", X=[1])) == [2]
    capacities = (ResourceCapacity(name="r", count=2),)
    with opened(tmp_path, "one", "two", rate_limiter=True, resources=capacities) as repository:
        assert value(ask(repository, "one", X=[1])) == [2]


def test_no_request_is_lost_while_a_model_is_reloaded_under_load(tmp_path: Path) -> None:
    write_model(tmp_path, "one", number=0)
    failures: list[BaseException] = []
    seen: set[float] = set()
    done = threading.Event()

    def ask_on(repository: Repository) -> None:
        while not done.is_set():
            try:
                seen.add(value(ask(repository, "one", X=[0]))[0])
            except BaseException as error:
                failures.append(error)

    with opened(tmp_path, "one") as repository:
        threads = [threading.Thread(target=ask_on, args=(repository,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for number in range(1, 6):
            write_model(tmp_path, "one", number=number)
            repository.load("one")
            until(lambda: number in seen)  # noqa: B023 - called before the next round
        done.set()
        for thread in threads:
            thread.join()
    assert failures == []
    assert seen == {0, 1, 2, 3, 4, 5}


def test_polling_follows_changes_on_disk(tmp_path: Path) -> None:
    write_model(tmp_path, "one", number=1)
    with opened(tmp_path, mode=ControlMode.POLL, poll_s=0.02) as repository:
        assert value(ask(repository, "one", X=[1])) == [2]
        write_model(tmp_path, "one", number=7)
        until(lambda: value(ask(repository, "one", X=[1])) == [8])
        write_model(tmp_path, "two", number=3)
        until(lambda: repository.is_ready("two"))
        (tmp_path / "two" / "1" / "model.py").unlink()
        (tmp_path / "two" / "config.pbtxt").unlink()
        (tmp_path / "two" / "1").rmdir()
        (tmp_path / "two").rmdir()
        until(lambda: not repository.is_ready("two"))
        with pytest.raises(InferenceError, match="is not allowed if polling is enabled"):
            repository.load("one")


@pytest.mark.parametrize(
    ("policy", "ready"),
    [
        ("", [3]),
        ("version_policy { latest { num_versions: 2 } }", [2, 3]),
        ("version_policy { all {} }", [1, 2, 3]),
        ("version_policy { specific { versions: [1, 3] } }", [1, 3]),
    ],
)
def test_the_version_policy_selects_the_versions(tmp_path: Path, policy: str, ready: list[int]) -> None:
    for version in (1, 2, 3):
        write_model(tmp_path, "one", number=version, version=version, config=CONFIG + policy)
    with opened(tmp_path, "one") as repository:
        assert repository.versions("one") == ready
        assert value(ask(repository, "one", X=[0])) == [3]
        for version in ready:
            assert value(ask(repository, "one", version=version, X=[0])) == [version]
        with pytest.raises(InferenceError, match="version 9 is not found"):
            ask(repository, "one", version=9, X=[0])


@pytest.fixture
def nested(tmp_path: Path) -> Path:
    root = tmp_path / "models"
    write_model(root, "one", number=1)
    write_model(root, "two", number=10)
    for name, config in {"both": ENSEMBLE, "outer": OUTER}.items():
        (root / name / "1").mkdir(parents=True)
        (root / name / "config.pbtxt").write_text(config)
    return root


def test_an_ensemble_loads_its_models(nested: Path) -> None:
    with opened(nested, "both") as repository:
        assert value(ask(repository, "both", X=[1])) == [12]
        repository.load("two")
        repository.unload("both", dependents=True)
        # "two" was asked for by itself, "one" only as a step.
        until(lambda: [index(repository)[name][0] for name in ("both", "one")] == ["UNAVAILABLE"] * 2)
        assert index(repository)["two"] == ("READY", "")


def test_an_ensemble_is_unloaded_while_a_model_of_its_steps_is(nested: Path) -> None:
    with opened(nested, "outer") as repository:
        assert value(ask(repository, "outer", X=[1])) == [12]
        repository.unload("two")
        assert not repository.is_ready("both")
        away = dict.fromkeys(("two", "both", "outer"), ("UNAVAILABLE", "unloaded"))
        until(lambda: index(repository) == {"one": ("READY", ""), **away})
        assert repository.state is ModelState.READY  # all remaining models are ready
        for name in away:
            with pytest.raises(InferenceError, match=f"model: '{name}' has no available versions"):
                ask(repository, name, X=[1])
        repository.load("two")
        assert set(index(repository).values()) == {("READY", "")}
        assert value(ask(repository, "outer", X=[1])) == [12]


def test_an_unloaded_ensemble_does_not_return_with_a_step(nested: Path) -> None:
    with opened(nested, "outer") as repository:
        repository.unload("both")
        repository.unload("two")
        repository.load("two")
        until(lambda: [index(repository)[name][0] for name in ("both", "outer")] == ["UNAVAILABLE"] * 2)
        repository.load("both")
        assert value(ask(repository, "outer", X=[1])) == [12]


def test_loading_an_ensemble_loads_an_unloaded_step(nested: Path) -> None:
    with opened(nested, "both") as repository:
        repository.unload("one")
        repository.load("both")
        assert value(ask(repository, "both", X=[1])) == [12]


def test_an_ensemble_waits_for_a_missing_step_and_gives_the_reason(nested: Path) -> None:
    write_model(nested, "one", code="raise ValueError('no')")
    with opened(nested) as repository:
        repository.start([])
        with pytest.raises(InferenceError) as failure:
            repository.load("outer")
        assert failure.value.message.startswith(
            "load failed for model 'outer': ensemble 'outer' depends on 'both' which is not valid. "
            "Model 'both' failed with error: ensemble 'both' depends on 'one' which has no loaded version. "
            "Model 'one' loading failed with error: version 1 is at UNAVAILABLE state: Internal: "
            "ValueError: no"
        )
        assert index(repository)["two"] == ("READY", "")  # the others are loaded all the same
        state, reason = index(repository)["both"]
        assert state == "UNAVAILABLE"
        assert "depends on 'one' which has no loaded version" in reason
        assert repository.state is ModelState.UNAVAILABLE
        write_model(nested, "one", number=1)
        repository.load("one")
        assert value(ask(repository, "outer", X=[1])) == [12]
        assert repository.state is ModelState.READY


def test_an_ensemble_names_the_step_with_an_invalid_config(nested: Path) -> None:
    write_model(nested, "one", config="nonsense: 3")
    with opened(nested) as repository, pytest.raises(InferenceError) as failure:
        repository.load("both")
    assert failure.value.message == (
        "load failed for model 'both': "
        "ensemble both contains models that are not available or ambiguous: one\n"
    )
    assert "nonsense" in failure.value.remedy


def test_an_ensemble_is_unloaded_and_loaded_with_the_folder_of_a_step(nested: Path, tmp_path: Path) -> None:
    with opened(nested, mode=ControlMode.POLL, poll_s=0.02) as repository:
        assert repository.is_ready("outer")
        (nested / "one").rename(tmp_path / "elsewhere")
        until(lambda: not repository.is_ready("outer"))
        (tmp_path / "elsewhere").rename(nested / "one")
        until(lambda: repository.is_ready("outer"))
        assert value(ask(repository, "outer", X=[1])) == [12]


def test_unknown_models_have_tritons_message(tmp_path: Path) -> None:
    with opened(tmp_path) as repository:
        with pytest.raises(InferenceError, match="failed to load 'zzz', failed to poll") as caught:
            repository.load("zzz")
        assert caught.value.status is Status.INTERNAL
        repository.unload("zzz")


def test_the_response_cache_answers_without_the_model(tmp_path: Path) -> None:
    write_model(tmp_path, "one", config=CONFIG + "response_cache { enable: true }")
    with opened(tmp_path, "one", cache_bytes=2**20) as repository:
        assert [value(ask(repository, "one", X=[n])) for n in (1, 1, 2, 1)] == [[2], [2], [3], [2]]
        statistics = repository.find("one").statistics
        assert (statistics.cache_hit.count, statistics.cache_miss.count) == (2, 2)
        assert statistics.success.count == 4
        assert (statistics.inference_count, statistics.execution_count) == (2, 2)


def test_the_state_is_the_worst_of_all_models(tmp_path: Path) -> None:
    write_model(tmp_path, "one")
    write_model(tmp_path, "bad", code="raise ValueError")
    with opened(tmp_path, mode=ControlMode.NONE) as repository:
        assert repository.state is ModelState.UNAVAILABLE
        assert set(repository.errors) == {"bad"}
        assert value(ask(repository, "one", X=[1])) == [2]


def test_a_cached_response_comes_from_the_loaded_code(tmp_path: Path) -> None:
    write_model(tmp_path, "one", number=1, config=CONFIG + "response_cache { enable: true }")
    with opened(tmp_path, "one", cache_bytes=2**20) as repository:
        assert value(ask(repository, "one", X=[1])) == [2]
        write_model(tmp_path, "one", number=5, config=CONFIG + "response_cache { enable: true }")
        repository.load("one")
        assert value(ask(repository, "one", X=[1])) == [6]


def test_a_replaced_version_is_not_ready_in_the_index(tmp_path: Path) -> None:
    write_model(tmp_path, "one", version=1)
    with opened(tmp_path, "one") as repository:
        write_model(tmp_path, "one", version=2)
        repository.load("one")
        assert repository.versions("one") == [2]
        until(
            lambda: (
                [(line.version, line.state) for line in repository.index()]
                == [(1, "UNAVAILABLE"), (2, "READY")]
            )
        )


WAITS = """
    import threading
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        def execute(self, requests):
            for request in requests:
                while not request.is_cancelled():
                    threading.Event().wait(0.01)
            return [pb_utils.InferenceResponse([]) for _ in requests]
"""


def test_a_load_before_the_unload_has_ended_leaves_the_model_ready(tmp_path: Path) -> None:
    write_model(tmp_path, "one", code=WAITS)
    with opened(tmp_path, "one") as repository:
        ended = threading.Event()
        request = InferenceRequest(model_name="one", inputs={"X": Tensor("X", np.ones(1, np.float32))})
        inference = Inference(request=request, on_response=lambda response, final: ended.set())
        repository.submit(inference)
        repository.unload("one")
        assert index(repository)["one"][0] == "UNLOADING"
        write_model(tmp_path, "one", number=3)
        repository.load("one")
        inference.cancel()
        assert ended.wait(30)
        until(lambda: not [t for t in threading.enumerate() if t.name == "unload-one"])
        assert index(repository)["one"][0] == "READY"
        assert value(ask(repository, "one", X=[1])) == [4]


def test_a_label_file_that_is_missing_leaves_classes_without_labels(tmp_path: Path) -> None:
    write_model(tmp_path, "one", config=CONFIG.replace('name: "Y"', 'name: "Y" label_filename: "l.txt"'))
    with opened(tmp_path, "one") as repository:
        assert repository.find("one").labels == {}
        assert value(ask(repository, "one", X=[1])) == [2]


def test_a_removed_broken_model_is_no_error_and_may_return(tmp_path: Path) -> None:
    write_model(tmp_path, "one")
    broken = write_model(tmp_path, "bad", code="raise ValueError")
    with opened(tmp_path, mode=ControlMode.POLL, poll_s=0.02) as repository:
        assert repository.state is ModelState.UNAVAILABLE
        broken.rename(tmp_path / ".away")
        until(lambda: repository.state is ModelState.READY)
        write_model(tmp_path / ".away" / "..", ".away", number=3)
        (tmp_path / ".away").rename(broken)
        until(lambda: repository.is_ready("bad"))


def test_with_strict_paths_a_model_with_links_outside_is_not_loaded(
    tmp_path: Path,
) -> None:
    write_model(tmp_path / "elsewhere", "away", number=5)
    root = tmp_path / "models"
    write_model(root, "one", number=1)
    (root / "away").symlink_to(tmp_path / "elsewhere" / "away")
    with opened(root, "one", strict_paths=True) as repository:
        with pytest.raises(InferenceError, match="failed to load 'away'") as caught:
            repository.load("away")
        assert caught.value.remedy.startswith(f"{root}/away: ")
        (root / "one" / "1" / "model.py").unlink()
        (root / "one" / "1" / "model.py").symlink_to(tmp_path / "elsewhere" / "away" / "1" / "model.py")
        with pytest.raises(InferenceError, match="failed to load 'one'"):
            repository.load("one")
        assert value(ask(repository, "one", X=[1])) == [2.0]
    with opened(root, "one", "away") as repository:
        assert value(ask(repository, "one", X=[1])) == value(ask(repository, "away", X=[1])) == [6.0]


def test_with_strict_paths_polling_loads_no_model_with_links_outside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_model(tmp_path / "elsewhere", "away")
    root = tmp_path / "models"
    write_model(root, "one")
    with opened(root, mode=ControlMode.POLL, poll_s=0.02, strict_paths=True) as repository:
        (root / "away").symlink_to(tmp_path / "elsewhere" / "away")
        until(lambda: "away" in repository.errors and "leads out" in caplog.text)
        assert repository.versions("away") == []
        assert repository.versions("one") == [1]


def test_a_model_file_may_be_in_a_subfolder_of_its_version(tmp_path: Path) -> None:
    folder = write_model(tmp_path, "one", config=CONFIG + 'default_model_filename: "code/main.py"') / "1"
    (folder / "code").mkdir()
    text = (folder / "model.py").read_text().replace("x + 1", "x + beside.ONE + above.TWO")
    (folder / "code" / "main.py").write_text(f"import above\nimport beside\n{text}")
    (folder / "code" / "beside.py").write_text("ONE = 1")
    (folder / "above.py").write_text("TWO = 2")
    (folder / "model.py").unlink()
    with opened(tmp_path, "one") as repository:
        assert value(ask(repository, "one", X=[1])) == [4.0]
