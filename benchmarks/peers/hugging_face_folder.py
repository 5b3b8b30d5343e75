"""Hugging Face folder: converts any checkpoint that `genserve export` reads for other engines.

    python benchmarks/peers/hugging_face_folder.py [SOURCE] FOLDER

SOURCE is the same as for `genserve export`, by default the model of `genserve pull smollm2`. The weights are
written in float32, as the exporter reads them, so that all engines start from the same numbers.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from genserve.export.checkpoint_reader import read_checkpoint
from genserve.export.hub import locate
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
    _set_rope_theta(options.folder / "config.json")
    _set_tokenizer_class(options.folder / "tokenizer_config.json")


def _set_rope_theta(path: Path) -> None:
    """Set the field of transformers before version 5, which would assume 10,000."""
    config = json.loads(path.read_text())
    config |= {"rope_theta": config.get("rope_parameters", {}).get("rope_theta", 10_000.0)}
    path.write_text(json.dumps(config, indent=2) + "\n")


def _set_tokenizer_class(path: Path) -> None:
    """Select the class that only reads tokenizer.json; the architecture's own might encode differently."""
    config = json.loads(path.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    path.write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    main()
