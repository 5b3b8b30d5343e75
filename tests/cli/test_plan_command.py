from __future__ import annotations

import json
from pathlib import Path

import pytest

from genserve.errors import InvalidRequest
from tests.planner.conftest import engine, step_times  # noqa: F401  # fixtures
from tests.support.command_line import Ended, check_error, invoke

LOAD = ("--request-rate", "30", "--num-requests", "150", "--input-len", "50", "--output-len", "20")


def plan(*flags: str | Path) -> Ended:
    return invoke(["plan", "--processes", "1", *map(str, flags)])


def test_the_smallest_fleet_is_the_last_line(step_times: Path) -> None:  # noqa: F811
    ran = plan("--step-times", step_times, *LOAD, "--target", "ttft_p99:1000")
    assert ran.exit_code == 0
    lines = ran.stdout.splitlines()
    assert lines[0].startswith("steps: tiny on imaginary; the step model errs by 0.0% (median)")
    assert lines[-2] == "targets: ttft_p99 1000, rejected 0.01"
    number = int(lines[-1].removeprefix("steps: ").partition(" ")[0])
    assert lines[-1] in (f"steps: {number} replicas meet them", "steps: 1 replica meets them")
    [row] = [line for line in lines if line.split()[:1] == [str(number)]]
    assert row.rstrip().endswith("meets the targets")


def test_json_compares_kinds_by_their_cost(step_times: Path, tmp_path: Path) -> None:  # noqa: F811
    flags = ("--step-times", step_times, "--cost-per-hour", "2", "--step-times", step_times)
    ran = plan(*flags, "--cost-per-hour", "1", *LOAD, "--target", "itl_p50:40", "--json")
    document = json.loads(ran.stdout)
    first, second = document["kinds"]
    assert document["best"] == "steps"
    assert first["replicas"] == second["replicas"] > 0
    assert (first["cost_per_hour"], second["cost_per_hour"]) == (2 * first["replicas"], second["replicas"])
    assert document["targets"] == {"itl_p50": 40, "rejected": 0.01}
    assert [fleet["num_replicas"] for fleet in first["fleets"]][-1] >= first["replicas"]


def test_chosen_numbers_are_simulated_and_plotted(step_times: Path, tmp_path: Path) -> None:  # noqa: F811
    pytest.importorskip("matplotlib")
    trace = tmp_path / "trace.jsonl"
    row = {"timestamp": 0, "input_length": 100, "output_length": 10, "hash_ids": [1]}
    trace.write_text("".join(json.dumps(row | {"timestamp": 50 * n}) + "\n" for n in range(40)))
    flags = ("--trace", trace, "--replicas", "3", "--replicas", "1", "--plot", tmp_path / "plan.png")
    ran = plan("--step-times", step_times, *flags)
    assert ran.exit_code == 0
    assert [line.split()[0] for line in ran.stdout.splitlines()[2:4]] == ["1", "3"]
    assert "target" not in ran.stdout
    assert (tmp_path / "plan.png").stat().st_size > 10_000


def test_a_fleet_that_misses_its_targets_exits_with_1(step_times: Path) -> None:  # noqa: F811
    ran = plan("--step-times", step_times, *LOAD, "--target", "itl_p50:0.01", "--max-replicas", "2")
    assert ran.exit_code == 1
    assert ran.stdout.endswith("steps: 2 replicas miss itl_p50; try --max-replicas\n")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--target", "ttft:3", *LOAD), "'ttft:3' is not ttft_p99:MS"),
        (("--target", "rejected:2", *LOAD), "'rejected:2' is not"),
        (LOAD, "give each --target, or the --replicas to simulate"),
        (("--target", "ttft_p50:9"), "give either --trace or --request-rate"),
        (("--target", "ttft_p50:9", "--trace", "t.csv", *LOAD), "give either --trace or --request-rate"),
        ((*LOAD, "--replicas", "1", "--cost-per-hour", "1", "--cost-per-hour", "1"), "has 2 costs for"),
    ],
)
def test_wrong_flags_are_rejected(step_times: Path, flags: tuple[str, ...], message: str) -> None:  # noqa: F811
    ran = invoke(["plan", "--step-times", str(step_times), *flags])
    assert ran.exit_code == 2
    assert message in ran.stderr


def test_a_file_without_step_times_is_rejected_with_the_remedy(
    step_times: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    (tmp_path / "other.json").write_text("{}")
    ran = plan("--step-times", tmp_path / "other.json", *LOAD, "--replicas", "1")
    check_error(ran, InvalidRequest, "has no step times.*genserve tune")
    document = json.loads(step_times.read_bytes())
    document["steps"][3]["seconds"] = 0
    (tmp_path / "other.json").write_text(json.dumps(document))
    ran = plan("--step-times", tmp_path / "other.json", *LOAD, "--replicas", "1")
    check_error(ran, InvalidRequest, "takes no time")
    ran = plan("--step-times", tmp_path / "gone.json", *LOAD, "--replicas", "1")
    check_error(ran, InvalidRequest, "No such file")
