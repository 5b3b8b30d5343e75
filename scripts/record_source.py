"""Record the results of a checkpoint in transformers, so that exporting it needs no torch or transformers.

    python scripts/record_source.py MODEL.gguf genserve/export/recordings/NAME.npz

The default is the model of `genserve pull smollm2`. See `genserve/export/reference.py`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from transformers import AutoConfig

from genserve.export.checkpoint_reader import read_checkpoint
from genserve.export.conversion import Conversion
from genserve.export.export_options import ExportFormat
from genserve.export.model_folders import ModelFolders
from genserve.export.pulling import cache_folder, fetch_gguf
from genserve.export.reference import Recording
from genserve.export.source_model import run_source
from genserve.files import file_sha256

RECORDING = Path(__file__).parents[1] / "genserve/export/recordings/smollm2.npz"


def record(path: Path) -> Recording:
    """Run the checkpoint at `path`, whose head must be a plain matrix."""
    # int8 smooths more norms than any other precision.
    conversion = Conversion.of(
        read_checkpoint(path, source=path.name),
        folders=ModelFolders("recorded"),
        export_format=ExportFormat.ONNX,
        precision="int8",
    )
    checkpoint, names = conversion.layout.checkpoint, conversion.family.names
    reference = run_source(
        checkpoint, context_length=conversion.decoder.context_length, norms=conversion.norms
    )
    recording = Recording(
        size_bytes=path.stat().st_size,
        sha256=file_sha256(path),
        config=AutoConfig.for_model(**checkpoint.config).to_dict(),
        head=f"{names['embedding' if conversion.decoder.tied else 'head']}.weight",
        ids=reference.ids,
        hidden=reference.hidden,
        activations=reference.activations,
    )
    rows, positions = map(np.ravel, np.indices(reference.ids.shape))
    recorded = recording.reference(checkpoint, norms=()).logits[rows, positions]
    if not np.allclose(recorded, reference.logits[rows, positions], atol=1e-3, rtol=0):
        raise SystemExit(f"the logits of {path} are more than a product with {recording.head}")
    return recording


def main() -> None:
    """Record a file."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("source", type=Path, nargs="?", metavar="MODEL.gguf")
    parser.add_argument("output", type=Path, nargs="?", default=RECORDING)
    options = parser.parse_args()
    options.output.parent.mkdir(exist_ok=True)
    record(options.source or fetch_gguf(cache_folder())).save(options.output)
    print(f"{options.output}: {options.output.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
