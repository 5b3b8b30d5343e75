"""Receipts of this machine verify under an emulated aarch64, which scripts/aarch64.sh sets up."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from genserve.engine.receipt import receipt_sha256
from genserve.export import SilentProgress, export_model
from genserve.llm import LLM

SCRIPT = Path(__file__).parents[2] / "scripts" / "aarch64.sh"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not (shutil.which("qemu-aarch64-static") and shutil.which("apt-get")),
        reason="needs Debian with qemu-user-static",
    ),
]


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("aarch64")


@pytest.mark.parametrize("precision", ["fp32", "int8", "int4"])
def test_a_receipt_verifies_and_a_changed_byte_is_found(precision, tiny_checkpoint, emulated, tmp_path):
    repository = tmp_path / "repository"
    export_model(
        str(tiny_checkpoint),
        repository=repository,
        name="tiny",
        precision=precision,
        progress=SilentProgress(),
    )
    with LLM("tiny", model_repository=repository) as llm:
        options = {"temperature": 1.5, "max_tokens": 12, "ignore_eos": True, "return_receipt": True}
        answer = llm.chat("Where is it?", **options)
    receipt = answer.usage.receipt
    assert receipt is not None

    def verify(receipt: dict[str, object]) -> tuple[int, str]:
        file = tmp_path / "receipt.json"
        file.write_text(json.dumps(receipt))
        command = [SCRIPT, emulated, "-m", "genserve", "verify", file, "--model-repository", repository]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        return ran.returncode, ran.stderr + ran.stdout     # of the set-up, too

    code, printed = verify(dict(receipt))
    assert (code, printed.splitlines()[-1]) == (0, "equal: 12 tokens and their logits")
    other = dict(receipt) | {"token_ids": [*receipt["token_ids"][:-1], 0]}
    code, printed = verify(other | {"sha256": receipt_sha256(other)})
    assert code == 1
    assert "different: token 11" in printed
    weights = repository / "tiny_logits" / "1" / "model.onnx.data"
    changed = bytearray(weights.read_bytes())
    changed[-1] ^= 1
    weights.write_bytes(changed)
    code, printed = verify(dict(receipt))
    assert code == 2
    assert "of logits" in printed
