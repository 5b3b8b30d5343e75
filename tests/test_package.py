from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import genserve


def test_every_public_name_exists_and_is_in_dir() -> None:
    assert dir(genserve) == sorted(genserve.__all__)
    assert all(getattr(genserve, name) is not None for name in genserve.__all__)


def _nodes() -> Iterator[tuple[Path, ast.AST]]:
    for path in sorted(Path(genserve.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            yield path, node


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
