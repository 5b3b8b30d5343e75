from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from genserve.errors import MissingDependency, RepositoryError
from genserve.export import SilentProgress, export_model
from genserve.llm import LLM
from genserve.repository.index import scan
from genserve.tuning.measured_steps import read_measured_engine
from genserve.tuning.measurement import Samples
from tests.support.command_line import Ended, check_error, invoke

CORES = str(len(os.sched_getaffinity(0)))
QUICK = ("--budget-seconds", "0", "--context", "8", "--max-inter-token-ms", "10000")


@pytest.fixture
def repository(tiny_repository: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_repository, tmp_path / "models")


def tune(repository: Path, *flags: str) -> Ended:
    flags = ("tune", "--model-repository", str(repository), *QUICK, *flags)
    return invoke(flags)


def test_the_best_setting_is_printed_and_written(repository: Path) -> None:
    # Other tests may run at the same time.
    flags = ("--batch-size", "1", "--batch-size", "2", "--threads", CORES, "--allow-busy")
    ran = tune(repository, *flags)
    assert ran.exit_code == 0
    rows = re.findall(rf"^model\.onnx +100\.0% +{CORES} +(\d+) .*", ran.stdout, re.MULTILINE)
    assert rows == ["1", "2", "32"]
    [best] = re.findall(rf"^best: batch (\d+), threads {CORES}, model\.onnx: ", ran.stdout, re.MULTILINE)
    entries = scan([repository])
    assert {entry.config.max_batch_size for entry in entries.values() if entry.config} == {int(best)}
    with LLM(model_repository=repository) as llm:
        assert llm.generate("Tea", max_tokens=3).usage.completion_tokens == 3


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_what_other_programs_disturbed_is_not_written(
    repository: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...]
) -> None:
    monkeypatch.setattr(Samples, "stolen_share", 0.74)
    before = {path: path.read_bytes() for path in repository.rglob("*.pbtxt")}
    ran = tune(repository, "--max-inter-token-ms", "0", "--batch-size", "1", *flags)
    assert ran.exit_code == 1
    if flags:
        assert json.loads(ran.stdout)["is_written"] is False
    else:
        assert "other programs used 74% of the time: tune again without them" in ran.stdout
        assert ran.stdout.endswith("--allow-busy writes it\n")
    assert {path: path.read_bytes() for path in repository.rglob("*.pbtxt")} == before


def test_a_dry_run_prints_the_changes_and_writes_nothing(repository: Path) -> None:
    before = {path: path.read_bytes() for path in repository.rglob("*.pbtxt")}
    # Nothing is within the bound, so the smallest batch is the nearest, or nearly so.
    flags = ("--max-inter-token-ms", "0", "--dry-run", "--batch-size", "1")
    ran = tune(repository, *flags)
    assert "no setting keeps 0 ms between tokens" in ran.stdout
    assert "-max_batch_size: 32\n+max_batch_size: 1\n" in ran.stdout
    assert ran.stdout.endswith("nothing was written: --dry-run\n")
    assert {path: path.read_bytes() for path in repository.rglob("*.pbtxt")} == before


def test_json_is_one_document_with_the_measurements_and_the_changes(repository: Path) -> None:
    flags = ("--max-inter-token-ms", "0", "--dry-run", "--batch-size", "1", "--json")
    document = json.loads(tune(repository, *flags).stdout)
    assert document["model"] == "tiny"
    assert (document["meets_max_inter_token_ms"], document["is_written"]) == (False, False)
    [best] = [each for each in document["measurements"] if each["is_best"]]
    assert (best["graph"], best["batch_size"], best["top1_agreement"]) == ("model.onnx", 1, 1.0)
    assert best["tokens_per_s"] > 0
    assert [each["context"] for each in best["step_ms"]] == [8]
    paths = {Path(change["path"]) for change in document["changes"]}
    assert paths == {*repository.glob("*/config.pbtxt")}
    assert "-max_batch_size: 32\n+max_batch_size: 1\n" in document["changes"][0]["diff"]


def test_configs_with_the_best_setting_stay_unchanged(repository: Path) -> None:
    for path in repository.rglob("*.pbtxt"):
        path.write_text(path.read_text().replace(": 32", ": 1"))
    ran = tune(repository, "tiny", "--batch-size", "1", "--threads", CORES)
    assert ran.stdout.endswith("the configs already have this setting\n")


def test_a_graph_that_disagrees_with_its_source_is_measured_and_not_chosen(repository: Path) -> None:
    version = repository / "tiny_logits" / "1"
    for name, agreement in (("poor", 0.7), ("good", 0.95)):
        (version / name).mkdir()
        for file in ("model.onnx", "model.onnx.data"):
            shutil.copy(version / file, version / name)
        (version / name / "parity.json").write_text(json.dumps({"top1_agreement": agreement}))
    for least, chosen in (("0.99", {"model.onnx"}), ("0.9", {"model.onnx", "good/model.onnx"})):
        flags = ("--batch-size", "1", "--threads", CORES, "--min-top1-agreement", least, "--dry-run")
        ran = tune(repository, *flags)
        rows = re.findall(rf"^(\S+/model\.onnx +\d.*?%) +{CORES} +1 ", ran.stdout, re.MULTILINE)
        assert [row.split() for row in rows] == [["good/model.onnx", "95.0%"], ["poor/model.onnx", "70.0%"]]
        [best] = re.findall(r"^best: .*, (\S+): ", ran.stdout, re.MULTILINE)
        assert best in chosen


def test_graphs_without_a_common_context_are_rejected(tiny_checkpoint: Path, repository: Path) -> None:
    export_model(
        str(tiny_checkpoint),
        repository=repository,
        name="tiny",
        precision="fp16",
        beside="half",
        progress=SilentProgress(),
    )
    config = repository / "tiny_logits" / "config.pbtxt"
    small = 'parameters [ { key: "kv_cache_bytes" value: { string_value: "64KiB" } } ]\n'
    config.write_text(small + config.read_text())
    ran = tune(repository, "--context", "200", "--batch-size", "1", "--threads", CORES)
    check_error(ran, RepositoryError, "'tiny_logits' has room in its KV cache for .*kv_cache_bytes")


def test_a_plot_is_drawn(repository: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    ran = tune(repository, "--batch-size", "1", "--allow-busy", "--plot", str(tmp_path / "tune.png"))
    assert ran.exit_code == 0
    assert (tmp_path / "tune.png").stat().st_size > 10_000


def test_the_remedy_for_a_missing_matplotlib_is_pip_install(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    ran = tune(repository, "--plot", str(tmp_path / "tune.png"))
    check_error(ran, MissingDependency, r"pip install 'genserve\[plot\]'")


def test_ctrl_c_prints_the_measurements_and_writes_nothing(repository: Path) -> None:
    before = {path: path.read_bytes() for path in repository.rglob("*.pbtxt")}
    command = ["tune", "--model-repository", str(repository), *QUICK, "--budget-seconds", "100000"]
    with subprocess.Popen(
        [sys.executable, "-m", "genserve", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        assert "measuring tiny_logits" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        stdout, _ = process.communicate(timeout=60)
    assert stdout.endswith("interrupted: nothing was written\n")
    assert process.returncode == 130
    assert {path: path.read_bytes() for path in repository.rglob("*.pbtxt")} == before


@pytest.mark.extended    # also on a server
def test_step_times_are_written_for_the_planner(repository: Path, tmp_path: Path) -> None:
    file = tmp_path / "steps.json"
    ran = tune(repository, "--batch-size", "1", "--threads", CORES, "--dry-run", "--step-times", str(file))
    assert ran.exit_code == 0
    engine = read_measured_engine(file)
    assert (engine.model, engine.limits.max_num_seqs) == ("tiny", 32)
    assert len(engine.steps) > 30
    assert engine.serving.request_s > 0     # measured on a server, which has ended
    assert min(engine.serving.step_s, engine.serving.token_s) >= 0
