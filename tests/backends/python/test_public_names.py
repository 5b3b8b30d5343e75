from __future__ import annotations

import importlib
import sys

import pytest

from tests.backends.python.models import floats

SAYS = """
    import importlib, pickle
    class TritonPythonModel:
        def execute(self, requests):
            {body}
            return [answer(np.array([repr(said)], dtype=object))]
"""
PICKLE = """b"chelper\\nKind\\n." """.strip()


def said(models, name, body, **files):
    models.add(name, SAYS.format(body=body), **{f"{path}.py": text for path, text in files.items()})
    return models.infer(name, floats(1)).array[0].decode()


@pytest.mark.parametrize(
    "body",
    [
        "said = importlib.import_module('helper').name",
        f"said = pickle.loads({PICKLE}).name",
        f"said = pickle._loads({PICKLE}).name",
        "import helper; said = pickle.loads(pickle.dumps(helper.Kind)).name",
        "said = __import__('helper').name",
    ],
)
def test_models_find_each_its_own_module_by_name(models, body):
    found = [
        said(models, name, body, helper=f"name = {name!r}\nclass Kind:\n    name = {name!r}") for name in "ab"
    ]
    assert found == ["'a'", "'b'"]


def test_modules_of_packages_are_found(models):
    files = {"lib/__init__": "", "lib/deep": "name = 'deep'"}
    assert said(models, "m", "said = importlib.import_module('lib.deep').name", **files) == "'deep'"


def test_it_is_the_module_that_import_gives(models):
    body = "import helper; helper.value = 3; said = importlib.import_module('helper').value"
    assert said(models, "m", body, helper="") == "3"


def test_a_thread_of_the_model_finds_them_too(models):
    body = (
        "found = []; thread = threading.Thread(target=lambda: found.append("
        "importlib.import_module('helper').name)); thread.start(); thread.join(); said = found"
    )
    assert said(models, "m", body, helper="name = 1") == "[1]"


def test_nobody_else_finds_them(models):
    assert said(models, "a", "said = importlib.import_module('helper').name", helper="name = 1") == "1"
    for name, body, why in [
        ("b", "said = importlib.import_module('helper').name", "outside of its model"),
        ("c", "import helper", "No module named 'helper'"),
        ("d", "said = importlib.import_module('helper').name", "No module named 'helper'"),
    ]:
        models.add(name, SAYS.format(body=body))
        assert why in models.infer(name, floats(1)).error.message
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("helper")


def test_they_go_with_the_model(models):
    said(models, "a", "said = importlib.import_module('helper').name", helper="name = 1")
    assert "helper" in sys.modules
    models.stop("a")
    assert "helper" not in sys.modules


def test_an_installed_module_goes_first(models):
    assert said(models, "m", "said = importlib.import_module('pytest').__name__", pytest="") == "'pytest'"
