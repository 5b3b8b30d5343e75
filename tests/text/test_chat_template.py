"""Chat templates, compared with transformers' rendering, and their failures."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models
from transformers import PreTrainedTokenizerFast

from genserve.errors import InvalidRequest, ModelFailed, RepositoryError
from genserve.prompt import Chat, Message
from genserve.text.chat_template import ChatTemplate

SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}

FILE = "m_tokenizer/1/chat_template.jinja"

# From models of the Hugging Face hub, with different features of Jinja.
TEMPLATES = {
    "chatml, with a default system prompt": (
        "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
        "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM<|im_end|>\n' }}"
        "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "llama 2": (
        "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
        "{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}"
        "{% set system_message = false %}{% endif %}{% for message in loop_messages %}"
        "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Conversation roles must alternate user/assistant/...') }}{% endif %}"
        "{% if loop.index0 == 0 and system_message != false %}"
        "{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}"
        "{% else %}{% set content = message['content'] %}{% endif %}"
        "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
        "{% elif message['role'] == 'assistant' %}{{ ' '  + content.strip() + ' ' + eos_token }}"
        "{% endif %}{% endfor %}"
    ),
    "mistral": """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set ns = namespace() %}
{%- set ns.index = 0 %}
{%- for message in loop_messages %}
    {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
        {{- raise_exception("After the optional system message, roles must alternate user/assistant/") }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" %}
        {%- if tools is not none and tools %}{% continue %}{% endif %}
        {{- " " + message["content"] + eos_token }}
    {%- endif %}
{%- endfor %}
""",
    "zephyr": """{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\n'  + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}
""",
    "json, dates, training marks": (
        "{{ bos_token }}{{ strftime_now('%Y') }}{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}"
        "{% for m in messages %}{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% continue %}"
        "{% endif %}{{ m.content | trim }}{{ m.name }}{% if documents %}D{% endif %}{% endfor %}"
    ),
}

CHATS = {
    "one question": [("user", "Why is the sky blue? <b>\u00e9\u4e16 {{ 7 * 7 }} 'quoted'")],
    "system first": [("system", "Be brief."), ("user", "  Hi \n")],
    "an answer begun": [("user", "1+1?"), ("assistant", " It is  ")],
    "three turns": [("system", "S"), ("user", "1+1?"), ("assistant", "2"), ("user", "And 2+2?")],
}


def messages(name: str, **controls: Any) -> Chat:
    turns = tuple(Message(role=role, content=content) for role, content in CHATS[name])  # type: ignore[arg-type]
    return Chat(messages=turns, **controls)


def reference(source: str, chat: str, **controls: Any) -> str:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Backend(models.BPE()), chat_template=source, **SPECIAL_TOKENS
    )
    dicts = [{"role": role, "content": content} for role, content in CHATS[chat]]
    controls = {"add_generation_prompt": True} | controls
    return str(tokenizer.apply_chat_template(dicts, tokenize=False, **controls))


@lru_cache(maxsize=16)  # each has a process
def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, special_tokens=SPECIAL_TOKENS, name=FILE)


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_chat_renders_as_transformers_renders_it(name: str, chat: str) -> None:
    rendered = template(TEMPLATES[name]).render(messages(chat))
    assert rendered == reference(TEMPLATES[name], chat)
    assert "S" in rendered or chat != "three turns"


def test_a_template_that_is_known_starts_no_process_before_its_first_chat() -> None:
    source = TEMPLATES[next(iter(TEMPLATES))]
    known = template(source)
    same = ChatTemplate(source, special_tokens=SPECIAL_TOKENS, name="another.jinja")
    assert same._process._child is None
    assert (same.variables, same.roles, same.reasoning) == (known.variables, known.roles, known.reasoning)
    chat = messages(next(iter(CHATS)))
    assert same.render(chat) == known.render(chat)
    same.close()
    other = ChatTemplate(source, special_tokens=SPECIAL_TOKENS | {"bos_token": "other"}, name=FILE)
    assert other._process._child is not None
    other.close()


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_chat_renders_without_a_generation_prompt(name: str, chat: str) -> None:
    rendered = template(TEMPLATES[name]).render(messages(chat, add_generation_prompt=False))
    assert rendered == reference(TEMPLATES[name], chat, add_generation_prompt=False)


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_last_message_is_continued_as_in_transformers(name: str, chat: str) -> None:
    expected = reference(TEMPLATES[name], chat, continue_final_message=True, add_generation_prompt=False)
    expected = expected.replace("CONTINUE_FINAL_MESSAGE_TAG ", "")  # for templates that repeat a message
    rendered = template(TEMPLATES[name]).render(messages(chat, continue_final_message=True))
    assert rendered == expected
    assert rendered.rstrip().endswith(CHATS[chat][-1][1].strip())


def test_a_template_that_drops_the_last_message_cannot_continue_it() -> None:
    with pytest.raises(InvalidRequest) as raised:
        template("{{ messages[0].content }}").render(messages("three turns", continue_final_message=True))
    assert raised.value.field == "messages"


def test_a_message_is_either_continued_or_answered() -> None:
    with pytest.raises(InvalidRequest) as raised:
        messages("one question", continue_final_message=True, add_generation_prompt=True)
    assert raised.value.field == "continue_final_message"


THINKING = "{{ messages[0].content }}{% if enable_thinking is defined %}{{ not enable_thinking }}{% endif %}"


@pytest.mark.parametrize("kwargs", [{}, {"enable_thinking": False}, {"enable_thinking": True}])
def test_a_request_sets_the_variables_of_the_template(kwargs: dict[str, bool]) -> None:
    rendered = template(THINKING).render(messages("system first", template_kwargs=kwargs))
    assert rendered == reference(THINKING, "system first", **kwargs)


@pytest.mark.parametrize(
    "name", ["enable_thought", "messages", "add_generation_prompt", "bos_token", "raise_exception", "range"]
)
def test_an_unused_or_reserved_variable_of_a_request_is_rejected(name: str) -> None:
    source = THINKING + "{{ bos_token }}{{ add_generation_prompt }}{{ raise_exception and range }}"
    with pytest.raises(InvalidRequest, match="enable_thinking") as raised:
        template(source).render(messages("one question", template_kwargs={name: 1}))
    assert raised.value.field == f"chat_template_kwargs.{name}"


def test_messages_that_the_template_rejects_are_an_invalid_request() -> None:
    begins_with_an_answer = Chat(messages=(Message(role="assistant", content="a"),))
    with pytest.raises(InvalidRequest, match="roles must alternate") as raised:
        template(TEMPLATES["mistral"]).render(begins_with_an_answer)
    assert raised.value.field == "messages"


def test_a_missing_part_of_the_messages_is_an_invalid_request() -> None:
    with pytest.raises(InvalidRequest, match="'tool_calls'") as raised:
        template("{{ messages[0].tool_calls[0].name }}").render(messages("one question"))
    assert raised.value.field == "messages"


def test_adjacent_lone_surrogates_do_not_become_a_pair() -> None:
    # They are placeholders of special tokens.
    chat = Chat(messages=(Message(role="user", content="\ud800\udc00\U00010000"),))
    assert template("{{ messages[0].content }}").render(chat) == "\ud800\udc00\U00010000"


def test_a_variable_that_is_not_json_serializable_is_rejected() -> None:
    chat = messages("one question", template_kwargs={"enable_thinking": {1, 2}})
    with pytest.raises(InvalidRequest) as raised:
        template(THINKING).render(chat)
    assert raised.value.field == "chat_template_kwargs"


@pytest.mark.parametrize(
    "source",
    [
        "{{ 1 / 0 }}",
        "{{ 'a' + 1 }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% for i in range(1000000) %}{% endfor %}",
    ],
)
def test_a_template_that_fails_or_leaves_its_sandbox_is_a_model_failure(
    source: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ModelFailed, match=r"^the chat template failed") as raised:
        template(source).render(messages("one question"))
    assert FILE not in str(raised.value)
    assert "Error" not in str(raised.value), "nor what Jinja says of it"
    assert f"{FILE}: the chat template failed: " in caplog.text


def test_the_error_for_invalid_jinja_has_the_line() -> None:
    with pytest.raises(RepositoryError, match=r"chat_template\.jinja: line 2 of the chat template"):
        template("first\n{% for %}")
