"""Export a checkpoint to a model repository: `python scripts/export_onnx.py SOURCE --name NAME`.

It does the same as the command `genserve export`, with the same options.
"""

from __future__ import annotations

import sys

from genserve.cli.main import main

if __name__ == "__main__":
    sys.argv.insert(1, "export")
    main()
