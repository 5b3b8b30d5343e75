from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import genserve


def test_every_public_name_exists_and_is_in_dir() -> None:
    assert dir(genserve) == sorted(genserve.__all__)
    assert all(getattr(genserve, name) is not None for name in genserve.__all__)


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _nodes() -> Iterator[tuple[Path, ast.AST]]:
    for path in sorted(Path(genserve.__file__).parent.rglob("*.py")):
        for node in ast.walk(_tree(path)):
            yield path, node


def test_no_two_modules_or_classes_have_the_same_name() -> None:
    modules = Counter(path.stem for path in _modules().values() if path.stem != "__init__")
    assert [name for name, count in modules.items() if count > 1] == []
    classes = Counter(
        node.name
        for path, node in _nodes()
        if isinstance(node, ast.ClassDef) and path.parent.name != "pb_utils"
    )
    assert [name for name, count in classes.items() if count > 1] == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports for type checkers count; imports in functions do not."""
    modules = _modules()
    imported = {name: set(_imported(path, modules)) for name, path in modules.items()}
    TopologicalSorter(imported).prepare()   # raises CycleError, which names a circle


def _modules() -> Mapping[str, Path]:
    """Return the files of the package by the names of their modules."""
    root = Path(genserve.__file__).parent
    files = {path.relative_to(root.parent).with_suffix("").parts: path for path in root.rglob("*.py")}
    return {".".join(parts).removesuffix(".__init__"): path for parts, path in files.items()}


def _imported(path: Path, modules: Mapping[str, Path]) -> Iterator[str]:
    statements = list(_tree(path).body)
    for statement in statements:
        if isinstance(statement, ast.If | ast.Try):
            statements += statement.body
        names = [alias.name for alias in getattr(statement, "names", ()) if isinstance(alias, ast.alias)]
        if isinstance(statement, ast.Import):
            yield from (name for name in names if name in modules)
        elif isinstance(statement, ast.ImportFrom) and statement.module in modules:
            for name in names:
                submodule = f"{statement.module}.{name}"
                yield submodule if submodule in modules else statement.module


def test_no_process_is_forked() -> None:
    """A fork of a process with threads inherits locks that nobody releases."""
    forking = {"fork", "forkpty", "ProcessPoolExecutor", "Pool", "set_start_method"}
    for path, node in _nodes():
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            assert not (node.value.id in ("os", "pty") and node.attr in forking), path
            assert not (node.value.id == "multiprocessing" and node.attr in (*forking, "Process")), path
        if isinstance(node, ast.Call):
            assert "preexec_fn" not in [keyword.arg for keyword in node.keywords], path
            if isinstance(node.func, ast.Attribute) and node.func.attr == "get_context" and node.args:
                assert ast.unparse(node.args[0]) == "'spawn'", path


def test_the_wall_clock_is_read_for_stamps_only() -> None:
    """Whatever waits or expires goes by `time.monotonic`, which no correction of the clock changes."""
    reading = {
        path.name
        for path, node in _nodes()
        if isinstance(node, ast.Attribute)
        and ast.unparse(node) in ("time.time", "time.time_ns", "datetime.now", "datetime.utcnow")
    }
    assert reading <= {
        "bench_report.py",          # when a benchmark began
        "ollama.py", "openai_protocol.py", "responses.py", "responses_body.py",
        "text_model.py",            # when a model was loaded
        "template_renderer.py",     # `strftime_now` of chat templates
        "inference_statistics.py",  # `last_inference`
        "request_spans.py",         # OpenTelemetry's times
    }
