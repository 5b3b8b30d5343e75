"""How often the rules run while a model loads, for every kind of model."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType

import pytest

from genserve.repository.model_validation import (
    CONFIG_RULES,
    CONTENT_RULES,
    ENSEMBLE_RULES,
    LOAD_RULES,
    SOURCE_RULES,
    STEP_RULES,
)
from genserve.repository.options import ControlMode, RepositoryOptions
from genserve.repository.repository import Repository
from genserve.repository.rules.facts import ConfigFacts

PYTHON = """
backend: "python"
input { name: "X" data_type: TYPE_FP32 dims: 1 }
output { name: "Y" data_type: TYPE_FP32 dims: 1 }
"""
ENSEMBLE = """
platform: "ensemble"
input { name: "X" data_type: TYPE_FP32 dims: 1 }
output { name: "Y" data_type: TYPE_FP32 dims: 1 }
ensemble_scheduling { step {
  model_name: "plain" model_version: -1
  input_map { key: "X" value: "X" } output_map { key: "Y" value: "Y" }
} }
"""
COMPLETES = """
class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "X", "data_type": "TYPE_FP32", "dims": [1]})
        return config
"""
ALL_RULES = (*CONFIG_RULES, *ENSEMBLE_RULES, *STEP_RULES, *LOAD_RULES)
CODES = {rule.__code__: rule.__name__ for rule in ALL_RULES}
CHECK_ONLY = {rule.__code__ for rule in (*SOURCE_RULES, *CONTENT_RULES)}


class RuleCalls:
    """Counts the calls of rules on this thread, which loads the models."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()
        self.check_only = 0
        self._last: dict[CodeType, object] = {}

    def __call__(self, frame: FrameType, event: str, _argument: object) -> None:
        facts = frame.f_locals.get("facts")
        # A rule is a generator: it is called once, and resumed after each diagnostic, in one frame.
        if event != "call" or not isinstance(facts, ConfigFacts) or self._last.get(frame.f_code) is frame:
            return
        self._last[frame.f_code] = frame
        self.check_only += frame.f_code in CHECK_ONLY
        if frame.f_code in CODES:
            self.calls[facts.name, CODES[frame.f_code]] += 1

    def times(self, model: str) -> dict[str, int]:
        """How often each rule has run for a model."""
        return {rule: count for (name, rule), count in self.calls.items() if name == model}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, config, code in (
        ("plain", PYTHON, "class TritonPythonModel: ..."),
        ("completed", 'backend: "python"', COMPLETES),
        ("ensemble", ENSEMBLE, ""),
    ):
        (tmp_path / name / "1").mkdir(parents=True)
        (tmp_path / name / "config.pbtxt").write_text(config)
        if code:
            (tmp_path / name / "1" / "model.py").write_text(code)
    return tmp_path


def rules_of(*loads: str, root: Path) -> RuleCalls:
    """Load models one after the other, and return the rules that ran while the last one was loaded."""
    repository = Repository([root], options=RepositoryOptions(control_mode=ControlMode.EXPLICIT))
    repository.start([])
    for name in loads[:-1]:
        repository.load(name)
    found = RuleCalls()
    sys.setprofile(found)
    try:
        repository.load(loads[-1])
    finally:
        sys.setprofile(None)
        repository.close()
    assert found.check_only == 0
    return found


def once(*rules: object) -> dict[str, int]:
    return dict.fromkeys((rule.__name__ for rule in rules), 1)  # type: ignore[attr-defined]


def test_each_rule_runs_once_for_a_python_model_and_for_no_other(root: Path) -> None:
    found = rules_of("plain", root=root)
    assert found.times("plain") == once(*CONFIG_RULES, *LOAD_RULES)
    assert {name for name, _ in found.calls} == {"plain"}


def test_each_rule_runs_once_for_an_ensemble_and_once_for_the_model_of_its_step(root: Path) -> None:
    found = rules_of("ensemble", root=root)
    assert found.times("ensemble") == once(*ALL_RULES)
    assert found.times("plain") == once(*CONFIG_RULES, *LOAD_RULES)


def test_the_rules_of_configs_run_again_on_a_config_that_the_backend_has_completed(root: Path) -> None:
    twice = dict.fromkeys(once(*CONFIG_RULES), 2)
    assert rules_of("completed", root=root).times("completed") == twice | once(*LOAD_RULES)


def test_each_rule_runs_once_for_the_ensemble_and_the_stages_of_a_text_model(tiny_repository: Path) -> None:
    found = rules_of("tiny_tokenizer", "tiny", root=tiny_repository)
    assert found.times("tiny") == once(*ALL_RULES)
    for stage in ("tiny_tokenizer", "tiny_logits", "tiny_decoder"):
        assert found.times(stage) == once(*CONFIG_RULES, *LOAD_RULES)
