"""Chat template: chat messages to the one text that a model was trained on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, UndefinedError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from genserve.errors import InvalidRequest, ModelFailed, RepositoryError
from genserve.request import Message

__all__ = ["ChatTemplate"]


class ChatTemplate:
    """A Jinja template in a sandbox, with what `transformers.apply_chat_template` puts around it.

    Args:
        source: the template.
        special_tokens: the variables `bos_token`, `eos_token` and so on.
        name: what messages call the template: its file.

    Raises:
        RepositoryError: the template is no valid Jinja.
    """

    def __init__(self, source: str, *, special_tokens: Mapping[str, str], name: str) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._name = name
        try:
            self._template = _environment().from_string(source)
        except TemplateSyntaxError as error:
            raise RepositoryError(
                f"{name}: line {error.lineno} of the chat template: {error.message}",
                remedy="take the template from the model's original checkpoint",
            ) from None

    def render(self, messages: Sequence[Message]) -> str:
        """The prompt for the assistant's next turn.

        Raises:
            InvalidRequest: the template refuses these messages; `field` is `messages`.
            ModelFailed: the template itself is at fault.
        """
        try:
            return self._template.render(
                messages=[{"role": message.role, "content": message.content} for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._special_tokens,
            )
        except (_RefusedError, UndefinedError) as error:
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {error}", field="messages"
            ) from None
        except Exception as error:  # the template is a program of its own: anything may come out of it
            raise ModelFailed(f"{self._name}: the chat template failed: {error}") from error


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
