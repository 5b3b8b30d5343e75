"""REPL: the chat on a terminal, with history, completion and multi-line input."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.buffer import Buffer
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import has_focus
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

from genserve.cli.chat_session import ChatSession
from genserve.cli.slash_commands import COMMANDS, run_slash
from genserve.cli.typed_keys import held_keys, terminated_in_order
from genserve.errors import GenserveError

_BLOCK = '"""'


def run_repl(session: ChatSession) -> None:
    """Ask and answer until Ctrl-D or /bye. Errors are printed, and the chat goes on."""
    prompts = _prompt_session()
    session.note(f"{session.model.name} · /help shows the commands · Ctrl-D leaves")
    with terminated_in_order(), held_keys():
        while True:
            try:
                _answer(session, prompts.prompt("> ").strip())
            except KeyboardInterrupt:
                if not prompts.default_buffer.text:
                    session.note("Ctrl-D or /bye leaves")
            except EOFError:
                return
            except GenserveError as error:
                session.report(error)


def history_path() -> Path:
    """Return the history file, in the state folder of the system."""
    if sys.platform == "win32":
        state = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    else:
        state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "genserve" / "history"


def _answer(session: ChatSession, typed: str) -> None:
    if typed.startswith("/"):
        run_slash(session, typed)
        return
    question = typed[len(_BLOCK) : -len(_BLOCK)].strip() if typed.startswith(_BLOCK) else typed
    if question:
        answer = session.ask(question)
        session.note(answer.summary(max_length=session.model.max_length))


def _is_open_block(text: str) -> bool:
    text = text.strip()
    return text.startswith(_BLOCK) and (len(text) < 2 * len(_BLOCK) or not text.endswith(_BLOCK))


def _prompt_session() -> PromptSession[str]:
    return PromptSession(
        history=_history(),
        completer=_SlashCompleter(),
        complete_while_typing=False,
        key_bindings=_key_bindings(),
        multiline=True,
        prompt_continuation="  ",
        reserve_space_for_menu=5,
    )


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

    return keys


class _LenientHistory(FileHistory):
    """A history file whose errors are ignored: an entry that cannot be written lasts for this chat only."""

    def load_history_strings(self) -> Iterable[str]:
        try:
            return super().load_history_strings()
        except OSError:
            return []

    def store_string(self, string: str) -> None:
        with suppress(OSError):
            super().store_string(string)


class _SlashCompleter(Completer):
    """Completes the names of slash commands."""

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        typed = document.text
        if typed.startswith("/"):
            for name, command in COMMANDS.items():
                if name.startswith(typed):
                    yield Completion(name, start_position=-len(typed), display_meta=command.summary)
