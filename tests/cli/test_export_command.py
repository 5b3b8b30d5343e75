from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from genserve.cli.export_command import print_report
from genserve.errors import ExportError
from genserve.export import ExportReport
from genserve.store import default_repository
from tests.support.command_line import invoke
from tests.support.tiny_llama import tiny_llama_checkpoint

ROOT = Path(__file__).parents[2]


def report(repository: Path) -> ExportReport:
    return ExportReport(
        name="mine",
        precision="int8",
        seconds=12.3,
        largest_logit_difference=0.3125,
        top1_agreement=0.984,
        perplexity_ratio=1.0061,
        divergence=0.004,
        size_bytes=141_000_000,
        path=repository / "mine",
    )


def test_a_report_has_the_parity_and_the_next_commands(capsys: pytest.CaptureFixture[str]) -> None:
    store = default_repository()
    print_report(report(store), beside=None)
    assert capsys.readouterr().out.splitlines() == [
        f"mine: int8, 141.0 MB, exported in 12 s: {store}/mine",
        "parity with the source: largest logit difference 0.312, top-1 agreement 98.4%, perplexity x1.006, "
        "KL 0.0040",
        "next: genserve chat mine",
        "      genserve serve",
    ]


def test_the_next_commands_name_another_repository(capsys: pytest.CaptureFixture[str]) -> None:
    print_report(report(Path("/elsewhere")), beside=None)
    assert "genserve serve --model-repository /elsewhere" in capsys.readouterr().out


def test_a_checkpoint_becomes_a_model_that_answers(tmp_path: Path) -> None:
    checkpoint = tiny_llama_checkpoint(tmp_path / "checkpoint")
    repository = str(tmp_path / "repository")
    where = ["--name", "tiny", "--model-repository", repository]
    exported = invoke(["export", str(checkpoint), *where, "--precision", "fp32"])
    assert exported.exit_code == 0
    assert "top-1 agreement 100.0%" in exported.stdout
    answer = ["generate", "Tea", "--model-repository", repository, "--max-tokens", "4", "--json"]
    assert '"completion_tokens":4' in invoke(answer).stdout


def test_the_script_is_the_command(tmp_path: Path) -> None:
    script = [sys.executable, "scripts/export_onnx.py", "x", "--name", "../evil"]
    ended = subprocess.run(
        [*script, "--model-repository", tmp_path], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert ended.returncode == 1
    assert ended.stderr.startswith("error[export_error]: '../evil' cannot be the name of a model")


def test_an_export_of_an_invalid_source_is_an_error(tmp_path: Path) -> None:
    where = ["--name", "../evil", "--model-repository", str(tmp_path)]
    result = invoke(["export", "x", *where])
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error[{ExportError.code}]")


def test_a_folder_without_a_config_is_an_error_before_packages_are_asked_for(tmp_path: Path) -> None:
    result = invoke(["export", str(tmp_path), "--model-repository", str(tmp_path / "repository")])
    assert "is not a checkpoint: there is no config.json in the folder" in result.error
    assert "loading torch" not in result.stderr


def test_the_next_command_for_an_additional_graph_is_tune(capsys: pytest.CaptureFixture[str]) -> None:
    print_report(report(Path("model_repository")), beside="int4")
    assert "next: genserve tune mine" in capsys.readouterr().out


def test_pulling_an_unknown_name_is_an_error(tmp_path: Path) -> None:
    result = invoke(["pull", "nonsense", "--model-repository", str(tmp_path)])
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error[{ExportError.code}]")


def test_an_unknown_precision_is_wrong_usage(tmp_path: Path) -> None:
    result = invoke(["pull", "smollm2", "--precision", "int3"])
    assert result.exit_code == 2
    assert "int3" in result.stderr


def test_the_name_is_by_default_that_of_the_source(tmp_path: Path) -> None:
    checkpoint = tiny_llama_checkpoint(tmp_path / "My-Checkpoint")
    flags = ["--model-repository", str(tmp_path / "repository"), "--precision", "fp32"]
    assert invoke(["export", f"{checkpoint}/", *flags]).exit_code == 0
    assert (tmp_path / "repository" / "my-checkpoint" / "config.pbtxt").exists()
