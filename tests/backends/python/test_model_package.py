from __future__ import annotations

import importlib
import sys
import traceback

import pytest

from genserve.backends.python.model_package import ModelPackage
from tests.backends.python.models import floats


@pytest.fixture
def load():
    files = []

    def load(path, **names):
        file = ModelPackage(path, model="m", folders=[path.parent, path.parent.parent], module_globals=names)
        files.append(file)
        return file.load()

    load.files = files
    yield load
    for file in files:
        file.unload()


def write(folder, **sources):
    folder.mkdir(parents=True, exist_ok=True)
    for name, source in sources.items():
        (folder / f"{name}.py").write_text(source)
    return folder / "model.py"


@pytest.mark.parametrize(
    "statement",
    [
        "import utils",
        "from . import utils",
        "import utils as u; utils = u",
        "from utils import name; import utils",
    ],
)
def test_each_model_has_its_own_module_of_a_name(tmp_path, load, statement):
    models = [
        load(write(tmp_path / folder / "1", model=statement, utils=f"name = {folder!r}"))
        for folder in ("a", "b")
    ]
    assert [model.utils.name for model in models] == ["a", "b"]


def test_a_module_imported_in_two_ways_is_one(tmp_path, load):
    model = load(write(tmp_path / "1", model="import helper\nfrom . import helper as other", helper=""))
    assert model.helper is model.other


def test_modules_of_the_model_folder_and_packages_are_found(tmp_path, load):
    write(tmp_path / "lib", __init__="", deep="from . import __name__ as package\nimport above")
    write(tmp_path, above="where = 'above'")
    model = load(
        write(tmp_path / "1", model="import lib.deep\nfrom lib.deep import above\nimport lib.deep as deep")
    )
    assert model.lib.deep is model.deep
    assert model.above.where == "above"


def test_an_import_inside_a_function_sees_the_modules_of_its_own_model(tmp_path, load):
    source = "def late():\n    import utils\n    return utils.name"
    models = [
        load(write(tmp_path / folder / "1", model=source, utils=f"name = {folder!r}"))
        for folder in ("a", "b")
    ]
    assert [model.late() for model in models] == ["a", "b"]


def test_the_standard_library_is_not_hidden(tmp_path, load):
    model = load(write(tmp_path / "1", model="import json\nimport numpy", json="", other=""))
    assert model.json is sys.modules["json"]
    assert model.numpy is sys.modules["numpy"]


def test_a_folder_of_weights_does_not_hide_the_package_of_its_name(tmp_path, load):
    (tmp_path / "1" / "numpy").mkdir(parents=True)
    assert load(write(tmp_path / "1", model="import numpy")).numpy is sys.modules["numpy"]


def test_a_folder_without_init_is_a_package_where_no_other_has_its_name(tmp_path, load):
    write(tmp_path / "1" / "layers_here", attention="heads = 4")
    model = load(write(tmp_path / "1", model="from layers_here.attention import heads"))
    assert model.heads == 4


def test_no_bytecode_is_written_and_a_reload_gets_the_new_text(tmp_path, load):
    path = write(tmp_path / "1", model="import helper", helper="version = 1")
    old = load(path)
    write(tmp_path / "1", helper="version = 2")
    assert load(path).helper.version == 2
    assert old.helper.version == 1
    assert sorted(file.name for file in path.parent.iterdir()) == ["helper.py", "model.py"]


def test_the_given_globals_are_in_every_module(tmp_path, load):
    model = load(
        write(tmp_path / "1", model="import helper\nhere = secret", helper="here = secret"), secret=7
    )
    assert (model.here, model.helper.here) == (7, 7)


def test_forgetting_removes_every_module(tmp_path, load):
    model = load(write(tmp_path / "1", model="import helper", helper=""))
    before = [name for name in sys.modules if name.startswith(model.__package__)]
    load.files[0].unload()
    assert len(before) == 3
    assert not [name for name in sys.modules if name.startswith(model.__package__)]


def test_a_traceback_shows_the_file_and_its_lines(tmp_path, load):
    path = write(tmp_path / "1", model="def fail():\n    raise ValueError('here')")
    with pytest.raises(ValueError, match="here") as raised:
        load(path).fail()
    frame = traceback.extract_tb(raised.value.__traceback__)[-1]
    assert (frame.filename, frame.lineno, frame.line) == (str(path), 2, "raise ValueError('here')")


def test_a_missing_module_is_named(tmp_path, load):
    with pytest.raises(ModuleNotFoundError, match="No module named 'not_there'"):
        load(write(tmp_path / "1", model="import not_there"))


SAYS = """
    import importlib, pickle
    class TritonPythonModel:
        def execute(self, requests):
            {body}
            return [answer(np.array([repr(result)], dtype=object))]
"""
PICKLE = """b"chelper\\nKind\\n." """.strip()


def result(models, name, body, **files):
    models.add(name, SAYS.format(body=body), **{f"{path}.py": text for path, text in files.items()})
    return models.infer(name, floats(1)).array[0].decode()


@pytest.mark.parametrize(
    "body",
    [
        "result = importlib.import_module('helper').name",
        f"result = pickle.loads({PICKLE}).name",
        f"result = pickle._loads({PICKLE}).name",
        "import helper; result = pickle.loads(pickle.dumps(helper.Kind)).name",
        "result = __import__('helper').name",
    ],
)
def test_each_model_finds_its_own_module_by_name(models, body):
    found = [
        result(models, name, body, helper=f"name = {name!r}\nclass Kind:\n    name = {name!r}")
        for name in "ab"
    ]
    assert found == ["'a'", "'b'"]


def test_modules_of_packages_are_found(models):
    files = {"lib/__init__": "", "lib/deep": "name = 'deep'"}
    assert result(models, "m", "result = importlib.import_module('lib.deep').name", **files) == "'deep'"


def test_import_by_name_and_import_statement_give_the_same_module(models):
    body = "import helper; helper.value = 3; result = importlib.import_module('helper').value"
    assert result(models, "m", body, helper="") == "3"


def test_a_thread_of_the_model_finds_them(models):
    body = (
        "found = []; thread = threading.Thread(target=lambda: found.append("
        "importlib.import_module('helper').name)); thread.start(); thread.join(); result = found"
    )
    assert result(models, "m", body, helper="name = 1") == "[1]"


def test_other_code_does_not_find_them(models):
    assert result(models, "a", "result = importlib.import_module('helper').name", helper="name = 1") == "1"
    for name, body, why in [
        ("b", "result = importlib.import_module('helper').name", "outside of its model"),
        ("c", "import helper", "No module named 'helper'"),
        ("d", "result = importlib.import_module('helper').name", "No module named 'helper'"),
    ]:
        models.add(name, SAYS.format(body=body))
        assert why in models.infer(name, floats(1)).error.message
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("helper")


def test_they_are_removed_with_the_model(models):
    result(models, "a", "result = importlib.import_module('helper').name", helper="name = 1")
    assert "helper" in sys.modules
    models.stop("a")
    assert "helper" not in sys.modules


def test_an_installed_module_takes_precedence(models):
    assert result(models, "m", "result = importlib.import_module('pytest').__name__", pytest="") == "'pytest'"
