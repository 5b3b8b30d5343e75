from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from genserve.engine.prefix_cache import block_keys
from genserve.errors import InvalidRequest
from genserve.planner.loads import PlannedRequest, TraceLoad


def read(path: Path, text: str, **options: float) -> list[PlannedRequest]:
    path.write_text(text)
    return list(TraceLoad(path=path, **options).requests())  # type: ignore[arg-type]


def summary(requests: list[PlannedRequest]) -> list[tuple[float, int, int]]:
    return [(each.arrived_s, each.num_prompt_tokens, len(each.answer)) for each in requests]


# The first lines of FAST25-release/traces/toolagent_trace.jsonl, with other times.
MOONCAKE = """\
{"timestamp": 3000, "input_length": 1290, "output_length": 316, "hash_ids": [0, 42, 43]}
{"timestamp": 1000, "input_length": 1030, "output_length": 3, "hash_ids": [0, 42, 57]}
{"timestamp": 1500, "input_length": 10, "output_length": 3, "hash_ids": [64]}
"""


def test_mooncakes_hash_ids_are_shared_blocks(tmp_path: Path) -> None:
    requests = read(tmp_path / "trace.jsonl", MOONCAKE)
    assert summary(requests) == [(0.0, 1030, 3), (0.5, 10, 3), (2.0, 1290, 316)]
    keys = [block_keys(request.token_ids(), block_size=16) for request in requests]
    shared = [first == second for first, second in zip(keys[0], keys[2], strict=False)]
    assert shared == [True] * (1024 // 16)     # 57 and 43 differ
    assert not {*keys[0]} & {*keys[1]}
    ids = [token_id for request in requests for token_id in request.answer]
    assert len({*ids}) == len(ids)
    assert not {*ids} & {token_id for request in requests for token_id in request.token_ids()}


def test_a_trace_is_cut_and_replayed_faster(tmp_path: Path) -> None:
    requests = read(tmp_path / "trace.jsonl", MOONCAKE, num_requests=2, speed=2.0)
    assert summary(requests) == [(0.0, 1030, 3), (0.25, 10, 3)]


BURSTGPT = """\
Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,0,1087,Conversation log
118,GPT-4,417,276,693,Conversation log
"""
AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
"""


def test_csv_files_are_known_by_their_columns(tmp_path: Path) -> None:
    # A request without an answer has failed.
    assert summary(read(tmp_path / "a.csv", BURSTGPT)) == [(0.0, 472, 18), (113.0, 417, 276)]
    assert summary(read(tmp_path / "b.csv", AZURE)) == [
        (0.0, 374, 44),
        (pytest.approx(4.314579), 396, 109),
    ]


def test_a_report_of_bench_is_a_trace(tmp_path: Path) -> None:
    run = {
        "duration": 10.0,
        "start_times": [0.0, 0.5, 1.0],
        "input_lens": [7, None, 9],
        "output_lens": [3, 0, 4],
        "is_complete": [True, False, True],
    }
    requests = read(tmp_path / "report.json", json.dumps({"runs": [run, run]}))
    assert summary(requests) == [(0.0, 7, 3), (1.0, 9, 4), (10.0, 7, 3), (11.0, 9, 4)]


@pytest.mark.parametrize(
    ("name", "text", "place"),
    [
        ("t.jsonl", '{"timestamp": 1, "input_length": 3, "output_length": 2}\n{"prompt": "Hi"}\n', ":2 "),
        ("t.jsonl", "5\n", ":1 "),
        ("t.jsonl", "", "has no request"),
        ("t.csv", "time,tokens\n1,2\n", "has the columns time, tokens"),
        ("t.csv", BURSTGPT + "soon,ChatGPT,1,1,2,Conversation log\n", ":5 "),
        ("t.json", '{"runs": [{}]}', ":1 "),
    ],
)
def test_other_files_are_rejected_with_the_place(tmp_path: Path, name: str, text: str, place: str) -> None:
    with pytest.raises(InvalidRequest, match=place) as caught:
        read(tmp_path / name, text)
    assert caught.value.remedy


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=rf"gone\.csv.*{os.strerror(errno.ENOENT)}"):
        list(TraceLoad(path=tmp_path / "gone.csv").requests())
