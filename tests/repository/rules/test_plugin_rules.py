from __future__ import annotations

import textwrap

import pytest

from genserve.errors import RepositoryError
from genserve.repository.model_validation import repository_diagnostics
from genserve.repository.rules.source_rules import plugin_diagnostics
from genserve.textmodel.decoder_stage import load_decoding
from tests.support.documented_plugins import copy_with_plugins, documented_model

MODEL = """
class TritonPythonModel:
    {plugins}

    async def decode(self, sequence):
        pass
"""


def write(folder, code, plugins):
    path = folder / "model.py"
    path.write_text(textwrap.dedent(code) + MODEL.format(plugins=plugins))
    return path


def test_a_model_with_valid_plugins_has_no_diagnostics(tmp_path):
    path = tmp_path / "model.py"
    path.write_text(documented_model())
    assert plugin_diagnostics(path) == ()


@pytest.mark.parametrize(
    ("code", "plugins", "place", "words"),
    [
        ("class P:\n  def __init__(self, c): pass\n", "stop_rules = {'p': P}", "1:1", "no method __call__"),
        ("class P:\n  def __call__(self): pass\n", "stop_rules = {'p': P}", "1:1", "takes no context"),
        ("def p(c, x): pass\n", "stop_rules = {'p': p}", "1:1", "keyword-only"),
        ("def p(c, **x): pass\n", "stop_rules = {'p': p}", "1:1", "keyword-only"),
        ("def p(*, x: int): pass\n", "logits_processors = {'p': p}", "1:1", "keyword-only"),
        ("def p(c, *, x=3): pass\n", "logits_processors = {'p': p}", "1:13", "x of p has no annotation"),
        ("", "logits_processors = {'p': 3}", "3:31", "3 is neither a class nor a function"),
        ("", "logits_processors = ['p']", "3:25", "must be a dict"),
        ("p = (\n", "", "", "'(' was never closed"),
    ],
)
def test_an_error_is_reported_at_its_position_and_fails_the_load(tmp_path, code, plugins, place, words):
    path = write(tmp_path, code, plugins)
    [diagnostic] = plugin_diagnostics(path)
    assert words in diagnostic.message
    assert diagnostic.position == (place or "1:5")
    with pytest.raises(RepositoryError):
        load_decoding(path, name="stage")


def test_a_parser_needs_both_methods(tmp_path):
    code = "class P:\n  def __init__(self, context): pass\n"
    found = plugin_diagnostics(write(tmp_path, code, "output_parsers = {'p': P}"))
    messages = [each.message for each in found]
    assert messages == ["output_parsers: P has no method push", "output_parsers: P has no method flush"]


@pytest.mark.parametrize(
    ("code", "plugins"),
    [
        ("from other import P\n", "stop_rules = {'p': P}"),
        ("class P(dict): pass\n", "stop_rules = {'p': P}"),
        ("@wrapped\nclass P: pass\n", "stop_rules = {'p': P}"),
        ("", "stop_rules = rules()"),
        ("", "stop_rules = {**rules}"),
    ],
)
def test_errors_that_need_a_run_are_left_to_loading(tmp_path, code, plugins):
    assert plugin_diagnostics(write(tmp_path, code, plugins)) == ()


def test_check_reports_plugin_errors(tmp_path, tiny_repository):
    root = copy_with_plugins(tiny_repository, tmp_path / "repository", more="\nif\n")
    [diagnostic] = repository_diagnostics([root])["tiny_decoder"]
    lines = len(documented_model().splitlines())
    assert diagnostic.where.startswith(f"{root}/tiny_decoder/1/model.py:{lines + 2}:")
