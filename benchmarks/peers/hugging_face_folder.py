"""Hugging Face folder: a checkpoint of any kind that `genserve export` reads, as other engines want it.

    python benchmarks/peers/hugging_face_folder.py [SOURCE] FOLDER

SOURCE is that of `genserve export`; without one it is the model of `genserve pull`. The weights are written
as float32, as the exporter sees them, so that all engines start from the same numbers.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from genserve.export.checkpoint_reader import locate, read_checkpoint
from genserve.export.pulling import cache_folder, fetch_gguf
from genserve.export.source_model import source_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("source", nargs="?")
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    path = locate(options.source) if options.source else fetch_gguf(cache_folder())
    checkpoint = read_checkpoint(path, source=path.name)
    source_model(checkpoint).save_pretrained(options.folder)
    for name, content in checkpoint.tokenizer_files.items():
        (options.folder / name).write_bytes(content)
    _tell_older_readers(options.folder / "config.json")
    _name_tokenizer(options.folder / "tokenizer_config.json")


def _tell_older_readers(path: Path) -> None:
    """Name the rotary base where transformers before 5 looks for it; they would take 10,000 otherwise."""
    config = json.loads(path.read_text())
    config |= {"rope_theta": config.get("rope_parameters", {}).get("rope_theta", 10_000.0)}
    path.write_text(json.dumps(config, indent=2) + "\n")


def _name_tokenizer(path: Path) -> None:
    """Say that tokenizer.json is all; by the architecture's own class prompts would have other tokens."""
    config = json.loads(path.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    path.write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    main()
