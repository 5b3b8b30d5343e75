"""What the models of an ensemble's steps make of it."""

from __future__ import annotations

import shutil

import pytest

from genserve.repository.index import is_decoupled, scan
from genserve.repository.text_stages import text_stages
from tests.repository.test_model_validation import SHIPPED


def test_the_stages_of_a_text_model_are_found_by_their_backends(tmp_path):
    entries = scan([shutil.copytree(SHIPPED, tmp_path / "r")])
    stages = text_stages(entries["smollm2"], entries)
    assert stages is not None
    assert {stage: entry.name for stage, entry in stages.items()} == {
        "tokenizer": "smollm2_tokenizer",
        "logits": "smollm2_logits",
        "decoder": "smollm2_decoder",
    }


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("smollm2_decoder/1/model.py", "# async def decode", "def execute"),
        ("smollm2_logits/config.pbtxt", 'backend: "onnxruntime"', 'backend: "python"'),
        ("smollm2/config.pbtxt", '"smollm2_logits"', '"nobody"'),
        ("smollm2/config.pbtxt", "step [", 'step [ { model_name: "smollm2_tokenizer" },'),
    ],
)
def test_other_ensembles_are_no_text_models(tmp_path, file, old, new):
    root = shutil.copytree(SHIPPED, tmp_path / "r")
    text = (root / file).read_text()
    assert old in text
    (root / file).write_text(text.replace(old, new, 1))
    entries = scan([root])
    assert text_stages(entries["smollm2"], entries) is None


def add(root, name, config):
    (root / name / "1").mkdir(parents=True)
    (root / name / "config.pbtxt").write_text(config)


def test_an_ensemble_is_decoupled_if_a_step_at_any_depth_is(tmp_path):
    def ensemble(of):
        return f'platform: "ensemble" ensemble_scheduling {{ step {{ model_name: "{of}" }} }}'

    add(tmp_path, "one", 'backend: "python"')
    add(tmp_path, "many", 'backend: "python" model_transaction_policy { decoupled: true }')
    add(tmp_path, "over_one", ensemble("one"))
    add(tmp_path, "over_many", ensemble("many"))
    add(tmp_path, "over_both", ensemble("over_many"))
    add(tmp_path, "circle", ensemble("circle"))
    entries = scan([tmp_path])
    assert [name for name in entries if is_decoupled(entries[name], entries)] == [
        "many", "over_both", "over_many",
    ]  # fmt: skip
