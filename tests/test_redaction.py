from __future__ import annotations

import json
import logging
import sysconfig
import tempfile
from pathlib import Path

import pytest

from genserve.errors import ConfigError, InvalidRequest, Overloaded
from genserve.redaction import redact_repositories, redacted_error, redacted_text


@pytest.mark.parametrize(
    ("text", "redacted"),
    [
        ("{root}/m/config.pbtxt:12:3: bad", "m/config.pbtxt:12:3: bad"),
        ("models in {root}: a, b", "models in the model repository: a, b"),
        ("cannot open '/home/jane doe/models/x.onnx'", "cannot open 'x.onnx'"),
        ("Load from {root}/m/1/model.onnx failed:{root}/m/x", "Load from m/1/model.onnx failed:m/x"),
        ("[Errno 2] No such file: '{root}/m/w.bin'", "[Errno 2] No such file: 'm/w.bin'"),
        ("{tmp}/genserve-a_1b/m/1/model.py(3): execute", "m/1/model.py(3): execute"),
        ("{packages}/numpy/core.py(12): f", "numpy/core.py(12): f"),
        (f"{json.__file__}(3): loads", "json/__init__.py(3): loads"),
        ("no '/home/ann/weights.bin', nor /etc/passwd.", "no 'weights.bin', nor passwd."),
        ("{root}-old/m/x", "x"),
        ("file:///srv/data/x", "x"),
        ("in {tmp}", "in {last_of_tmp}"),
        ("in {at_root}/of/another/model.bin", "in model.bin"),
    ],
)
def test_paths_become_relative_to_the_repository_or_their_last_part(tmp_path: Path, text, redacted) -> None:
    root = tmp_path / "models"
    redact_repositories([root])
    tmp = tempfile.gettempdir()
    at_root = next(path for path in sorted(Path("/").iterdir()) if path.is_dir())
    names = {"root": root, "tmp": tmp, "last_of_tmp": Path(tmp).name, "at_root": at_root}
    expected = redacted.format(**names)
    assert redacted_text(text.format(packages=sysconfig.get_path("purelib"), **names)) == expected


def test_a_linked_repository_is_known_by_both_paths(tmp_path: Path) -> None:
    (tmp_path / "my models").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "my models")
    redact_repositories([tmp_path / "link"])
    assert redacted_text(f"{tmp_path}/link/m/1 {tmp_path}/my models/m/2") == "m/1 m/2"


@pytest.mark.parametrize(
    "text",
    [
        "call ModelStreamInfer, or POST /v2/models/NAME/generate_stream over HTTP",
        "GET /docs lists the routes",
        "Unable to open shared memory region: '/my_region'",
        "no server answers at http://localhost:8000/tmp/x",
        "1/model.py, a/tmp/b, ../tmp, 5 km /h, and/or",
    ],
)
def test_texts_that_are_not_paths_are_unchanged(text: str) -> None:
    assert redacted_text(text) == text


def test_a_traceback_is_reduced_to_its_exception() -> None:
    torch = (
        'It failed.\nTraceback of TorchScript, the code (most recent call last):\n  File "/a.py", line 5\n'
        "    def forward(self, x):\n           ~~~ <--- HERE\n\nRuntimeError: shapes (2x3)\n"
    )
    assert redacted_text(torch) == "It failed.\nRuntimeError: shapes (2x3)\n"
    python = 'message: Traceback (most recent call last):\n  File "/a.py", line 5, in f\n    x()\nKeyError: 1'
    assert redacted_text(python) == "message: KeyError: 1"


def test_a_redacted_error_keeps_its_class_and_the_log_has_the_full_text(caplog) -> None:
    error = ConfigError("no name", where="/srv/m/config.pbtxt:1:1", remedy="see /etc/x")
    with caplog.at_level(logging.DEBUG, logger="genserve"):
        redacted = redacted_error(error)
    assert type(redacted) is ConfigError
    assert (redacted.message, redacted.remedy) == ("config.pbtxt:1:1: no name", "see x")
    assert redacted.status is error.status
    assert str(error) == "/srv/m/config.pbtxt:1:1: no name (see /etc/x)"
    assert str(error) in caplog.text


def test_an_error_without_paths_is_returned_unchanged() -> None:
    for error in (InvalidRequest("no", field="n"), Overloaded("full", retry_after_s=3)):
        assert redacted_error(error) is error
