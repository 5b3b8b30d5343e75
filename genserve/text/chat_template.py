"""Chat template: chat messages to the one text that a model was trained on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, UndefinedError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from genserve.errors import InvalidRequest, ModelFailed, RepositoryError
from genserve.request import Chat

__all__ = ["ChatTemplate"]

# Stands at the end of a message that is continued; no character, so that no message has it.
_MARK = "\udfff"
# The variables that a request does not set by name.
_OURS = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


class ChatTemplate:
    """A Jinja template in a sandbox, with what `transformers.apply_chat_template` puts around it.

    Args:
        source: the template.
        special_tokens: the variables `bos_token`, `eos_token` and so on.
        name: what messages call the template: its file.

    Attributes:
        source: the template.
        variables: what a request may set beside the messages.

    Raises:
        RepositoryError: the template is no valid Jinja.
    """

    def __init__(self, source: str, *, special_tokens: Mapping[str, str], name: str) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._name = name
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            named = meta.find_undeclared_variables(environment.parse(source))
        except TemplateSyntaxError as error:
            raise RepositoryError(
                f"{name}: line {error.lineno} of the chat template: {error.message}",
                remedy="take the template from the model's original checkpoint",
            ) from None
        self.variables = frozenset(named) - environment.globals.keys() - self._special_tokens.keys() - _OURS

    def render(self, chat: Chat) -> str:
        """The prompt for the assistant's next turn, or for the rest of the last one.

        Raises:
            InvalidRequest: the template refuses these messages, or drops the one that is to be continued:
                `field` is `messages`; or it knows nothing of one of `chat.template_kwargs`.
            ModelFailed: the template itself is at fault.
        """
        for name in chat.template_kwargs:
            self._require_variable(name)
        messages = [message.as_dict() for message in chat.messages]
        if chat.continue_final_message:
            messages[-1]["content"] += _MARK + " "
        rendered = self._render(messages, chat)
        return _up_to_mark(rendered) if chat.continue_final_message else rendered

    def _require_variable(self, name: str) -> None:
        if name not in self.variables:
            field = f"chat_template_kwargs.{name[:128]}"
            known = ", ".join(sorted(self.variables)) or "none"
            remedy = f"its variables are: {known}"
            raise InvalidRequest(f"{field}: the chat template does not use it", field=field, remedy=remedy)

    def _render(self, messages: list[dict[str, str]], chat: Chat) -> str:
        try:
            return self._template.render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=chat.begins_turn,
                **self._special_tokens,
                **chat.template_kwargs,
            )
        except (_RefusedError, UndefinedError) as error:
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {error}", field="messages"
            ) from None
        except Exception as error:  # the template is a program of its own: anything may come out of it
            raise ModelFailed(f"{self._name}: the chat template failed: {error}") from error


def _up_to_mark(rendered: str) -> str:
    """Return what stands before the end of the last message; as transformers finds it."""
    before, mark, after = rendered.rpartition(_MARK)
    if not mark:
        raise InvalidRequest(
            "the model's chat template leaves out the end of the last message", field="messages"
        )
    if not after.startswith(" "):  # the template has trimmed the message
        before = before.rstrip()
    return before.replace(_MARK + " ", "").replace(_MARK, "")  # where it shows the message twice


class _RefusedError(TemplateError):
    """The template called `raise_exception`."""


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's words for training; here it is its content."""

    tags = {"generation"}  # noqa: RUF012  the base class declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment


def _to_json(value: Any, **options: Any) -> str:
    # Jinja's own filter escapes for HTML, which no model was trained on.
    return json.dumps(value, **{"ensure_ascii": False} | options)


def _raise_exception(message: str) -> None:
    raise _RefusedError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
