"""The steps of an ensemble: each broken one with its golden messages."""

from __future__ import annotations

import pytest

from tests.repository.test_check import shipped_with_files, told

OUTPUT_OF_LOGITS = 'output_map { key: "logits" value: "logits" }'


def step(backend_stage: str) -> str:
    return f'model_name: "smollm2_{backend_stage}"'


@pytest.mark.parametrize(
    ("old", "new", "golden"),
    [
        (step("logits"), step("logit"),
         ["26:7: error: a step names the model 'smollm2_logit', and the repository has none of this name; "
          "did you mean smollm2_logits?"]),
        ('step [\n', 'step [\n { model_name: "smollm2_tokenizer" input_map { key: "text_input" value: '
         '"text_input" } output_map { key: "input_ids" value: "more_ids" } },\n',
         ["17:1: error: the ensemble is not a chain of a tokenizer, a logits and a decoder stage: "
          "smollm2_tokenizer, smollm2_tokenizer, smollm2_logits, smollm2_decoder; give it three steps whose "
          "backends are 'tokenizer', 'onnxruntime' and 'python'"]),
        (f"{step('logits')}\n      model_version: -1", f"{step('logits')}\n      model_version: 2",
         ["27:7: error: model_version 2 of 'smollm2_logits' is not honoured: 1, the highest, would be "
          "served; write -1, and move the folders of higher versions away"]),
        ('      input_map { key: "logits" value: "logits" }\n', "",
         ["31:5: error: the step 'smollm2_decoder' does not map the input 'logits', which is not optional; "
          'add `input_map { key: "logits" value: ... }`']),
        ('input_map { key: "top_p" value', 'input_map { key: "topp" value',
         ["38:7: error: the model 'smollm2_decoder' has no input 'topp'; did you mean top_p?"]),
        (OUTPUT_OF_LOGITS, OUTPUT_OF_LOGITS.replace('key: "logits"', 'key: "logit"'),
         ["29:7: error: the model 'smollm2_logits' has no output 'logit'; did you mean logits?"]),
        (OUTPUT_OF_LOGITS, "",
         ["34:7: error: nobody makes the tensor 'logits' that the step 'smollm2_decoder' takes; known there: "
          "text_input, max_tokens, temperature, top_k, top_p, stop_words, random_seed, stream, input_ids, "
          "text_output"]),
        ('value: "text_output"', 'value: "text"',
         ["16:12: error: no step makes the output 'text_output'; did you mean text_input?"]),
        ('value: "text_output"', 'value: "input_ids"',
         ["42:7: error: the tensor 'input_ids' is made more than once; give each output of a step a name of "
          "its own",
          "16:12: error: no step makes the output 'text_output'; did you mean text_input?",
          "25:5: error: these steps wait for each other's tensors: 'smollm2_logits', 'smollm2_decoder'; "
          "break the circle: a step takes what the ensemble or an earlier step makes"]),
    ],
)  # fmt: skip
def test_an_ensemble_that_does_not_hold_together_is_told_where(tmp_path, old, new, golden):
    root = shipped_with_files(tmp_path / "r")
    config = root / "smollm2" / "config.pbtxt"
    text = config.read_text()
    assert old in text
    config.write_text(text.replace(old, new, 1))
    assert told(root) == [f"smollm2/config.pbtxt:{line}" for line in golden]


def test_steps_that_wait_for_each_other_are_told(tmp_path):
    root = shipped_with_files(tmp_path / "r")
    config = root / "smollm2" / "config.pbtxt"
    map_of_tokenizer = '{ key: "text_input" value: "text_%sput" }'
    config.write_text(config.read_text().replace(map_of_tokenizer % "in", map_of_tokenizer % "out"))
    assert told(root) == [
        "smollm2/config.pbtxt:19:5: error: these steps wait for each other's tensors: 'smollm2_tokenizer', "
        "'smollm2_logits', 'smollm2_decoder'; break the circle: a step takes what the ensemble or an earlier "
        "step makes"
    ]


def test_a_stage_that_is_broken_is_told_with_the_stage_alone(tmp_path):
    root = shipped_with_files(tmp_path / "r")
    (root / "smollm2_logits" / "config.pbtxt").write_text('backend: "onnxruntim"')
    (root / "smollm2_decoder" / "config.pbtxt").write_text("name: 5")
    assert told(root) == [
        "smollm2_decoder/config.pbtxt:1:7: error: Expected string but found: '5'; ",
        "smollm2_logits/config.pbtxt:1:1: error: there is no backend 'onnxruntim'; did you mean onnxruntime?",
    ]
