"""Models by name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from genserve.errors import ExportError
from genserve.export import SilentProgress, export_model, pull

ALREADY_THERE = """
import sys
from pathlib import Path
from genserve.export import SilentProgress, pull
assert pull("smollm2", repository=Path(sys.argv[1]), progress=SilentProgress()) is None
heavy = {"numpy", "torch", "transformers", "onnx", "onnxruntime", "gguf", "huggingface_hub"}
assert not heavy & sys.modules.keys()
"""


def test_a_model_that_is_there_is_not_pulled_and_nothing_heavy_is_loaded_to_see_it(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    export_model(str(tiny_checkpoint), repository=tmp_path, name="smollm2", progress=SilentProgress())
    subprocess.run([sys.executable, "-c", ALREADY_THERE, str(tmp_path)], check=True)


def test_an_unknown_name_is_refused_with_what_is_known(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="gpt5") as caught:
        pull("gpt5", repository=tmp_path, progress=SilentProgress())
    assert "smollm2" in caught.value.remedy
    assert "ORG/NAME" in caught.value.remedy


def test_a_model_of_the_hub_is_called_by_its_lower_case_name(tiny_checkpoint: Path, tmp_path: Path) -> None:
    export_model(str(tiny_checkpoint), repository=tmp_path, name="tiny-llama", progress=SilentProgress())
    assert pull("Some-Org/Tiny-Llama", repository=tmp_path, progress=SilentProgress()) is None
