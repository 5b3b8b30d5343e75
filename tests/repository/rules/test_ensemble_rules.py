"""The steps of an ensemble: positions and remedies; Triton's own words are in test_refusals.py."""

from __future__ import annotations

import pytest

from tests.repository.test_model_validation import reported, shipped_with_files

OUTPUT_OF_LOGITS = 'output_map { key: "logits" value: "logits" }'


def step(backend_stage: str) -> str:
    return f'model_name: "smollm2_{backend_stage}"'


@pytest.mark.parametrize(
    ("old", "new", "golden"),
    [
        (step("logits"), step("logit"),
         ["36:7: error: ensemble smollm2 contains models that are not available or ambiguous: "
          "smollm2_logit; did you mean smollm2_logits?"]),
        (f"{step('logits')}\n      model_version: -1", f"{step('logits')}\n      model_version: 2",
         ["37:7: error: ensemble 'smollm2' depends on 'smollm2_logits' whose required version 2 is not "
          "loaded.; write `model_version: -1` for the latest; served versions: 1"]),
        ('      input_map { key: "logits" value: "logits" }\n', "",
         ["39:7: error: ensemble tensor 'logits' is unused in ensemble 'smollm2'; remove it from the "
          "`output_map`, or add it to the ensemble's `output`",
          "41:5: error: in ensemble smollm2, input logits in model smollm2_decoder is not mapped to any "
          'ensemble tensors; add `input_map { key: "logits" value: ... }`']),
        ('input_map { key: "top_p" value', 'input_map { key: "topp" value',
         ["52:7: error: in ensemble smollm2, ensemble tensor top_p is mapping to non-existing input topp in "
          "model smollm2_decoder; did you mean top_p?"]),
        (OUTPUT_OF_LOGITS, OUTPUT_OF_LOGITS.replace('key: "logits"', 'key: "logit"'),
         ["39:7: error: in ensemble smollm2, ensemble tensor logits is mapped from non-existing output logit "
          "in model smollm2_logits; did you mean logits?"]),
        ('value: "text_output"', 'value: "text"',
         ["26:12: error: ensemble output 'text_output' for ensemble smollm2' is not used; did you mean "
          "text_input?",
          "62:7: error: ensemble tensor 'text' is unused in ensemble 'smollm2'; remove it from the "
          "`output_map`, or add it to the ensemble's `output`"]),
        ("ensemble_scheduling {", "ensemble_scheduling { max_inflight_requests: 4",
         ["27:23: warning: max_inflight_requests is ignored: one engine runs the stages, and requests "
          "do not wait between them; leave it out; --max-queue limits the requests that wait for the "
          "engine"]),
        ("max_batch_size: 32", "max_batch_size: 64",
         ["30:7: error: ensemble smollm2 allows maximum batch size 64, but it contains model "
          "smollm2_tokenizer which only allows maximum batch size to be 32; write `max_batch_size: 32` in "
          "the ensemble, or more in the model",
          "36:7: error: ensemble smollm2 allows maximum batch size 64, but it contains model smollm2_logits "
          "which only allows maximum batch size to be 32; write `max_batch_size: 32` in the ensemble, or "
          "more in the model",
          "42:7: error: ensemble smollm2 allows maximum batch size 64, but it contains model "
          "smollm2_decoder which only allows maximum batch size to be 32; write `max_batch_size: 32` in the "
          "ensemble, or more in the model"]),
        ('name: "top_p" data_type: TYPE_FP32 dims: [ 1 ]', 'name: "top_p" data_type: TYPE_FP16 dims: [ 2 ]',
         ["52:7: error: in ensemble smollm2, ensemble tensor top_p: inconsistent data type: TYPE_FP16 "
          "is inferred from model smollm2 while TYPE_FP32 is inferred from model smollm2_decoder; both "
          "configs must agree; -1 fits any size"]),
    ],
)  # fmt: skip
def test_an_inconsistent_ensemble_is_reported_with_a_position(tmp_path, old, new, golden):
    root = shipped_with_files(tmp_path / "r")
    config = root / "smollm2" / "config.pbtxt"
    text = config.read_text()
    assert old in text
    config.write_text(text.replace(old, new, 1))
    assert reported(root) == [f"smollm2/config.pbtxt:{line}" for line in golden]


def test_a_broken_stage_is_reported_for_the_stage_only(tmp_path):
    root = shipped_with_files(tmp_path / "r")
    (root / "smollm2_logits" / "config.pbtxt").write_text('backend: "onnxruntim"')
    (root / "smollm2_decoder" / "config.pbtxt").write_text("name: 5")
    assert [line.partition(";")[0] for line in reported(root)] == [
        "smollm2_decoder/config.pbtxt:1:7: error: Expected string but found: '5'",
        "smollm2_logits/config.pbtxt:1:1: error: unable to find backend library for backend 'onnxruntim', "
        "try specifying runtime on the model configuration.",
    ]


def add(root, name, config):
    (root / name / "1").mkdir(parents=True)
    (root / name / "config.pbtxt").write_text(config)


def ensemble_of_ensembles(inner_output: str) -> str:
    tensors = '{{ name: "{}" data_type: TYPE_FP32 dims: 4 }}'
    return (
        f'platform: "ensemble" input {tensors.format("IN")} output {tensors.format("OUT")}\n'
        'ensemble_scheduling { step { model_name: "inner" model_version: -1 '
        f'input_map {{ key: "IN" value: "IN" }} output_map {{ key: "{inner_output}" value: "OUT" }} }} }}'
    )


def test_a_step_may_be_an_ensemble(tmp_path):
    tensors = ensemble_of_ensembles("OUT").splitlines()[0].removeprefix('platform: "ensemble"')
    add(tmp_path, "model", 'backend: "python"' + tensors)
    (tmp_path / "model" / "1" / "model.py").write_text("class TritonPythonModel: ...")
    add(tmp_path, "inner", ensemble_of_ensembles("OUT").replace('"inner"', '"model"'))
    add(tmp_path, "outer", ensemble_of_ensembles("OUT"))
    assert reported(tmp_path) == []
    (tmp_path / "outer" / "config.pbtxt").write_text(ensemble_of_ensembles("NOPE"))
    assert reported(tmp_path) == [
        "outer/config.pbtxt:2:104: error: in ensemble outer, ensemble tensor OUT is mapped from non-existing "
        "output NOPE in model inner; known there: OUT"
    ]
