from __future__ import annotations

import gc
import sys

import pytest

from genserve.engine.engine import Engine
from genserve.errors import RepositoryError
from genserve.textmodel.decoder_stage import load_decoding
from tests.fakes.logits import PagedLogits, greedy_answer
from tests.fakes.sequences import sequence_of


def test_the_shipped_decoder_stage_runs_in_the_engine(tiny_repository):
    decoding = load_decoding(tiny_repository / "tiny_decoder" / "1" / "model.py", name="tiny_decoder")
    engine = Engine(PagedLogits(), decode=decoding.decode)
    sequence = sequence_of([5], max_tokens=4)
    engine.add(sequence)
    while engine.step():
        pass
    assert sequence.token_ids[1:] == greedy_answer([5], num_tokens=4)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (None, "is missing"),
        ("class TritonPythonModel(:", "SyntaxError"),
        ("import no_such_module", "ModuleNotFoundError"),
        ("x = 1", "TritonPythonModel"),
        ("class TritonPythonModel:\n    def decode(self, s): pass", "no coroutine"),
    ],
)
def test_a_model_py_that_is_no_decoder_stage_is_rejected_with_the_reason(tmp_path, source, words):
    path = tmp_path / "model.py"
    if source is not None:
        path.write_text(source)
    with pytest.raises(RepositoryError, match=words) as raised:
        load_decoding(path, name="broken")
    assert str(path) in raised.value.message


@pytest.mark.parametrize(
    ("body", "is_default"),
    [("pass", True), ("async def decode(self, s):\n  s.append(await s.sample())", False)],
)
def test_a_model_py_without_a_decode_has_the_default_loop(tmp_path, body, is_default):
    path = tmp_path / "model.py"
    path.write_text(f"class TritonPythonModel:\n {body}\n")
    assert load_decoding(path, name="own").is_default_loop is is_default


DECODES = """
from rules import rule
class TritonPythonModel:
    async def decode(self, sequence):
        from later import late
        return rule, late
"""


def decoded(decode):
    with pytest.raises(StopIteration) as ended:
        decode(None).send(None)
    return ended.value.value


def test_each_decoder_stage_imports_the_modules_of_its_own_folder(tmp_path):
    stages = []
    for name in ("one", "two"):
        folder = tmp_path / name / "1"
        folder.mkdir(parents=True)
        (folder / "model.py").write_text(DECODES)
        (folder / "later.py").write_text(f"late = {name!r}")
        (tmp_path / name / "rules.py").write_text(f"rule = {name!r}")
        stages.append(load_decoding(folder / "model.py", name="stage").decode)
    assert [decoded(stage) for stage in stages] == [("one", "one"), ("two", "two")]
    stages.clear()
    gc.collect()
    assert not [name for name in sys.modules if name.startswith("_genserve_stage_")]
