"""Edits change values in a config.pbtxt, and nothing else."""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genserve.config.edit import ConfigChange, change_message, change_text
from genserve.config.parse import parse_message
from genserve.errors import RepositoryError

EXPORTED = Path(__file__).parents[2] / "model_repository" / "smollm2_logits" / "config.pbtxt"


def edit_config(
    text: str, *, fields: dict[str, int | str] | None = None, parameters: dict[str, str] | None = None
) -> str:
    return change_text(text, ConfigChange(fields=fields or {}, parameters=parameters or {}))


def changed_lines(before: str, after: str) -> list[str]:
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), n=0, lineterm="")
    return [line for line in lines if line[:1] in "+-" and line[:3] not in ("+++", "---")]


def test_an_edit_of_an_exported_config_changes_only_its_lines() -> None:
    text = EXPORTED.read_text(encoding="utf-8")
    edited = edit_config(
        text,
        fields={"max_batch_size": 8, "sequence_batching.oldest.max_candidate_sequences": 8},
        parameters={"intra_op_thread_count": "4"},
    )
    assert changed_lines(text, edited) == [
        "-max_batch_size: 32",
        "+max_batch_size: 8",
        '-# parameters [ { key: "intra_op_thread_count" value: { string_value: "2" } } ]',
        '+parameters [ { key: "intra_op_thread_count" value: { string_value: "4" } } ]',
        "-  oldest { max_candidate_sequences: 32 }",
        "+  oldest { max_candidate_sequences: 8 }",
    ]


PARAMETER_FORMS = (
    'parameters {{ key: "{key}" value {{ string_value: {value} }} }}',
    "parameters: {{ key: '{key}', value: {{ string_value: {value} }} }}",
    'parameters < key: "{key}" value < string_value: {value} > >;',
    'parameters [ {{ key: "{key}" value: {{ string_value: {value} }} }} ]',
    'parameters [{{ value {{ string_value: {value} }} key: "{key}" }},\n  # and\n {{ key: "last" }} ]',
    'parameters {{\n  key: "{key}"  # its key\n  value {{\n    string_value: {value}\n  }}\n}}',
)
FIELD_FORMS = (
    "max_batch_size: {value}", "max_batch_size:{value};", "max_batch_size : # many\n  {value} ,"
)
OTHERS = (
    'name: "m" backend: "onnxruntime"',
    "# max_batch_size: 3",
    'input [ { name: "max_batch_size: 7" data_type: TYPE_INT64 dims: [ -1 ] } ]',
    'parameters { key: "a \\" } b" value { string_value: "}" } }',
    "version_policy { latest { num_versions: 1 } }",
    "# \u2028 max_batch_size: 1",
)


@st.composite
def layouts(draw: st.DrawFn) -> str:
    """A config in some order, with some of the values, in one of the ways to write them."""
    value = draw(st.sampled_from(('"1"', "'1'", '"" "1"', '"1"\n # more\n ""')))
    parts = draw(st.lists(st.sampled_from(OTHERS), unique=True))
    if draw(st.booleans()):
        form = draw(st.sampled_from(PARAMETER_FORMS))
        parts.append(form.format(key="intra_op_thread_count", value=value))
    if draw(st.booleans()):
        parts.append(draw(st.sampled_from(FIELD_FORMS)).format(value=draw(st.sampled_from(("4", "0x10")))))
    end = draw(st.sampled_from(("\n", "\r\n")))
    return end.join(draw(st.permutations(parts))).replace("\n", end) + draw(st.sampled_from(("", end)))


@given(layouts(), st.integers(0, 512), st.text(max_size=8))
def test_the_edited_text_has_the_new_values_and_no_other_changes(text: str, size: int, value: str) -> None:
    wanted = parse_message(text)
    wanted.max_batch_size = size
    wanted.parameters["intra_op_thread_count"].string_value = value
    change = ConfigChange(fields={"max_batch_size": size}, parameters={"intra_op_thread_count": value})
    edited = change_text(text, change)
    assert parse_message(edited) == wanted
    message = parse_message(text)
    change_message(message, change)
    assert message == wanted
    kept = [line for line in text.splitlines() if line.startswith("#") and "and" not in line]
    assert all(line in edited for line in kept)
    assert edited.count("\r\n") in (0, edited.count("\n"))


def test_an_equal_value_stays_as_it_is_written() -> None:
    text = "max_batch_size: 0x8 # as many\nparameters { key: 'k' value { string_value: '2' } }"
    assert edit_config(text, fields={"max_batch_size": 8}, parameters={"k": "2"}) == text


def test_an_enum_is_written_by_its_name() -> None:
    text = "input [ { data_type: TYPE_FP32 }, { data_type: TYPE_FP32 } ] input { data_type: TYPE_INT8 }"
    edited = edit_config(text, fields={"input[1].data_type": "TYPE_FP16", "input[2].data_type": "TYPE_FP16"})
    assert edited == text.replace("FP32 } ]", "FP16 } ]").replace("INT8", "FP16")


def test_the_last_of_two_entries_with_a_key_is_edited() -> None:
    text = "".join(f'parameters {{ key: "k" value {{ string_value: "{i}" }} }}\n' for i in range(2))
    assert edit_config(text, parameters={"k": "5"}) == text.replace('"1"', '"5"')


def test_a_parameter_in_a_longer_comment_stays_there() -> None:
    text = '# such as parameters [ { key: "k" value: { string_value: "2" } } ]\n'
    edited = edit_config(text, parameters={"k": "3"})
    assert edited == text + 'parameters [ { key: "k" value: { string_value: "3" } } ]\n'


@pytest.mark.parametrize("text", ["max_batch_size: ", "no such field: 1"])
def test_a_text_that_cannot_be_read_is_not_edited(text: str) -> None:
    with pytest.raises(RepositoryError) as raised:
        edit_config(text, fields={"max_batch_size": 8})
    assert "max_batch_size: 8" in raised.value.remedy


def test_a_field_of_a_missing_message_is_not_added() -> None:
    field = "sequence_batching.oldest.max_candidate_sequences"
    with pytest.raises(RepositoryError) as raised:
        edit_config("", fields={field: 8})
    assert f"{field}: 8" in raised.value.remedy
