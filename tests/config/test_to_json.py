"""The JSON of a config, compared with what a real Triton (2.51) showed at `/v2/models/NAME/config`."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf import text_format

from genserve.config.config_json import config_json
from genserve.config.normalise import normalise
from genserve.config.schema import new_model_config

FOLDER = Path(__file__).parent / "recorded"
RECORDED = sorted(file.stem for file in FOLDER.glob("*.json"))
NEWER = ',"max_inflight_requests":0'  # a field that Triton 2.51 did not have


def recorded_json(name: str) -> str:
    return (FOLDER / f"{name}.json").read_text().rstrip("\n")


def normalised(name: str, *, root: Path):
    """The config of a recorded model, with the defaults of a machine without a GPU."""
    folder = root / name
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").touch()
    message = text_format.Parse((FOLDER / f"{name}.pbtxt").read_text(), new_model_config())
    assert normalise(message, model_folder=folder) == ()
    return message


@pytest.mark.parametrize("name", RECORDED)
def test_a_config_is_shown_character_by_character_as_triton_shows_it(name: str, tmp_path: Path) -> None:
    message = normalised(name, root=tmp_path)
    if name == "chain":
        message.model_transaction_policy.decoupled = True  # as one of its steps is
    assert config_json(message).replace(NEWER, "") == recorded_json(name)


def test_maps_are_sorted() -> None:
    message = new_model_config()
    for key in "cab":
        message.metric_tags[key] = key.upper()
    assert '"metric_tags":{"a":"A","b":"B","c":"C"}' in config_json(message)


def test_numbers_have_the_fewest_digits() -> None:
    message = new_model_config()
    control = message.sequence_batching.control_input.add().control.add()
    control.fp32_false_true.extend([0.1, 3e-07])
    message.model_metrics.metric_control.add().histogram_options.buckets.extend([0.1, 5.0])
    text = config_json(message)
    assert '"fp32_false_true":[0.1,3e-07]' in text
    assert '"buckets":[0.1,5]' in text
