"""REPL: runs the chat on a terminal, with history, completion and multi-line input."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from prompt_toolkit import PromptSession
from prompt_toolkit.buffer import Buffer
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import Condition, has_focus
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

from genserve.cli.chat.chat_session import ChatSession, defect
from genserve.cli.chat.keyboard import edited, held_keys
from genserve.cli.chat.slash_commands import COMMANDS, run_slash
from genserve.errors import ContextLengthExceeded, GenserveError
from genserve.sampling.sampling_options import SamplingOptions
from genserve.sampling.sampling_params import SamplingParams

_BLOCK = '"""'


def run_repl(session: ChatSession) -> None:
    """Ask and answer until Ctrl-D or /bye. Errors are printed, and the chat goes on."""
    with held_keys():
        session.note(f"{session.model.name} · /help shows the commands · Ctrl-D leaves")
        prompts = _prompt_session(session)
        with suppress(EOFError):
            while True:
                with suppress(KeyboardInterrupt):   # Ctrl-C between a prompt and an answer
                    if typed := _read(session, prompts):
                        _run(session, typed)


def _read(session: ChatSession, prompts: PromptSession[str]) -> str:
    """Return what the user types; raises EOFError for Ctrl-D."""
    begun = ""
    while True:
        try:
            typed = prompts.prompt([("bold", "> ")], default=begun)
            return typed.encode(errors="replace").decode().rstrip()     # typed bytes may be invalid UTF-8
        except KeyboardInterrupt:
            if not prompts.default_buffer.text:
                session.note("Ctrl-D or /bye leaves")
            return ""
        except _OpenEditor as opened:
            begun = _edited(session, opened.text)


def _edited(session: ChatSession, text: str) -> str:
    try:
        return edited(text)
    except GenserveError as error:
        session.report(error)
        return text


def _run(session: ChatSession, typed: str) -> None:
    try:
        if typed.startswith("/"):
            run_slash(session, typed)
        elif question := _without_quotes(typed.strip()):
            session.summarize(session.ask(question))
    except KeyboardInterrupt:
        session.note("stopped")
    except ContextLengthExceeded as error:
        remedy = "/undo removes the last exchange, and then /retry asks again; /clear removes all of them"
        session.report(ContextLengthExceeded(error.message, remedy=remedy))
    except GenserveError as error:
        session.report(error)
    except EOFError:
        raise
    except Exception as error:  # a defect must not end the conversation
        session.report(defect(error))


def history_path() -> Path:
    """Return the history file, in the state folder of the system."""
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")  # noqa: PTH111
    return Path(state) / "genserve" / "history"


def _without_quotes(text: str) -> str:
    return text[len(_BLOCK) : -len(_BLOCK)].strip() if text.startswith(_BLOCK) else text


def _is_open_block(text: str) -> bool:
    text = text.strip()
    return text.startswith(_BLOCK) and (len(text) < 2 * len(_BLOCK) or not text.endswith(_BLOCK))


def _prompt_session(session: ChatSession) -> PromptSession[str]:
    prompts: PromptSession[str] = PromptSession(
        history=_history(),
        completer=SlashCompleter(session),
        complete_in_thread=True,    # the names of models may come from a server
        complete_while_typing=Condition(lambda: prompts.default_buffer.text.startswith("/")),
        key_bindings=_key_bindings(),
        multiline=True,
        prompt_continuation="  ",
        reserve_space_for_menu=5,
        enable_suspend=True,
    )
    return prompts


class _OpenEditor(Exception):
    """Ctrl-X Ctrl-E was typed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text


def _history() -> History:
    path = history_path()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.touch(mode=0o600)
    except OSError:
        return InMemoryHistory()  # the home folder is not writable
    return _LenientHistory(path)


def _key_bindings() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter", filter=has_focus(DEFAULT_BUFFER))
    def _send(event: KeyPressEvent) -> None:
        buffer: Buffer = event.current_buffer
        if _is_open_block(buffer.text):
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter", filter=has_focus(DEFAULT_BUFFER))
    def _new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("tab", filter=has_focus(DEFAULT_BUFFER))
    def _complete(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        state = buffer.complete_state
        if state is None:
            buffer.start_completion(insert_common_part=True)
        elif len(state.completions) > (state.complete_index is not None):   # otherwise Tab would undo it
            buffer.complete_next()

    @keys.add("c-x", "c-e", filter=has_focus(DEFAULT_BUFFER))
    def _open_editor(event: KeyPressEvent) -> None:
        event.app.exit(exception=_OpenEditor(event.current_buffer.text))

    return keys


class _LenientHistory(FileHistory):
    """A history file that ignores errors: an entry that cannot be written lasts for this chat only."""

    def load_history_strings(self) -> Iterable[str]:
        try:
            return super().load_history_strings()
        except OSError:
            return []

    def store_string(self, string: str) -> None:
        with suppress(OSError):
            super().store_string(string)


class SlashCompleter(Completer):
    """Completes lines that begin with /."""

    def __init__(self, session: ChatSession) -> None:
        self._session = session
        self._files = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        """Return the completions of the text before the cursor."""
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
    """Yield the values of a parameter if they are few, or else its present value and the default."""
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
        except GenserveError:   # the server does not answer, which the command itself will report
            return


def _switch(_session: ChatSession, _argument: str) -> Iterator[str]:
    yield from ("on", "off")


_WORDS: dict[str, Callable[[ChatSession, str], Iterator[str]]] = {
    "parameter": _parameters,
    "model": _models,
    "switch": _switch,
}
