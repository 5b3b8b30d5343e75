"""Chat templates against transformers' own rendering, and what happens when they fail."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models
from transformers import PreTrainedTokenizerFast

from genserve.errors import InvalidRequest, ModelFailed, RepositoryError
from genserve.request import Message
from genserve.text.chat_template import ChatTemplate

SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}

# As the models of these names have them on the Hugging Face hub, where they differ in what they ask of Jinja.
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
    "three turns": [("system", "S"), ("user", "1+1?"), ("assistant", "2"), ("user", "And 2+2?")],
}


def messages(name: str) -> list[Message]:
    return [Message(role=role, content=content) for role, content in CHATS[name]]  # type: ignore[arg-type]


def reference(source: str, chat: str) -> str:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Backend(models.BPE()), chat_template=source, **SPECIAL_TOKENS
    )
    dicts = [{"role": role, "content": content} for role, content in CHATS[chat]]
    return str(tokenizer.apply_chat_template(dicts, tokenize=False, add_generation_prompt=True))


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, special_tokens=SPECIAL_TOKENS, name="m_tokenizer/1/chat_template.jinja")


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_chat_renders_as_transformers_renders_it(name: str, chat: str) -> None:
    rendered = template(TEMPLATES[name]).render(messages(chat))
    assert rendered == reference(TEMPLATES[name], chat)
    assert "S" in rendered or chat != "three turns"


def test_messages_that_the_template_refuses_are_the_callers_fault() -> None:
    two_questions = [Message(role="user", content="a"), Message(role="user", content="b")]
    with pytest.raises(InvalidRequest, match="roles must alternate") as raised:
        template(TEMPLATES["mistral"]).render(two_questions)
    assert raised.value.field == "messages"


def test_a_part_that_the_messages_lack_is_the_callers_fault() -> None:
    with pytest.raises(InvalidRequest) as raised:
        template("{{ messages[0].tool_calls[0].name }}").render(messages("one question"))
    assert raised.value.field == "messages"


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
def test_a_template_that_fails_by_itself_or_leaves_its_sandbox_is_the_models_fault(source: str) -> None:
    with pytest.raises(ModelFailed, match=r"chat_template\.jinja: the chat template failed"):
        template(source).render(messages("one question"))


def test_a_template_that_is_no_jinja_is_refused_with_its_line() -> None:
    with pytest.raises(RepositoryError, match=r"chat_template\.jinja: line 2 of the chat template"):
        template("first\n{% for %}")
