from __future__ import annotations

import re
from pathlib import Path

import pytest

from genserve.cli.plots import check_plot, draw_settings
from genserve.errors import InvalidRequest
from genserve.tuning.measurement import BestSetting, Goal, Measurement, Objective
from genserve.tuning.search_space import Setting

pytest.importorskip("matplotlib")


def measurements() -> list[Measurement]:
    return [
        Measurement(
            setting=Setting(graph="model.onnx", threads=threads, batch_size=batch_size),
            step_s={64: 0.01 * batch_size, 512: 0.02 * batch_size},
            token_bytes=1,
        )
        for threads in (3, 5)
        for batch_size in (1, 2, 24)
    ]


def test_a_plot_has_a_line_per_session_the_bound_and_the_choice(tmp_path: Path) -> None:
    rows, path = measurements(), tmp_path / "tune.svg"
    check_plot(path)
    goal = Goal(objective=Objective.THROUGHPUT, max_inter_token_s=0.05)
    choice = BestSetting(best=rows[2], meets_bound=True)
    draw_settings(rows, choice=choice, goal=goal, title="a title", path=path)
    drawn_words = set(re.findall("<!-- (.*) -->", path.read_text(encoding="utf-8")))
    lines = {"model.onnx, threads 3", "model.onnx, threads 5", "chosen", "bound"}
    assert {"a title", *lines, "1", "2", "24", "ms between tokens, at a context of 512"} <= drawn_words


def test_the_suffix_is_the_format(tmp_path: Path) -> None:
    rows, path = measurements(), tmp_path / "tune.png"
    goal = Goal(objective=Objective.THROUGHPUT, max_inter_token_s=0.05)
    draw_settings(rows, choice=BestSetting(best=rows[2], meets_bound=True), goal=goal, title="t", path=path)
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("name", "words"), [("tune.txt", "not an image format"), ("none/tune.png", "no folder")]
)
def test_an_invalid_plot_is_rejected_before_measuring(tmp_path: Path, name: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        check_plot(tmp_path / name)
