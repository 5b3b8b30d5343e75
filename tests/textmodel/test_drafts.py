"""Text models with speculation, compared with the same model without."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from genserve import LLM
from genserve.config.diagnostics import Severity
from genserve.errors import GenserveError
from genserve.prompt import Chat, Message, Tool
from genserve.repository.index import scan
from genserve.repository.model_validation import repository_diagnostics
from genserve.repository.repository import Repository
from genserve.text.harmony import MARKS
from genserve.text.reasoning import THINKING_TAGS
from genserve.text.tool_formats import TOOL_FORMATS
from genserve.textmodel.text_model_loader import looks_up_prompts
from tests.support.model_families import FAMILIES, VOCAB_SIZE
from tests.support.representatives import with_extended
from tests.support.tiny_llama import tiny_tokenizer

PROMPTS = ("the tea that the eater ate at the ", "one two three one two three one two ", "a")

OPTIONS = (
    {},
    {"temperature": 0.8, "seed": 3},
    {"repetition_penalty": 1.2, "logprobs": True},
    {"structured_outputs": {"regex": "(abc|abd){3,40}"}},
    {"stop": ["e"], "temperature": 1.0, "seed": 1},
)


def speculating(repository: Path, root: Path, **parameters: str) -> Path:
    """A copy of the repository with these parameters of `tiny`."""
    shutil.copytree(repository, root)
    config = root / "tiny_logits" / "config.pbtxt"
    for name, value in parameters.items():
        add_parameter(config, name, value)
    return root


def add_parameter(config: Path, name: str, value: str) -> None:
    parameter = f'parameters [ {{ key: "{name}" value {{ string_value: "{value}" }} }} ]\n'
    config.write_text(config.read_text() + parameter)


# By default prompts are looked up.
DRAFTS = [
    {},
    pytest.param({"speculation": "prompt_lookup"}, marks=pytest.mark.extended),
    {"draft_model": "tiny"},
]


def texts_and_steps(repository: Path) -> tuple[list[str], int]:
    """The texts for all prompts and options, and the number of steps that they take."""
    with LLM(model_repository=repository) as llm:
        answers = [
            llm.generate(prompt, max_tokens=60, **options) for options in OPTIONS for prompt in PROMPTS
        ]
        return [answer.text for answer in answers], llm._model.engine.num_steps


@pytest.fixture(scope="module")
def plain(tiny_repository, tmp_path_factory) -> tuple[list[str], int]:
    root = tmp_path_factory.mktemp("plain") / "models"
    return texts_and_steps(speculating(tiny_repository, root, speculation="none"))


@pytest.mark.parametrize("parameter", DRAFTS)
def test_speculation_does_not_change_texts(tiny_repository, tmp_path, plain, parameter):
    texts, num_steps = texts_and_steps(speculating(tiny_repository, tmp_path / "models", **parameter))
    assert texts == plain[0]
    assert num_steps < plain[1]


PUT = Tool(
    name="put",
    parameters={"properties": {"n": {"type": "integer"}, "s": {"type": "string"}}, "required": ["n", "s"]},
)


THOUGHTS = {mark for tags in THINKING_TAGS for mark in tags[:2]}


@pytest.mark.parametrize("form", with_extended(TOOL_FORMATS, always=("hermes", "qwen3_coder")))
def test_speculation_does_not_change_calls(tiny_repository, tmp_path, form):
    call = TOOL_FORMATS[form].written([("put", '{"n": 1, "s": "tea"}')])
    # The marks are tokens, as in models, except those of thoughts, which may be long.
    marks = next((each.marks for each in FAMILIES if each.tool_format == form), ())
    marks = MARKS if form == "harmony" else tuple(mark for mark in marks if mark not in THOUGHTS)
    tokenizer = tiny_tokenizer(vocab_size=VOCAB_SIZE - len(marks))
    tokenizer.add_special_tokens([*marks])
    message = Message(role="user", content="Put it.")
    chat = Chat(messages=(message,), tools=(PUT,), tool_choice="required", parallel_tool_calls=False)
    roots = []
    for speculation in ("none", "prompt_lookup"):
        root = speculating(tiny_repository, tmp_path / speculation, speculation=speculation)
        add_parameter(root / "tiny_decoder" / "config.pbtxt", "tool_format", form)
        template = root / "tiny_tokenizer" / "1" / "chat_template.jinja"
        template.write_text("{{ tools | length }}{{ messages[0].content }}{% raw %}" + call + "{% endraw %}")
        tokenizer.save(str(template.with_name("tokenizer.json")))
        roots.append(root)
    with LLM("tiny", model_repository=roots[0]) as plain, LLM("tiny", model_repository=roots[1]) as drafting:
        for options in ({}, {"temperature": 1.0, "seed": 3}):
            expected, found = (llm.chat(chat, max_tokens=200, **options) for llm in (plain, drafting))
            assert found.token_ids == expected.token_ids
            arguments = [call.arguments for call in expected.tool_calls]
            assert [call.arguments for call in found.tool_calls] == arguments
            # Marks without tokens, as of DeepSeek V3.2, and thoughts of Harmony may take the whole context.
            if form not in ("deepseek_v32", "harmony"):
                assert [call.parsed_arguments().keys() for call in found.tool_calls] == [{"n", "s"}]
        assert drafting._model.engine.num_steps < plain._model.engine.num_steps


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"speculation": "prompt_lookups"}, "method of speculation"),
        ({"draft_model": ""}, "'' is not in the repository"),
        ({"draft_model": "nobody"}, "'nobody' is not in the repository"),
        ({"draft_model": "tiny_logits"}, "'tiny_logits' is not in the repository as a model that generates"),
        ({"draft_model": "tiny", "speculation": "prompt_lookup"}, "has two drafts"),
    ],
)
def test_an_invalid_draft_fails_the_load(tiny_repository, tmp_path, parameters, message):
    root = speculating(tiny_repository, tmp_path / "models", **parameters)
    with pytest.raises(GenserveError, match=message):
        LLM(model_repository=root)


def test_check_reports_the_position_of_an_unknown_draft_model(tiny_repository, tmp_path):
    root = speculating(tiny_repository, tmp_path / "models", draft_model="nobody")
    config = root / "tiny_logits" / "config.pbtxt"
    [diagnostic] = repository_diagnostics([root])["tiny_logits"]
    assert diagnostic.severity is Severity.ERROR
    assert (diagnostic.path, diagnostic.line) == (config, len(config.read_text().splitlines()))


@pytest.mark.parametrize("parameter", [{"speculation": "prompt_lookup"}, {"draft_model": "tiny"}])
def test_a_draft_for_a_stage_without_a_text_model_is_a_warning(tiny_repository, tmp_path, caplog, parameter):
    root = speculating(tiny_repository, tmp_path / "models", **parameter)
    shutil.rmtree(root / "tiny")
    [diagnostic] = repository_diagnostics([root])["tiny_logits"]
    assert diagnostic.severity is Severity.WARNING
    [name] = parameter
    assert diagnostic.message.startswith(f"parameter '{name}' ")
    repository = Repository([root])
    repository.start()
    assert repository.is_ready("tiny_logits")
    repository.close()
    assert diagnostic.message in caplog.text


def test_a_draft_model_with_another_vocabulary_is_rejected(tiny_repository, tmp_path):
    root = speculating(tiny_repository, tmp_path / "models", draft_model="other")
    for stage in ("", "_tokenizer", "_logits", "_decoder"):
        copy = shutil.copytree(tiny_repository / f"tiny{stage}", root / f"other{stage}")
        config = copy / "config.pbtxt"
        config.write_text(config.read_text().replace("tiny", "other"))
    tiny_tokenizer(vocab_size=300).save(str(root / "other_tokenizer" / "1" / "tokenizer.json"))
    with pytest.raises(GenserveError, match="another vocabulary"):
        LLM("tiny", model_repository=root)


@pytest.mark.parametrize(
    ("parameters", "kind", "drafts"),
    [
        ({}, "CPU", True),
        ({}, "GPU", False),
        ({"speculation": "prompt_lookup"}, "GPU", True),
        ({"speculation": "none"}, "CPU", False),
    ],
)
def test_prompt_lookup_is_the_default_on_the_cpu(tiny_repository, tmp_path, parameters, kind, drafts):
    assert has_drafts(speculating(tiny_repository, tmp_path / "models", **parameters), kind=kind) is drafts


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("onnxruntime", "pytorch"),
        (" use_same_buffer_for_input_output: true", ""),  # copied at each step
        ("past_key_values", "hidden"),  # no cache
    ],
)
def test_other_runtimes_draft_only_on_request(tiny_repository, tmp_path, old, new):
    for parameters in ({}, {"speculation": "prompt_lookup"}):
        root = speculating(tiny_repository, tmp_path / str(len(parameters)), **parameters)
        config = root / "tiny_logits" / "config.pbtxt"
        config.write_text(config.read_text().replace(old, new))
        assert has_drafts(root, kind="CPU") is bool(parameters)


def has_drafts(root: Path, *, kind: str) -> bool:
    with (root / "tiny_logits" / "config.pbtxt").open("a") as config:
        config.write(f"instance_group [ {{ kind: KIND_{kind} {'gpus: [ 0 ]' if kind == 'GPU' else ''} }} ]\n")
    resolved = scan([root])["tiny_logits"].config
    assert resolved is not None
    return looks_up_prompts(resolved)
