"""The figures of a load."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from genserve.bench.answers import Answer, Failure, LoadResult
from genserve.bench.summary import Distribution, summarise


def answer(sent_s=0.0, *texts_s, end_s=None, tokens=None, prompt=None, **options):
    return Answer(
        sent_s=sent_s,
        text_times_s=list(texts_s),
        end_s=texts_s[-1] if end_s is None else end_s,
        output_tokens=tokens,
        prompt_tokens=prompt,
        **{"is_complete": True} | options,
    )


def figures(*answers, elapsed_s=10.0, **options):
    result = LoadResult(started_s=0.0, elapsed_s=elapsed_s, cpu_s=1.0, answers=list(answers))
    return summarise(result, **{"ranks": [50, 99]} | options)


def test_the_times_of_an_answer():
    one = figures(answer(1.0, 1.5, 1.6, 1.9, end_s=2.0, tokens=6, prompt=11))
    assert one.ttft.mean == pytest.approx(500), "from sending to the first text"
    assert one.itl.mean == pytest.approx(200), "between two chunks"
    assert one.tpot.mean == pytest.approx(100), "(end - first) / (tokens - 1)"
    assert one.e2el.mean == pytest.approx(1000)
    assert (one.output_tokens, one.prompt_tokens, one.counted_by) == (6, 11, "server")
    assert (one.request_rate, one.output_rate, one.total_rate) == (0.1, 0.6, 1.7)
    assert one.client_cpu == 0.1


def test_times_are_per_request_except_those_between_tokens():
    two = figures(answer(0.0, 0.1, 0.2, 0.3), answer(0.0, 0.3, 0.7))
    assert two.ttft.mean == pytest.approx(200)
    assert two.tpot.mean == pytest.approx((100 + 400) / 2)
    assert two.itl.mean == pytest.approx((100 + 100 + 400) / 3)
    assert two.counted_by == "chunks"


def test_a_single_token_has_no_time_per_token():
    one = figures(answer(0.0, 0.1, tokens=1), limits_ms={"tpot": 1.0})
    assert one.tpot is None
    assert one.itl is None
    assert one.goodput == 0.1


def test_failed_and_unfinished_requests_have_no_times():
    failed = answer(0.0, 0.5, end_s=9.0, is_complete=False, failure=Failure(kind="timeout", message="late"))
    unfinished = answer(0.0, 0.6, 0.7, is_complete=False)
    all_three = figures(answer(0.0, 0.1, 0.2), failed, unfinished)
    assert (all_three.completed, all_three.unfinished) == (1, 1)
    assert all_three.errors == {"timeout": (1, "late")}
    assert all_three.ttft.mean == pytest.approx(100)
    assert all_three.output_tokens == 2 + 2, "an unfinished answer kept the server busy"


def test_errors_are_counted_by_kind_most_frequent_first():
    failures = [("a", "1"), ("b", "2"), ("b", "3")]
    answers = [
        answer(0.0, end_s=1.0, is_complete=False, failure=Failure(kind=kind, message=message))
        for kind, message in failures
    ]
    assert list(figures(*answers).errors.items()) == [("b", (2, "2")), ("a", (1, "1"))]


def test_goodput_counts_requests_within_all_limits():
    answers = [
        answer(0.0, 0.1, 0.2, 0.3),     # tpot 100 ms, e2el 300 ms
        answer(0.0, 0.3, 0.4),          # a later first token
        answer(0.0, 0.1, 0.9),          # a longer wait between tokens
        answer(0.0, end_s=0.1),         # no text, so no first token
    ]
    assert figures(*answers).goodput is None
    assert figures(*answers, limits_ms={"ttft": 200, "tpot": 150}).goodput == 0.1
    assert figures(*answers, limits_ms={"ttft": 200}).goodput == 0.2
    assert figures(*answers, limits_ms={"e2el": 450}).goodput == 0.3


def test_peaks():
    answers = [answer(0.0, 0.5, 0.6, 1.5, tokens=6), answer(0.4, 0.7, 2.5), answer(2.6, 2.7)]
    found = figures(*answers)
    assert found.peak_output_rate == 2 * 2 + 1, "two chunks of two tokens and one of one, in the first second"
    assert found.peak_concurrency == 2


def test_nothing_was_measured():
    nothing = figures(elapsed_s=0.0, limits_ms={"ttft": 1})
    assert nothing.ttft is None
    assert nothing.output_rate == nothing.goodput == nothing.peak_concurrency == 0
    assert "mean_ttft_ms" not in nothing.as_json()


@given(st.lists(st.floats(0, 1e3), min_size=2, max_size=40), st.sampled_from([1, 50, 90, 99]))
def test_distributions_are_those_of_the_statistics_module(times_s, rank):
    found = figures(*(answer(0.0, time_s) for time_s in times_s), ranks=[rank])
    times_ms = [time_s * 1e3 for time_s in times_s]
    expected = Distribution(
        mean=pytest.approx(statistics.fmean(times_ms)),
        median=pytest.approx(statistics.median(times_ms)),
        std=pytest.approx(statistics.pstdev(times_ms), abs=1e-6),
        percentiles={
            rank: pytest.approx(statistics.quantiles(times_ms, n=100, method="inclusive")[rank - 1])
        },
    )
    assert found.ttft == expected
    assert found.as_json()[f"p{rank}_ttft_ms"] == pytest.approx(np.percentile(times_ms, rank))
