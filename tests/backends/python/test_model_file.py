from __future__ import annotations

import sys
import traceback

import pytest

from genserve.backends.python.model_package import ModelPackage


@pytest.fixture
def load():
    files = []

    def load(path, **names):
        file = ModelPackage(path, model="m", folders=[path.parent, path.parent.parent], names=names)
        files.append(file)
        return file.load()

    load.files = files
    yield load
    for file in files:
        file.forget()


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
def test_models_with_modules_of_one_name_have_each_its_own(tmp_path, load, statement):
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


def test_the_globals_it_was_given_are_in_every_module(tmp_path, load):
    model = load(
        write(tmp_path / "1", model="import helper\nhere = secret", helper="here = secret"), secret=7
    )
    assert (model.here, model.helper.here) == (7, 7)


def test_forgetting_removes_every_module(tmp_path, load):
    model = load(write(tmp_path / "1", model="import helper", helper=""))
    before = [name for name in sys.modules if name.startswith(model.__package__)]
    load.files[0].forget()
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
