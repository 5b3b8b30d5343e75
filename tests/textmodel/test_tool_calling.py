"""The format of tool calls: from the chat template, from config.pbtxt, or from model.py."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from genserve.completion import Delta, FinishReason, joined_calls
from genserve.errors import GenserveError, InvalidRequest, RepositoryError
from genserve.llm import LLM
from genserve.prompt import Chat, Message, Tool
from genserve.repository.model_validation import repository_diagnostics
from genserve.sampling.sampling_params import sampling_params
from genserve.text.message_parser import MessageParser
from genserve.text.reasoning import ReasoningParser
from genserve.text.tokenizer import Tokenizer
from genserve.text.tool_formats import TOOL_FORMATS
from genserve.textmodel.decoder_stage import load_decoding
from genserve.textmodel.tool_calling import ToolCalling

TOOLS = (Tool(name="now"),)
KNOWS_TOOLS = "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}<tool_call>"
OWN_FORMAT = (
    '{"begin": "<c\u00e4ll>", "before_name": "", "before_arguments": "(", "after_arguments": ")", '
    '"separator": ";", "closing": "</call>"}'
)


@pytest.fixture
def models(tiny_repository: Path, tmp_path: Path) -> Path:
    root = shutil.copytree(tiny_repository, tmp_path / "models")
    (root / "tiny_tokenizer" / "1" / "chat_template.jinja").write_text(KNOWS_TOOLS)
    return root


def declare(models: Path, value: str) -> None:
    file = models / "tiny_decoder" / "1" / "model.py"
    file.write_text(f"{file.read_text()}\nTritonPythonModel.tool_format = {value}\n")


def name_format(models: Path, name: str, *, key: str = "tool_format") -> None:
    file = models / "tiny_decoder" / "config.pbtxt"
    file.write_text(
        f'{file.read_text()}\nparameters {{ key: "{key}" value {{ string_value: "{name}" }} }}\n'
    )


def required_call(models: Path) -> str:
    """Return the text of an answer that must make one call."""
    chat = Chat(
        messages=(Message(role="user", content="?"),),
        tools=TOOLS,
        tool_choice="required",
        parallel_tool_calls=False,
    )
    with LLM("tiny", model_repository=models) as llm:
        answer = llm.chat(chat, max_tokens=120)
        assert [(call.name, call.arguments) for call in answer.tool_calls] == [("now", "{}")]
        return Tokenizer.from_folder(models / "tiny_tokenizer" / "1").decode(answer.token_ids)


def test_marks_that_are_special_tokens_are_written_and_read(models):
    file = models / "tiny_tokenizer" / "1" / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    names = {318: "[TOOL_CALLS]", 319: "[ARGS]"}
    tokenizer["model"]["merges"] = tokenizer["model"]["merges"][:-2]
    vocab = tokenizer["model"]["vocab"].items()
    tokenizer["model"]["vocab"] = {token: i for token, i in vocab if i not in names}
    token = {**tokenizer["added_tokens"][0], "special": True}
    tokenizer["added_tokens"] += [{**token, "id": i, "content": name} for i, name in names.items()]
    file.write_text(json.dumps(tokenizer))
    template = models / "tiny_tokenizer" / "1" / "chat_template.jinja"
    template.write_text("{{ tools | length }}[TOOL_CALLS]x[ARGS]")
    with LLM("tiny", model_repository=models) as llm:
        for choice in ("required", "auto", "none"):
            answers = [
                llm.chat("?", tools=TOOLS, tool_choice=choice, max_tokens=60, temperature=1.0, seed=seed)
                for seed in range(3)
            ]
            for answer in answers:
                assert ("[TOOL_CALLS]" in answer.text) is False
                assert bool(answer.tool_calls) == (318 in answer.token_ids and 319 in answer.token_ids)
                assert {call.arguments for call in answer.tool_calls} <= {"{}"}
            assert any(answer.tool_calls for answer in answers) or choice != "required"
            assert not any(answer.tool_calls for answer in answers) or choice != "none"
            if choice == "required":
                assert {answer.token_ids[0] for answer in answers} == {318}
                assert all(len(call.id) == 9 for answer in answers for call in answer.tool_calls)


@pytest.mark.parametrize(("parallel", "expected"), [(True, 2), (False, 1)])
def test_an_open_thought_ends_with_as_many_calls_as_are_allowed(models, parallel, expected):
    tokenizer = Tokenizer.from_folder(models / "tiny_tokenizer" / "1")
    calling = ToolCalling(tokenizer, tool_format=TOOL_FORMATS["hermes"])
    chat = Chat(messages=(Message(role="user", content="?"),), tools=TOOLS, parallel_tool_calls=parallel)
    reasoning = ReasoningParser(begun=True, new_calls=calling.new_parser(chat))
    parser = MessageParser(reasoning=reasoning, tools=calling.new_parser(chat)())
    text = TOOL_FORMATS["hermes"].written([("now", "{}")] * 2)
    read = parser.read(Delta(text=text, token_ids=(), finish_reason=FinishReason.STOP))
    assert len(joined_calls(read.tool_calls)) == expected


def test_a_model_declares_a_format_of_its_own(models):
    declare(models, OWN_FORMAT)
    assert repository_diagnostics([models])["tiny_decoder"] == ()
    assert required_call(models) == "<c\u00e4ll>now({})</call>"


def test_a_config_names_a_format(models):
    name_format(models, "mistral_args")
    assert repository_diagnostics([models])["tiny_decoder"] == ()
    assert required_call(models) == "[TOOL_CALLS]now[ARGS]{}"


def test_harmony_without_its_tokens_fails_the_load(models):
    name_format(models, "harmony")
    with pytest.raises(GenserveError, match="harmony need the token") as raised:
        LLM("tiny", model_repository=models).close()
    assert "tool_format" in raised.value.remedy


def test_a_config_names_a_format_of_reasoning(models):
    name_format(models, "none", key="reasoning_format")
    assert repository_diagnostics([models])["tiny_decoder"] == ()
    with LLM("tiny", model_repository=models) as llm, pytest.raises(InvalidRequest) as raised:
        llm.chat("?", thinking_token_budget=1, max_tokens=1)
    assert raised.value.field == "thinking_token_budget"


def test_an_unknown_format_of_reasoning_is_reported(models):
    name_format(models, "thinks", key="reasoning_format")
    [diagnostic] = repository_diagnostics([models])["tiny_decoder"]
    assert "'thinks'" in diagnostic.message
    with pytest.raises(GenserveError):
        LLM("tiny", model_repository=models).close()


def test_an_unknown_format_is_reported_and_fails_the_load(models):
    name_format(models, "hermess")
    [diagnostic] = repository_diagnostics([models])["tiny_decoder"]
    assert "'hermess'" in diagnostic.message
    assert "hermes?" in diagnostic.remedy
    assert diagnostic.position
    with pytest.raises(GenserveError, match="hermess"):
        LLM("tiny", model_repository=models)


@pytest.mark.parametrize(
    ("value", "words"),
    [("{'begn': 'x'}", "begn"), ("{'begin': ''}", "mark"), ("{'begin': 3}", "text"), ("3", "int")],
)
def test_a_malformed_format_fails_the_load(models, value, words):
    declare(models, value)
    with pytest.raises(RepositoryError, match=f"tool_format: .*{words}"):
        load_decoding(models / "tiny_decoder" / "1" / "model.py", name="stage")


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ tools }} <tool_call>", "hermes"),
        ("{{ xml_tools }} <tool_call>", "hermes"),
        ("{{ tools }} [TOOL_CALLS] [", "mistral"),
        ("{{ tools }} [TOOL_CALLS] [ARGS]", "mistral_args"),
        ('{{ tools }} {"name": function name, "parameters": dictionary}', "llama3_json"),
        ("{{ tools }}", "hermes"),
        ("{{ messages }} <tool_call>", "smollm2"),
    ],
)
def test_the_template_shows_the_format(models, template, name):
    (models / "tiny_tokenizer" / "1" / "chat_template.jinja").write_text(template)
    tokenizer = Tokenizer.from_folder(models / "tiny_tokenizer" / "1")
    chat = Chat(messages=(Message(role="user", content="?"),), tools=TOOLS)
    grammar = ToolCalling(tokenizer, tool_format=None).grammar(chat, sampling_params({}), may_reason=False)
    assert grammar is not None
    assert grammar.tool_format is TOOL_FORMATS[name]


@pytest.mark.parametrize("field", ["use_beam_search", "ignore_eos", "output_parser"])
def test_parameters_that_tools_exclude_are_named(models, field):
    chat = Chat(messages=(Message(role="user", content="?"),), tools=TOOLS)
    options = {field: {"name": "p"} if field == "output_parser" else True}
    tokenizer = Tokenizer.from_folder(models / "tiny_tokenizer" / "1")
    with pytest.raises(InvalidRequest) as raised:
        ToolCalling(tokenizer, tool_format=None).grammar(chat, sampling_params(options), may_reason=False)
    assert raised.value.field == field
