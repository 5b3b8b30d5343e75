"""Slash commands: run the lines of a chat that begin with /."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Literal, cast

from rich.table import Column, Table
from rich.text import Text

from genserve.cli.chat.alternatives import (
    TokenPicker,
    TokenTexts,
    beginning_text,
    pick_alternative,
    score_last_answer,
)
from genserve.cli.chat.chat_session import ChatSession
from genserve.cli.chat.conversation import read_conversation, save_conversation
from genserve.cli.chat.keyboard import edited
from genserve.cli.chat.side_by_side import compare
from genserve.cli.console import counted, visible
from genserve.cli.flags import read_value
from genserve.completion import CacheMatchEnd
from genserve.errors import closest
from genserve.prompt import Chat
from genserve.sampling.sampling_options import SamplingOptions
from genserve.sampling.sampling_params import sampling_params

_COUNT_COLUMNS = 24     # width of the columns before the messages in the table of /tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class SlashCommand:
    """A slash command, with its help."""

    usage: str
    summary: str
    run: Callable[[ChatSession, str], None]
    argument: Literal["file", "model", "parameter", "switch"] | None = None     # determines the completion


def run_slash(session: ChatSession, line: str) -> None:
    """Run the slash command of a line.

    Raises:
        GenserveError: the command failed; the conversation is unchanged.
        EOFError: the chat ends.
    """
    name, _, argument = line.partition(" ")
    command = COMMANDS.get(_OTHER_NAMES.get(name, name))
    if command is None:
        # Compare names without the slash, which makes all names similar.
        near = closest(name[1:], known=[known[1:] for known in COMMANDS])
        session.note(f"unknown command {name}" + (f"; did you mean /{near}?" if near else "; see /help"))
        return
    command.run(session, argument.strip())


def _help(session: ChatSession, _argument: str) -> None:
    table = Table.grid(padding=(0, 2))
    for command in COMMANDS.values():
        table.add_row(Text(command.usage), Text(command.summary, style="dim"))
    session.print(table)
    session.note(
        'Alt-Enter starts a new line, """ opens and closes a block of lines, Tab completes, Ctrl-R searches '
        "what was typed before, Ctrl-X Ctrl-E opens $EDITOR, Ctrl-C stops an answer. Behind a space, / "
        "begins a message."
    )


def _set(session: ChatSession, argument: str) -> None:
    # The line is NAME VALUE, or NAME=VALUE as for `--set`.
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
    sampling_params(options)
    session.options = cast(SamplingOptions, options)
    session.note(f"{name} = {json.dumps(options[name])}" if name in options else f"{name} is at its default")


def _system(session: ChatSession, argument: str) -> None:
    session.conversation.system = argument or None
    session.note("system prompt set" if argument else "system prompt removed")


def _clear(session: ChatSession, _argument: str) -> None:
    session.conversation.clear()
    session.file = None     # or else /save would write the new conversation to the old file
    session.note("conversation cleared")


def _undo(session: ChatSession, _argument: str) -> None:
    exchange = session.conversation.undo()
    session.note(f"removed: {exchange.question}" if exchange else "nothing to undo")


def _retry(session: ChatSession, _argument: str) -> None:
    if (question := session.conversation.unanswered) is not None:
        session.summarize(session.ask(question))
    elif last := session.conversation.last:
        session.summarize(session.ask_instead(last.question))
    else:
        session.note("nothing to retry")


def _edit(session: ChatSession, _argument: str) -> None:
    unanswered, last = session.conversation.unanswered, session.conversation.last
    before = unanswered or (last.question if last else "")
    question = edited(before).strip()
    if question and question == before:
        session.note("not changed; /retry asks it again")
    elif question:
        is_new = unanswered is not None or last is None
        session.summarize(session.ask(question) if is_new else session.ask_instead(question))
    else:
        session.note("nothing to ask")


def _save(session: ChatSession, argument: str) -> None:
    path = _path(argument) if argument else session.file
    if path is None:
        session.note("usage: /save FILE")
        return
    save_conversation(session.conversation, path, may_replace=path == session.file)
    session.file = path
    session.note(f"saved as {path}")


def _load(session: ChatSession, argument: str) -> None:
    if not argument:
        session.note("usage: /load FILE")
        return
    path = _path(argument)
    session.conversation, is_whole_file = read_conversation(path)
    session.file = path if is_whole_file else None
    rest = "; /save writes them back" if is_whole_file else ", the newest conversation of the chat page"
    session.note(f"loaded {counted(len(session.conversation), 'exchange')}{rest}")
    if last := session.conversation.last:
        session.note(f"> {last.question}")
        session.show(last.answer)


def _path(typed: str) -> Path:
    return Path(os.path.expanduser(typed))  # noqa: PTH111  # Path's raises for an unknown user


def _model(session: ChatSession, argument: str) -> None:
    if argument:
        session.switch(argument)
        session.note(f"{session.model.name} answers from now on")
        return
    for name in session.models.names():
        session.note(f"{'*' if name == session.model.name else ' '} {name}")


def _markdown(session: ChatSession, argument: str) -> None:
    if argument in ("on", "off"):
        session.shows_markdown = argument == "on"
    session.note(f"Markdown is {'rendered' if session.shows_markdown else 'shown as the model writes it'}")


def _tokens(session: ChatSession, argument: str) -> None:
    tokenize = session.model.text_model.tokenize
    if argument:
        token_ids = tokenize(argument, add_special_tokens=False)
        pieces = TokenTexts(session.model.text_model).of(token_ids)
        styles = cycle(("on blue", "on magenta"))
        coloured = zip(map(visible, pieces), styles, strict=False)
        session.print(Text.assemble(*coloured))
        session.note(counted(len(token_ids), "token"))
        return
    messages = session.conversation.messages()
    if not messages:
        session.note("nothing was said yet")
        return
    table = Table.grid(Column(), Column(justify="right"), Column(), padding=(0, 2))
    counts = [len(tokenize(message.content, add_special_tokens=False)) for message in messages]
    for message, count in zip(messages, counts, strict=True):
        beginning = Text(visible(message.content).replace("\n", " "), style="dim")
        beginning.truncate(max(1, session.console.width - _COUNT_COLUMNS), overflow="ellipsis")
        table.add_row(message.role, str(count), beginning)
    used = len(tokenize(Chat(messages=tuple(messages), add_generation_prompt=False)))
    table.add_row("template", str(used - sum(counts)), "", style="dim")
    session.print(table)
    limit = session.model.max_length
    left = f" of {limit}, {max(0, limit - used)} left" if limit else ""
    session.note(f"context {used}{left}")


def _alternatives(session: ChatSession, _argument: str) -> None:
    answer = score_last_answer(session.model, session.conversation)
    picker = TokenPicker(answer, TokenTexts(session.model.text_model))
    if pick_alternative(picker):
        token_ids = answer.beginning(picker.place, picker.choice)
        text, is_whole = beginning_text(session.model, token_ids)
        if is_whole:
            session.cut_last_answer(text, token_ids)
            session.show(text)
            session.note("the answer ends here")
        else:
            session.summarize(session.continue_from(text, token_ids))


def _compare(session: ChatSession, argument: str) -> None:
    name, _, question = argument.partition(" ")
    if name and (question or session.conversation.unanswered or session.conversation.last):
        compare(session, name, question=question.strip() or None)
    else:
        session.note("usage: /compare SEED|MODEL [QUESTION]; without one, the last question is asked again")


def _stats(session: ChatSession, _argument: str) -> None:
    tokens = sum(answer.num_tokens for answer in session.answers)
    answers = counted(len(session.answers), "answer")
    session.note(f"{session.model.name}: {answers}, {counted(tokens, 'token')}")
    if session.answers:
        last = session.answers[-1]
        session.note(f"last: {last.summary(max_length=session.model.max_length)}")
        if timings := last.timing_summary():
            session.note(timings)


def _cache(session: ChatSession, _argument: str) -> None:
    usage = session.answers[-1].usage if session.answers else None
    if usage is None or (match := usage.cache_match) is None:
        session.note("nothing is known: no answer has ended, or the server does not say")
        return
    shared = f"{match.matched_tokens} of {counted(usage.prompt_tokens, 'token')} of the prompt were cached"
    session.note(f"{shared}; {usage.cached_tokens} were used, in whole blocks. {_CACHE_ENDS[match.end]}")
    for name, token_ids in (("prompt", match.prompt_token_ids), ("cached", match.cached_token_ids)):
        if token_ids:
            shown = visible(session.model.text_model.detokenize(token_ids).replace("\n", "⏎"))
            session.print(Text.assemble((f"{name}  ", "dim"), shown))


_CACHE_ENDS = {
    CacheMatchEnd.DIFFERENT: "There the cached prompt goes on differently:",
    CacheMatchEnd.UNKNOWN: "Nothing that goes on like this was cached, or it was evicted since. Next comes:",
    CacheMatchEnd.COMPLETE: "That is all of it: its last token is always read.",
    CacheMatchEnd.OFF: "The cache is not read: prefix_cache is off, or the request asks for prompt_logprobs.",
}


def _bye(_session: ChatSession, _argument: str) -> None:
    raise EOFError


COMMANDS: Mapping[str, SlashCommand] = {
    "/help": SlashCommand(usage="/help", summary="show this help", run=_help),
    "/set": SlashCommand(
        usage="/set [NAME [VALUE]]", summary="show, set or reset a parameter", run=_set, argument="parameter"
    ),
    "/system": SlashCommand(usage="/system [TEXT]", summary="set or remove the system prompt", run=_system),
    "/model": SlashCommand(
        usage="/model [NAME]", summary="show the models, or switch to one", run=_model, argument="model"
    ),
    "/retry": SlashCommand(usage="/retry", summary="ask the last question again", run=_retry),
    "/edit": SlashCommand(usage="/edit", summary="change the last question in $EDITOR", run=_edit),
    "/undo": SlashCommand(usage="/undo", summary="remove the last question and answer", run=_undo),
    "/clear": SlashCommand(usage="/clear", summary="clear the conversation", run=_clear),
    "/save": SlashCommand(
        usage="/save [FILE]", summary="write the conversation to a JSON file", run=_save, argument="file"
    ),
    "/load": SlashCommand(
        usage="/load FILE", summary="go on with a conversation of a file", run=_load, argument="file"
    ),
    "/tokens": SlashCommand(
        usage="/tokens [TEXT]", summary="count the tokens of the messages, or of a text", run=_tokens
    ),
    "/alt": SlashCommand(
        usage="/alt", summary="see other tokens of the last answer, and go on from one", run=_alternatives
    ),
    "/compare": SlashCommand(
        usage="/compare SEED|MODEL [QUESTION]",
        summary="let another one answer beside this, and pick an answer",
        run=_compare,
        argument="model",
    ),
    "/stats": SlashCommand(usage="/stats", summary="show tokens and speed", run=_stats),
    "/cache": SlashCommand(
        usage="/cache", summary="show where the last prompt left the prefix cache", run=_cache
    ),
    "/markdown": SlashCommand(
        usage="/markdown [on|off]", summary="render answers, or not", run=_markdown, argument="switch"
    ),
    "/bye": SlashCommand(usage="/bye", summary="leave, as Ctrl-D does", run=_bye),
}
_OTHER_NAMES = {"/?": "/help", "/exit": "/bye", "/quit": "/bye"}
