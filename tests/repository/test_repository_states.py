"""Any sequence of loads, unloads, changes and faults serves what the rules of model control say."""

from __future__ import annotations

import gc
import shutil
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from genserve.errors import InferenceError
from genserve.repository.options import ControlMode, RepositoryOptions
from genserve.repository.repository import Repository
from tests.faults.broken_repository import CONFIG, adds
from tests.support.python_models import ask, value

_ENSEMBLE = CONFIG.replace('backend: "onnxruntime"', 'platform: "ensemble"') + """
ensemble_scheduling { step [
  { model_name: "a" model_version: -1 input_map { key: "X" value: "X" } output_map { key: "Y" value: "M" } },
  { model_name: "b" model_version: -1 input_map { key: "X" value: "M" } output_map { key: "Y" value: "Y" } }
] }
"""
_MODELS = ("a", "b")
_NAMES = st.sampled_from(_MODELS)
_WAYS = {
    "config": ("config.pbtxt", b"backend: ["),
    "cut": ("1/model.onnx", adds(0)[:-20]),
    "empty": ("1/model.onnx", b""),
}


class RepositoryMachine(RuleBasedStateMachine):
    """Two models and an ensemble of both, under explicit control, beside what should be served."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(mkdtemp(prefix="states-"))
        self.files: dict[str, float | None] = {}    # what a model's folder adds; None: it is broken
        self.served: dict[str, float] = {}          # what a loaded model adds
        self.wants_both = False                     # the ensemble was loaded, and is while its steps are
        for number, name in enumerate(_MODELS):
            self.write(name, number)
        (self.root / "both" / "1").mkdir(parents=True)
        (self.root / "both" / "config.pbtxt").write_text(_ENSEMBLE)
        options = RepositoryOptions(control_mode=ControlMode.EXPLICIT, exit_timeout_s=5)
        self.repository = Repository([self.root], options=options)
        self.repository.start([])

    def teardown(self) -> None:
        self.repository.close()
        shutil.rmtree(self.root)

    @rule(name=_NAMES, number=st.integers(0, 9))
    def write(self, name: str, number: int) -> None:
        folder = self.root / name
        (folder / "1").mkdir(parents=True, exist_ok=True)
        (folder / "config.pbtxt").write_text(CONFIG)
        new = folder / "1" / "new"
        new.write_bytes(adds(number))
        new.replace(folder / "1" / "model.onnx")
        self.files[name] = number

    @rule(name=_NAMES, way=st.sampled_from(list(_WAYS)))
    def break_files(self, name: str, way: str) -> None:
        file, content = _WAYS[way]
        if name in self.files:
            (self.root / name / file).write_bytes(content)
            self.files[name] = None

    @rule(name=_NAMES)
    def remove_files(self, name: str) -> None:
        shutil.rmtree(self.root / name, ignore_errors=True)
        self.files.pop(name, None)

    @rule(name=_NAMES)
    def load(self, name: str) -> None:
        number = self.files.get(name)
        if self._loads(name) is not (number is not None):
            raise AssertionError(f"the load of {name}, which adds {number}")
        if number is not None:
            self.served[name] = number

    @rule()
    def load_both(self) -> None:
        missing = [name for name in _MODELS if name not in self.served]
        # Steps that are served stay as they are; their folders must still describe models that fit.
        is_whole = all(self.files.get(name) is not None for name in missing)
        described = all(name in self.files for name in _MODELS)
        loaded = self._loads("both")
        assert not loaded or (is_whole and described)
        for name in missing:
            if self.repository.is_ready(name):
                self.served[name] = self.files[name]
        if loaded:
            self.wants_both = True
        else:
            self.wants_both |= not is_whole     # it waits for its steps

    @rule(name=_NAMES)
    def unload(self, name: str) -> None:
        self.repository.unload(name)
        self.served.pop(name, None)

    @rule()
    def unload_both(self) -> None:
        self.repository.unload("both")
        self.wants_both = False

    @precondition(lambda self: self.served)
    @rule()
    def collect_garbage(self) -> None:
        gc.collect(0)

    @invariant()
    def each_model_answers_as_it_was_loaded(self) -> None:
        for name in _MODELS:
            assert self._answer(name) == self.served.get(name)

    @invariant()
    def the_ensemble_answers_only_with_all_of_its_steps(self) -> None:
        answer = self._answer("both")
        if answer is not None:
            assert self.wants_both
            assert answer == self.served["a"] + self.served["b"]

    @invariant()
    def the_index_says_what_is_served(self) -> None:
        ready = {entry.name for entry in self.repository.index(ready_only=True)}
        assert ready - {"both"} == set(self.served)
        listed = {entry.name for entry in self.repository.index() if entry.state == "READY"}
        assert listed <= ready

    def _loads(self, name: str) -> bool:
        try:
            self.repository.load(name)
        except InferenceError:
            return False
        return True

    def _answer(self, name: str) -> float | None:
        try:
            response: Any = ask(self.repository, name, X=[[0, 0]])
        except InferenceError:
            return None
        return value(response)[0][0]


TestRepositoryMachine = RepositoryMachine.TestCase
TestRepositoryMachine.settings = settings(
    max_examples=8,
    stateful_step_count=15,
    phases=[Phase.generate],    # a step takes 20 ms: shrinking would take minutes
)
