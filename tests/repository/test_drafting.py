"""An ensemble whose logits stage speculates, beside the same one without."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from genserve import LLM
from genserve.backends.backend import Placement
from genserve.backends.logits_onnx import OnnxLogits
from genserve.errors import GenserveError
from genserve.repository.drafting import load_drafting
from genserve.repository.index import scan
from genserve.repository.logits_runtime import logits_file
from tests.fakes.logits import CachedLogits

PROMPTS = ("the tea that the eater ate at the ", "one two three one two three one two ", "a")


def speculating(repository: Path, root: Path, method: str = "prompt_lookup") -> Path:
    shutil.copytree(repository, root, dirs_exist_ok=True)
    parameter = f'parameters [ {{ key: "speculation" value {{ string_value: "{method}" }} }} ]\n'
    [config] = root.glob("*_logits/config.pbtxt")
    config.write_text(config.read_text() + parameter)
    return root


def test_the_texts_are_those_without(tiny_repository, tmp_path):
    with (
        LLM(tiny_repository) as plain,
        LLM(speculating(tiny_repository, tmp_path / "models")) as speculative,
    ):
        for options in ({}, {"temperature": 0.8, "seed": 3}, {"repetition_penalty": 1.2, "logprobs": True}):
            for prompt in PROMPTS:
                found = speculative.generate(prompt, max_tokens=60, **options)
                assert found.text == plain.generate(prompt, max_tokens=60, **options).text
        assert speculative._model.loop.num_steps < plain._model.loop.num_steps


@pytest.mark.parametrize(
    ("method", "message"),
    [("prompt_lookups", "method of speculation"), ("prompt_lookup", "verification.onnx is missing")],
)
def test_what_cannot_be_done_is_refused_at_load(tiny_repository, tmp_path, method, message):
    root = speculating(tiny_repository, tmp_path / "models", method)
    (root / "tiny_logits" / "1" / "verification.onnx").unlink()
    with pytest.raises(GenserveError, match=message):
        LLM(root)


@pytest.mark.parametrize("kind", ["CPU", "GPU"])
def test_only_graphs_of_ours_on_the_cpu_speculate(tiny_repository, tmp_path, kind):
    entry = scan([speculating(tiny_repository, tmp_path / "models")])["tiny_logits"]
    logits = OnnxLogits(logits_file(entry), num_slots=1) if kind == "GPU" else CachedLogits()
    with pytest.raises(GenserveError, match="tiny_logits cannot speculate"):
        load_drafting(entry, logits, placement=Placement(name="there", kind=kind))
