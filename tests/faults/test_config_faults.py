"""Broken configs: each makes its own model unavailable, with a reason, and no other."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.faults.broken_repository import (
    CONFIG,
    BrokenRepository,
    Write,
    serving_beside_good,
    write_model,
)

_LONG = 5_000_000


def _with(text: str | bytes, *, old: str = "") -> Write:
    """Write a good model with this config, or with this text in place of `old`."""
    return partial(write_model, config=CONFIG.replace(old, str(text)) if old else text)


def _config_at(make: Write) -> Write:
    def write(folder: Path) -> None:
        write_model(folder, config=None)
        make(folder / "config.pbtxt")

    return write


_STEP = """{{ model_name: "{0}" model_version: -1
    input_map {{ key: "X" value: "{1}" }} output_map {{ key: "Y" value: "{2}" }} }}"""


def _ensemble(*steps: tuple[str, str, str]) -> Write:
    text = ", ".join(_STEP.format(*step) for step in steps)
    config = CONFIG.replace('backend: "onnxruntime"', 'platform: "ensemble"')
    return partial(write_model, content=None, config=f"{config}ensemble_scheduling {{ step [ {text} ] }}")


# The way to break a config, and words of the reason.
BROKEN: dict[str, tuple[Write, str]] = {
    "unclosed-list": (_with("backend: ["), "config.pbtxt:1:10"),
    "unclosed-string": (_with('backend: "' + "x" * 100_000), "missing ending quote"),
    "stray-brace": (_with(CONFIG + "}"), "config.pbtxt:5:1"),
    "unknown-field": (_with(CONFIG + "colour: 3"), 'no field named "colour"'),
    "unknown-field-5000-deep": (_with(CONFIG + "x { " * 5000), 'no field named "x"'),
    "unknown-field-100000-deep": (_with(CONFIG + "x: " + "[" * 100_000), 'no field named "x"'),
    "longer-than-a-megabyte": (_with(CONFIG + "#" * _LONG), "longer than 1048576 bytes"),
    "300000-entries": (_with(CONFIG + 'parameters { key: "a" }\n' * 300_000), "longer than"),
    "not-utf-8": (_with(CONFIG.encode() + b"# \xff"), "utf-8"),
    "utf-16": (_with(CONFIG.encode("utf-16")), "utf-8"),
    "byte-order-mark": (_with(CONFIG.encode("utf-8-sig")), "byte order mark"),
    "zero-byte": (_with(CONFIG + "\0"), "config.pbtxt:5:1"),
    "zero-byte-in-a-name": (_with(CONFIG + 'default_model_filename: "m\\000x"'), "not a valid file name"),
    "fifo": (_config_at(os.mkfifo), "a FIFO"),
    "folder": (_config_at(Path.mkdir), "a folder"),
    "link-to-a-device": (_config_at(lambda path: path.symlink_to("/dev/zero")), "a device"),
    "link-to-itself": (_config_at(lambda path: path.symlink_to(path.name)), "symbolic links"),
    "link-to-nothing": (_config_at(lambda path: path.symlink_to("nothing")), "No such file"),
    "backend-is-a-path": (_with("../x.so", old="onnxruntime"), "unable to find backend library"),
    "batch-size-beyond-int32": (_with(str(2**31), old="4"), "out of range"),
    "batch-size-is-text": (_with('"4"', old="4"), "config.pbtxt:2:17"),
    "dimension-2-62": (_with(f"[ {2**62} ]", old="[ 2 ]"), "dimension"),
    "64-dimensions": (_with(f"[ {', '.join('2' * 64)} ]", old="[ 2 ]"), "has 64 dimensions"),
    "10000-instances": (_with(CONFIG + "instance_group { count: 10000 }"), "limit is 4096"),
    "version-99-only": (_with(CONFIG + "version_policy { specific { versions: 99 } }"), "version policy"),
    "file-in-another-folder": (_with(CONFIG + 'default_model_filename: "../../good/1/model.onnx"'), "not in"),
    "file-at-the-root": (_with(CONFIG + 'default_model_filename: "/etc/passwd"'), "not in the folder"),
    "step-is-unknown": (_ensemble(("nobody", "X", "Y")), "nobody"),
    "step-is-itself": (_ensemble(("step-is-itself", "X", "Y")), "step-is-itself"),
    "step-is-broken": (_ensemble(("zero-byte", "X", "Y")), "zero-byte"),
    "two-writers": (_ensemble(("good", "X", "Y"), ("good", "X", "Y")), "'Y'"),
    "tensor-from-nowhere": (_ensemble(("good", "Z", "Y")), "'Z'"),
}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokenRepository]:
    models = {name: write for name, (write, _) in BROKEN.items()}
    root = tmp_path_factory.mktemp("configs")
    models |= {"carriage-returns": _with(CONFIG.replace("\n", "\r\n")), "empty": _with("")}
    with serving_beside_good(root, models) as served:
        yield served


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_config_is_listed_with_its_reason_and_harms_no_other(
    repository: BrokenRepository, name: str
) -> None:
    repository.check_broken(name, BROKEN[name][1])
    repository.check_good()


@pytest.mark.parametrize("name", ["carriage-returns", "empty"])
def test_an_unusual_config_that_says_enough_is_served(repository: BrokenRepository, name: str) -> None:
    assert repository.infer(name).json()["outputs"][0]["data"] == [2.0, 2.0]
