"""Waiting deployment: runs genserve with waiting logits stages, as one server or as a Ray Serve application.

    python benchmarks/waiting_deployment.py serve --model-repository model_repository

runs any command of genserve, and Serve imports `build`. A text model is loaded with the tokenizer, the
decoder and the sizes of its configs; its graph is not opened (`waiting_logits.py`). Ray's workers inherit the
environment of the process that starts the cluster, and with it the cost of a step.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

from waiting_logits import SMOLLM2, StepCost, WaitingLogits

from genserve.config.model_config import ModelConfig
from genserve.textmodel import text_model_loader
from genserve.textmodel.logits_config import context_length

__all__ = ["environment"]

_COST = "GENSERVE_BENCHMARK_STEP_COST"
_DEFAULT_LENGTH = 2048
_BLOCK_SIZE = 16
_NUM_ROWS = 64


def environment(cost: StepCost) -> dict[str, str]:
    """Return the environment variables of processes whose logits stages wait as long as `cost` says."""
    folders = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {_COST: json.dumps(asdict(cost)), "PYTHONPATH": os.pathsep.join(folders)}


def build(args: Mapping[str, Any]) -> Any:
    """Return the application of `genserve deploy ray`, with waiting logits stages."""
    from genserve.deploy.ray import application

    class WaitingModel(application.ServedModel):
        """One replica of a model, as Serve calls it."""

        def __init__(self, *args: Any) -> None:
            with waiting_stages():
                super().__init__(*args)

    with patch.object(application, "ServedModel", WaitingModel):
        return application.build(args)


@contextmanager
def waiting_stages() -> Iterator[None]:
    """Load text models, within the block, with waiting logits stages and without speculation."""
    with patch.multiple(
        text_model_loader, load_logits=_load_logits, looks_up_prompts=lambda _config: False
    ):
        yield


def _load_logits(config: ModelConfig, _folder: Path, **_placements: Any) -> WaitingLogits:
    cost = StepCost(**json.loads(os.environ[_COST])) if _COST in os.environ else SMOLLM2
    max_num_seqs, max_length = max(1, config.max_batch_size), context_length(config) or _DEFAULT_LENGTH
    [vocab_size] = (spec.dims[-1] for spec in config.outputs if spec.name == "logits")
    return WaitingLogits(
        cost,
        max_num_seqs=max_num_seqs,
        max_length=max_length,
        block_size=_BLOCK_SIZE,
        num_blocks=max_num_seqs * -(-max_length // _BLOCK_SIZE),
        token_ids=range(vocab_size // 2, vocab_size // 2 + _NUM_ROWS),  # tokens of plain text
        vocab_size=vocab_size,
    )


if __name__ == "__main__":
    from genserve.__main__ import main

    with waiting_stages():
        sys.exit(main())
