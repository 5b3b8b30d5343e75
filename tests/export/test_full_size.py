"""Full-size models: random weights of published shapes, exported and served within the memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.tiny_llama import tiny_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {},  # 124M
    "bloom": {"hidden_size": 1024, "n_layer": 24, "n_head": 16},  # 560M; more than 2 GB in float32
}
MAX_GIB = 12

# A separate process, whose peak memory is that of this model.
SCRIPT = """
import json, resource, sys
from pathlib import Path
from genserve import LLM
from genserve.export import SilentProgress, export_model

source, repository, precision = sys.argv[1:]
report = export_model(
    source, repository=Path(repository), name="model", precision=precision, progress=SilentProgress()
)
with LLM(model_repository=repository) as llm:
    answer = llm.generate("the rain in spain", max_tokens=8, ignore_eos=True)
print(json.dumps({
    "difference": report.largest_logit_difference,
    "tokens": answer.usage.completion_tokens,
    "gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
}))
"""


@pytest.fixture(scope="module", params=MODELS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    config = AutoConfig.for_model(request.param, **MODELS[request.param])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, parameter.shape[1] ** -0.5)
    model.save_pretrained(folder, max_shard_size="400MB")
    tiny_tokenizer(vocab_size=320).save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize("precision", ["int8", "fp32"])
def test_a_full_size_model_is_exported_and_served_within_the_memory(
    checkpoint: Path, tmp_path: Path, precision: str
) -> None:
    command = [sys.executable, "-c", SCRIPT, str(checkpoint), str(tmp_path), precision]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    print(f"{checkpoint.name} in {precision}: {found}")
    assert found["tokens"] == 8
    assert found["gib"] < MAX_GIB
    if precision == "fp32":
        assert found["difference"] < 1e-4
