"""Slash completer: the names of commands, and of what follows them: parameters, values, models, files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document

from genserve.cli.chat.chat_session import ChatSession
from genserve.cli.chat.slash_commands import COMMANDS
from genserve.errors import GenserveError
from genserve.sampling.sampling_options import SamplingOptions
from genserve.sampling.sampling_params import SamplingParams


class SlashCompleter(Completer):
    """Completes lines of a chat that begin with /."""

    def __init__(self, session: ChatSession) -> None:
        self._session = session
        self._files = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        """Return what the text before the cursor may go on with."""
        typed = document.text_before_cursor
        if not typed.startswith("/") or "\n" in typed:
            return
        name, space, argument = typed.partition(" ")
        if not space:
            for command, described in COMMANDS.items():
                if command.startswith(typed):
                    yield Completion(command, start_position=-len(typed), display_meta=described.summary)
        elif name in COMMANDS:
            kind = COMMANDS[name].argument
            if kind == "file":
                yield from self._files.get_completions(Document(argument), complete_event)
            elif kind is not None:
                words = _WORDS[kind](self._session, argument)
                begun = argument.rpartition(" ")[2]
                fitting = (word for word in words if word.startswith(begun))
                yield from (Completion(word, start_position=-len(begun)) for word in fitting)


def _parameters(session: ChatSession, argument: str) -> Iterator[str]:
    name, space, value = argument.partition(" ")
    if not space:
        yield from SamplingOptions.__annotations__
    elif " " not in value and name in SamplingOptions.__annotations__:
        yield from _values(session, name)


def _values(session: ChatSession, name: str) -> Iterator[str]:
    """Yield the values of a parameter with few of them, the present one and the default."""
    kind = get_type_hints(SamplingOptions)[name]
    kinds = {kind, *get_args(kind)}
    known: list[Any] = [field.default for field in fields(SamplingParams) if field.name == name]
    known.insert(0, session.options.get(name))
    known += [value for literal in kinds if get_origin(literal) is Literal for value in get_args(literal)]
    known += [True, False] if bool in kinds else []
    seen = []
    for value in known:
        if isinstance(value, (str, bool, int, float)) and value not in seen:
            seen.append(value)
            yield value if isinstance(value, str) else json.dumps(value)
    if type(None) in kinds:
        yield "none"


def _models(session: ChatSession, argument: str) -> Iterator[str]:
    if " " not in argument:
        try:
            yield from session.models.names()
        except GenserveError:   # the server is not there; the command will say so
            return


def _switch(_session: ChatSession, _argument: str) -> Iterator[str]:
    yield from ("on", "off")


_WORDS: dict[str, Callable[[ChatSession, str], Iterator[str]]] = {
    "parameter": _parameters,
    "model": _models,
    "switch": _switch,
}
