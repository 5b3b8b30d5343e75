"""The summary of a benchmark's rounds."""

from __future__ import annotations

import pytest

from benchmarks.report import markdown, median, prefix_figures, ratio, serving_figures


def test_first_tokens_of_simultaneous_requests_are_summarised_separately() -> None:
    measured = {
        "elapsed_s": 2.0,
        "prompt_tokens": [3, 5],
        "new_tokens": [10, 30],
        "first_text_s": [0.1, 0.3, 0.9, 0.9, 0.9],
        "gaps_s": [0.01, 0.02],
    }
    figures = serving_figures(measured, concurrency=2)
    assert figures["tokens_per_s"] == 20
    assert figures["prompt_tokens"] == 4
    assert figures["together_p50_ms"] == pytest.approx(200)
    assert figures["first_p50_ms"] == pytest.approx(900)


def test_a_loop_without_requests_has_a_speed_and_no_latencies() -> None:
    measured = {"elapsed_s": 2.0, "new_tokens": [4, 4], "first_text_s": [], "gaps_s": []}
    assert serving_figures(measured, concurrency=2) == {"tokens_per_s": 4.0}


def test_the_speedup_of_a_prefix_is_the_ratio_of_times() -> None:
    figures = prefix_figures({"first_text_s": [0.5, 0.02]})
    assert figures == pytest.approx({"cold_ms": 500, "warm_ms": 20, "sooner": 25})


def test_a_ratio_compares_figures_of_the_same_round() -> None:
    mine = [{"speed": 10.0}, {"speed": 100.0}, {"speed": 30.0}]
    others = [{"speed": 5.0}, {"speed": 50.0}, {"speed": 60.0}]  # the machine was fast in the second
    assert ratio(mine, others, "speed") == 2.0
    assert ratio(mine, others, "latency") is None
    assert median(mine, "speed") == 30.0
    assert median(mine, "latency") is None


def test_a_table_is_aligned_as_text_too() -> None:
    table = markdown(["", "tokens/s"], [["genserve", "1080"], ["other", "251"]])
    assert table.splitlines() == [
        "|          | tokens/s |",
        "| -------- | -------: |",
        "| genserve |     1080 |",
        "| other    |      251 |",
    ]
