"""The benchmark commands print tables and write figures."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from tests.support.tiny_llama import tiny_llama_checkpoint

pytestmark = pytest.mark.extended
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
METHODS = [
    *("greedy", "temperature", "top_k", "top_p", "top_k, top_p", "min_p", "typical_p"),
    *("epsilon_cutoff", "eta_cutoff", "top_n_sigma", "repetition_penalty", "three penalties"),
    *("no_repeat_ngram_size", "logit_bias", "logprobs", "top_logprobs", "processed"),
]


def run(script: str, *flags: str, report: Path, codes: tuple[int, ...] = (0,)) -> tuple[str, Any]:
    command = [sys.executable, str(BENCHMARKS / script), *flags, f"--json={report}"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode in codes, done.stderr
    return done.stdout, json.loads(report.read_text())


def test_the_server_is_compared_with_the_bare_forward_and_a_peer(
    tiny_repository: Path, tmp_path: Path
) -> None:
    printed, report = run(
        "serving.py",
        f"--model-repository={tiny_repository}",
        "--model=tiny",
        f"--peer=engine:{sys.executable}:{tiny_repository}",
        *("--rounds=1", "--waves=1", "--new-tokens=4", "--concurrency", "2"),
        *("--prompt-words", "5", "--prefix-words", "20", "--seed=2"),
        report=tmp_path / "report.json",
    )
    serving, prefix = (table["rounds"] for table in report["tables"])
    assert list(serving) == ["genserve", f"engine {tiny_repository.name}", "bare forward"]
    assert list(prefix) == ["genserve", f"engine {tiny_repository.name}"]
    assert all(figures["tokens_per_s"] > 0 for [figures] in serving.values())
    assert all(figures["cold_ms"] > 0 for [figures] in prefix.values())
    assert printed.count("\n| genserve ") == 2


def test_each_method_is_compared_with_the_plain_one_and_with_steps(
    tiny_repository: Path, tmp_path: Path
) -> None:
    printed, report = run(
        "sampling.py",
        f"--model-repository={tiny_repository}",
        "--model=tiny",
        *("--rows", "1", "3", "--vocab-sizes", "320", "500"),
        *("--rounds=1", "--history=20", "--prompt-tokens=8"),
        report=tmp_path / "report.json",
    )
    assert set(report["steps"]) == set(METHODS)
    sizes = ["1 x 320", "3 x 320", "1 x 500", "3 x 500"]
    kinds = ("peaked", "flat")
    assert set(report["picks"]) == {
        f"{method} | {size} | {kind}" for method in METHODS for size in sizes for kind in kinds
    }
    assert all(pair["ours_us"] > 0 for [pair] in report["picks"].values())
    assert all(f" {size} |" in printed for size in sizes)


@pytest.mark.slow
def test_prompts_after_a_restart_are_compared(tiny_repository: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "prefix_restart.py"), f"--model-repository={tiny_repository}"]
    sizes = ["--tokens=200", "--cost-tokens=60", "--rounds=1", "--cost-rounds=1", "--model=tiny"]
    printed = subprocess.run([*command, *sizes], check=True, capture_output=True, text=True).stdout
    assert "\n| 200 " in printed
    assert printed.rstrip().endswith("% |")


def test_the_floor_of_every_size_is_printed(tiny_repository: Path, tmp_path: Path) -> None:
    printed, report = run(
        "floor.py",
        f"--model-repository={tiny_repository}",
        "--model=tiny",
        *("--rows", "1", "3", "--contexts", "8", "32", "--rounds=1", "--steps=3"),
        report=tmp_path / "report.json",
    )
    sizes = {"1 x 8", "1 x 32", "3 x 8", "3 x 32"}
    assert report["steps_s"].keys() == report["profiles_s"].keys() == sizes
    assert all(any("(head)" in kind for kind in profile) for profile in report["profiles_s"].values())
    assert all(f"| {size} " in printed for size in sizes)


def test_speculation_is_compared_with_plain_decoding(tiny_repository: Path, tmp_path: Path) -> None:
    printed, report = run(
        "speculation.py",
        f"--model-repository={tiny_repository}",
        "--model=tiny",
        *("--tasks", "story", "--concurrency", "1", "2", "--rounds=1", "--new-tokens=8"),
        report=tmp_path / "report.json",
    )
    assert list(report) == ["story, 1", "story, 2"]
    assert all(table["same"] for table in report.values())
    assert "| story, 2" in printed


def test_faults_lose_no_request_of_a_server(tiny_repository: Path, tmp_path: Path) -> None:
    printed, report = run(
        "faults.py",
        f"--model-repository={tiny_repository}",
        "--model=tiny",
        *("--only=mix", "--minutes=0.05", "--max-words=9"),
        report=tmp_path / "report.json",
        codes=(0, 1),   # 1: a promise about time, on a busy machine
    )
    figures = {figure["name"]: figure for figure in report["figures"]}
    assert figures["unexpected answers"]["details"] == []
    for name in ("requests lost", "requests ended twice", "unexpected answers", "leaked blocks"):
        assert figures[name]["holds"], figures[name]
    assert "| requests lost " in printed


@pytest.mark.slow
def test_an_overload_is_compared_with_the_capacity(tiny_repository: Path, tmp_path: Path) -> None:
    printed, report = run(
        "faults.py",
        f"--model-repository={tiny_repository}",
        "--model=tiny",
        *("--only=overload", "--only=disconnects", "--disconnects=3", "--seconds=1", "--new-tokens=8"),
        report=tmp_path / "report.json",
        codes=(0, 1),   # 1: a promise about time, on a busy machine
    )
    held = {figure["name"]: figure["holds"] for figure in report["figures"]}
    assert held["ended otherwise"] is True
    assert "| capacity " in printed
    assert "| clients that left" in printed


@pytest.mark.slow
def test_load_generators_measure_servers_of_known_and_unknown_times(
    tiny_repository: Path, tmp_path: Path
) -> None:
    printed, report = run(
        "load_generators.py",
        f"--model-repository={tiny_repository}",
        "--model=tiny",
        *("--rounds=1", "--requests=4", "--concurrency=2"),
        report=tmp_path / "report.json",
    )
    tools = ["genserve bench", "genserve bench, again"]
    servers = ["static, 50 + 10 ms", "genserve"]
    measured = [(row["server"], row["tool"]) for row in report["rows"]]
    assert measured == [(server, tool) for server in servers for tool in tools]
    [static] = report["rows"][0]["rounds"]
    assert static["ttft"] >= 50
    assert static["tpot"] >= 9.9
    assert "| 64 " in printed


def test_required_calls_of_a_random_model_validate(tiny_repository: Path, tmp_path: Path) -> None:
    root = shutil.copytree(tiny_repository, tmp_path / "models")
    (root / "tiny_tokenizer" / "1" / "chat_template.jinja").write_text("{{ tools | length }}<tool_call>")
    printed, report = run(
        "tool_calls.py",
        f"--model-repository={root}",
        "--requests=4",
        report=tmp_path / "report.json",
    )
    assert report["validate"] == report["agree"] == report["requests"] == 4, report["problems"]
    assert "| 4 " in printed


def test_the_answers_of_the_first_minute_are_counted_and_written(
    tiny_repository: Path, tmp_path: Path
) -> None:
    printed, report = run(
        "first_minute.py",
        f"--model-repository={tiny_repository}",
        "--model=tiny",
        *("--questions=2", "--seeds=2", "--turns=2", "--max-tokens=4", f"--texts={tmp_path / 'texts.md'}"),
        report=tmp_path / "report.json",
    )
    wanted = ["genserve chat", "genserve chat, later", "authors", "authors, later", "before", "before, later"]
    assert [row["options"] for row in report] == wanted
    assert {(row["answers"], row["loops"], row["most tokens"]) for row in report} == {("4", "0.0%", "4")}
    assert "| genserve chat, later |" in printed
    assert (tmp_path / "texts.md").read_text().count("## Tell me more about that. (seed 1,") == 2 * 3


def test_routing_is_compared_on_one_trace(tmp_path: Path) -> None:
    printed, report = run(
        "routing.py",
        *("--replicas=2", "--sessions=4", "--sessions-per-s=50", "--turns=2", "--system-prompts=2"),
        *("--system-tokens=32", "--user-tokens=8", "--answer-tokens=4", "--pause-s=0.02", "--rounds=1"),
        f"--plot={tmp_path / 'routing.svg'}",
        report=tmp_path / "report.json",
    )
    assert list(report["rounds"]) == ["round robin", "power of two choices", "prefix-aware"]
    [[first], *others] = report["rounds"].values()
    assert first["requests"] == report["trace"]["turns"] == 8
    assert all(figures["prompt_tokens"] == first["prompt_tokens"] for [figures] in others)
    assert all(0 < figures["cached_share"] < 1 for [figures] in report["rounds"].values())
    assert "| prefix-aware " in printed
    assert (tmp_path / "routing.svg").read_text().count("</svg>") == 1


@pytest.mark.slow
def test_the_throughput_of_replicas_is_compared_with_that_of_one(
    tiny_repository: Path, tmp_path: Path
) -> None:
    printed, report = run(
        "scaling.py",
        f"--model-repository={tiny_repository}",
        *("--replicas", "1", "2", "--step-ms=20", "--waves=1", "--new-tokens=4", "--pairs=3"),
        f"--plot={tmp_path / 'scaling.svg'}",
        report=tmp_path / "report.json",
    )
    assert [(row["replicas"], row["streams"]) for row in report["rows"]] == [(1, 4), (2, 8)]
    assert all(0 < row["tokens_per_s"] < row["ideal"] for row in report["rows"])
    assert all(row["cpu_us"]["ingress and router"] > 0 for row in report["rows"])
    assert report["first_token"]["deployment"]["p50_ms"] > 20
    assert "| by ingress and router |" in printed
    assert (tmp_path / "scaling.svg").exists()


@pytest.mark.slow
def test_predictions_are_printed_beside_what_a_server_measures(tiny_repository: Path, tmp_path: Path) -> None:
    printed, report = run(
        "planner.py",
        f"--model-repository={tiny_repository}",
        "--model=tiny",
        *("--input-len=30", "--output-len=30", "--tune-s=0", "--seconds=1", "--rounds=1", "--share=0.1"),
        report=tmp_path / "report.json",
    )
    assert "first token p50, ms" in printed
    [[measured, predicted]] = report["0.1"]
    assert measured.keys() == predicted.keys()
    assert min(*measured.values(), *predicted.values()) > 0


def test_two_of_five_models_answer_clients_in_random_order(tiny_repository: Path, tmp_path: Path) -> None:
    root = shutil.copytree(tiny_repository, tmp_path / "models")
    printed, report = run(
        "on_demand.py",
        f"--model-repository={root}",
        "--model=tiny",
        *("--minutes=0.1", "--clients=4", f"--cache-bytes={2**20}"),
        report=tmp_path / "report.json",
    )
    assert report["failed"] == report["differing answers"] == 0
    assert report["reserved at most, MiB"] <= report["budget, MiB"]
    assert report["unloads for memory"] > 0
    assert "| loads " in printed


def test_a_checkpoint_is_converted_for_other_engines(tmp_path: Path) -> None:
    source = tiny_llama_checkpoint(tmp_path / "source")
    script = BENCHMARKS / "peers" / "hugging_face_folder.py"
    command = [sys.executable, str(script), str(source), str(tmp_path / "converted")]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    weights = load_file(tmp_path / "converted" / "model.safetensors")
    assert {array.dtype.name for array in weights.values()} == {"float32"}
