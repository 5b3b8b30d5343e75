"""Slash commands: lines of the chat that begin with /."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from genserve.cli.chat_session import ChatSession
from genserve.cli.flags import read_value
from genserve.errors import InvalidRequest, closest
from genserve.sampling.sampling_options import SamplingOptions
from genserve.sampling.sampling_params import sampling_params


@dataclass(frozen=True, slots=True, kw_only=True)
class SlashCommand:
    """A slash command, with its help."""

    usage: str
    summary: str
    run: Callable[[ChatSession, str], None]


def run_slash(session: ChatSession, line: str) -> None:
    """Run the slash command of a line.

    Raises:
        GenserveError: /retry failed; the conversation is unchanged.
        EOFError: the chat ends.
    """
    name, _, argument = line.partition(" ")
    command = COMMANDS.get(name)
    if command is None:
        near = closest(name, known=COMMANDS)
        session.note(f"unknown command {name}" + (f"; did you mean {near}?" if near else "; see /help"))
        return
    command.run(session, argument.strip())


def _help(session: ChatSession, _argument: str) -> None:
    for command in COMMANDS.values():
        session.note(f"{command.usage:<22}{command.summary}")
    session.note('Alt-Enter starts a new line, """ opens and closes a block, Ctrl-C stops an answer.')


def _set(session: ChatSession, argument: str) -> None:
    # NAME VALUE, or NAME=VALUE as with `--set`.
    name, _, value = argument.partition("=" if "=" in argument.partition(" ")[0] else " ")
    if not name:
        changed = sampling_params(session.options).given()
        for known, current in changed.items():
            session.note(f"{known} = {json.dumps(current)}")
        for known, recommended in session.model.default_sampling_params.items():
            if known not in changed:
                session.note(f"{known} = {json.dumps(recommended)}, the default of the model")
                changed[known] = recommended
        defaults = (known for known in SamplingOptions.__annotations__ if known not in changed)
        session.note(f"at their defaults: {', '.join(defaults)}")
        return
    options: dict[str, object] = {known: old for known, old in session.options.items() if known != name}
    if value.strip():
        options[name] = read_value(value.strip())
    elif name in SamplingOptions.__annotations__:
        options |= {known: old for known, old in session.first_options.items() if known == name}
    else:
        options[name] = None
    try:
        sampling_params(options)
    except InvalidRequest as error:
        session.note(str(error))
    else:
        session.options = cast(SamplingOptions, options)
        session.note(
            f"{name} = {json.dumps(options[name])}" if name in options else f"{name} is at its default"
        )


def _system(session: ChatSession, argument: str) -> None:
    session.conversation.system = argument or None
    session.note("system prompt set" if argument else "system prompt removed")


def _clear(session: ChatSession, _argument: str) -> None:
    session.conversation.clear()
    session.note("conversation cleared")


def _undo(session: ChatSession, _argument: str) -> None:
    exchange = session.conversation.undo()
    session.note(f"removed: {exchange.question}" if exchange else "nothing to undo")


def _retry(session: ChatSession, _argument: str) -> None:
    exchange = session.conversation.undo()
    if exchange is None:
        session.note("nothing to retry")
        return
    num_left = len(session.conversation)
    try:
        answer = session.ask(exchange.question)
    finally:
        if len(session.conversation) == num_left:   # it failed, or was stopped before its first token
            session.conversation.add(exchange.question, answer=exchange.answer)
    session.note(answer.summary(max_length=session.model.max_length))


def _save(session: ChatSession, argument: str) -> None:
    if not argument:
        session.note("usage: /save FILE")
        return
    messages = [message.as_dict() for message in session.conversation.messages()]
    try:
        _write_new(
            Path(argument).expanduser(), json.dumps({"messages": messages}, ensure_ascii=False, indent=2)
        )
    except OSError as error:
        session.note(f"not saved: {error}")
    else:
        session.note(f"saved as {argument}")


def _write_new(path: Path, text: str) -> None:
    """Write a new file, atomically."""
    path.open("x").close()
    try:
        path.write_text(text, encoding="utf-8")
    except OSError:
        path.unlink(missing_ok=True)
        raise


def _stats(session: ChatSession, _argument: str) -> None:
    tokens = sum(answer.num_tokens for answer in session.answers)
    session.note(f"{session.model.name}: {len(session.answers)} answers, {tokens} tokens")
    if session.answers:
        session.note(f"last: {session.answers[-1].summary(max_length=session.model.max_length)}")


def _bye(_session: ChatSession, _argument: str) -> None:
    raise EOFError


COMMANDS: Mapping[str, SlashCommand] = {
    "/help": SlashCommand(usage="/help", summary="show this help", run=_help),
    "/set": SlashCommand(usage="/set [NAME [VALUE]]", summary="show, set or reset a parameter", run=_set),
    "/system": SlashCommand(usage="/system [TEXT]", summary="set or remove the system prompt", run=_system),
    "/clear": SlashCommand(usage="/clear", summary="clear the conversation", run=_clear),
    "/undo": SlashCommand(usage="/undo", summary="remove the last question and answer", run=_undo),
    "/retry": SlashCommand(usage="/retry", summary="ask the last question again", run=_retry),
    "/save": SlashCommand(usage="/save FILE", summary="write the chat to a new JSON file", run=_save),
    "/stats": SlashCommand(usage="/stats", summary="show tokens and speed", run=_stats),
    "/bye": SlashCommand(usage="/bye", summary="leave, as Ctrl-D does", run=_bye),
}
