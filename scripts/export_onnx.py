"""Export a checkpoint to a model repository: `python scripts/export_onnx.py SOURCE --name NAME`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import get_args

from genserve.export import FileFormat, Precision, export_model


class PrintedProgress:
    """Prints the name of each stage."""

    @contextmanager
    def stage(self, name: str, *, total: int | None = None) -> Iterator[Callable[[int], None]]:
        """Print the name of a stage that begins."""
        del total
        print(name, flush=True)
        yield lambda _units: None


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", help="a Hugging Face folder, a .gguf file, or ORG/NAME on the hub")
    parser.add_argument("--name", required=True, help="of the model in the repository")
    parser.add_argument("--repository", type=Path, default=Path("model_repository"))
    parser.add_argument("--format", dest="file_format", choices=get_args(FileFormat), default="onnx")
    parser.add_argument("--precision", choices=get_args(Precision))
    parser.add_argument("--overwrite", action="store_true", help="replace the weights that are there")
    print(export_model(**vars(parser.parse_args()), progress=PrintedProgress()))
