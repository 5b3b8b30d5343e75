"""Message roles: which messages a chat template takes, and a chat in the form that it takes.

Clients send what many templates reject or leave out: several system messages, also in the middle of a chat, a
question directly after another one, or after the results of tools, and ids of calls of any form. Templates
also differ in whether they read the arguments of a call as an object or as JSON text, and some write calls
only if the content beside them is null. What a template takes is learnt from a few chats that it renders when
it is loaded.

No message changes how the ones before it are rendered, so that the prefix of a chat stays in the prefix cache
as the chat grows.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, takewhile
from typing import Any

from genserve.prompt import Message

# How Claude Code marks what is not from the user in the user's turns, which models of today have seen.
_REMINDER = "<system-reminder>\n{}\n</system-reminder>"
_BETWEEN = "\n\n"
_SHORT_ID = re.compile("[A-Za-z0-9]{9}")


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageRoles:
    """What a chat template takes."""

    system: bool = True             # a system message at the beginning
    later_system: bool = True       # system messages after it, in their places
    successive_users: bool = True   # a message of the user after another one
    user_after_results: bool = True     # a message of the user after the results of tools
    any_call_ids: bool = True       # ids of calls that are not nine letters and digits, as Mistral's are
    object_arguments: bool = True   # the arguments of calls as objects; False: as JSON text
    any_content: bool = True        # text beside calls; False: calls only if it is null


_ANY = MessageRoles()


def learn_roles(render: Callable[[list[dict[str, Any]]], str | None]) -> MessageRoles | None:
    """Return what a template takes; None: it does not even render a question.

    Args:
        render: renders messages in OpenAI's JSON; returns None if the template rejects them.
    """

    def places(*roles: str, **call: Any) -> list[int]:
        """Return where the template shows the messages, except answers, or -1 for each one that it drops."""
        messages = _probes(*roles, **call)
        rendered = render(messages) or ""
        return [rendered.find(message["content"]) for message in messages if message["role"] in _SHOWN]

    def takes_objects(content: str | None) -> bool:
        """Whether the template writes arguments from objects; it may fail, or write them as Python does."""
        written = render(_probes(*results, content=content))
        if written is not None and str(_ARGUMENTS) not in written:
            return True
        text = json.dumps(_ARGUMENTS)
        return text not in (render(_probes(*results, arguments=text, content=content)) or "")

    def takes_any_content() -> bool:
        """Whether the template writes calls beside a text, and no second turn for the text behind them."""
        for arguments in (_ARGUMENTS, json.dumps(_ARGUMENTS)):
            null, empty, said = (
                render(_probes(*results, arguments=arguments, content=content)) or ""
                for content in (None, "", _SAID)
            )
            is_behind = said.find(_SAID) > said.find(_VALUE) >= 0
            if null.count(_VALUE) > said.count(_VALUE) or (is_behind and len(empty) > len(null)):
                return False
        return True

    results = ("user", "calls", "tool")
    if -1 in places("user"):
        return None
    any_content = takes_any_content()
    system = places("system", "user")[0] >= 0
    begin = ("system",) if system else ()
    later = places(*begin, "user", "system", "assistant", "user", "assistant", "system", "user")
    content = "" if any_content else None
    object_arguments = takes_objects(content)
    call = {"content": content, "arguments": _ARGUMENTS if object_arguments else json.dumps(_ARGUMENTS)}
    takes_results = -1 not in places(*results, **call)
    return MessageRoles(
        system=system,
        later_system=-1 not in later and later == sorted(later),
        successive_users=-1 not in places("user", "user"),
        user_after_results=not takes_results or -1 not in places(*results, "user", **call),
        any_call_ids=not takes_results or -1 not in places(*results, call_id="call_0123456789abcdef", **call),
        object_arguments=object_arguments,
        any_content=any_content,
    )


# Templates may drop the text of an earlier answer, but not these.
_SHOWN = ("system", "user", "tool")
_VALUE = "probevalue"
_SAID = "probesaid"
_ARGUMENTS = {"probe": _VALUE}


def _probes(*roles: str, **call: Any) -> list[dict[str, Any]]:
    """Return a chat with messages of these roles; `call` has the options of `_probe`."""
    return [_probe(role, index, **call) for index, role in enumerate(roles)]


def _probe(
    role: str,
    index: int,
    *,
    content: str | None = "",
    call_id: str = "probecall",
    arguments: Mapping[str, str] | str = _ARGUMENTS,
) -> dict[str, Any]:
    """Return a message; `content` is that of calls."""
    text = f"probe{index}text"
    match role:
        case "calls":
            function = {"name": "probe", "arguments": arguments}
            calls = [{"id": call_id, "type": "function", "function": function}]
            return {"role": "assistant", "content": content, "tool_calls": calls}
        case "tool":
            return {"role": "tool", "content": text, "tool_call_id": call_id, "name": "probe"}
    return {"role": role, "content": text}


def arranged(messages: Sequence[Message], roles: MessageRoles) -> Sequence[Message]:
    """Return the messages in a form that a template takes; the same object, if it takes any.

    System messages at the beginning become one, or else a part of the first turn of the user. A later one,
    if the template takes none, becomes a part of the message before it, if that is the user's or the result
    of a tool, or else of the one after it; between two answers it is a turn of the user. The text beside
    calls becomes a message of its own, if the template writes either of them only.
    """
    first = [*takewhile(lambda message: message.role == "system", messages)]
    if len(first) < 2 and roles == _ANY:
        return messages
    if not roles.any_content:
        messages = [*chain.from_iterable(map(_with_calls_alone, messages))]
    turns: list[_Turn] = []
    waiting: list[str] = []     # texts for the beginning of the next turn of the user
    if first and roles.system:
        turns.append(_Turn(first[0], [message.content for message in first]))
    else:
        waiting += (message.content for message in first)
    for message in messages[len(first) :]:
        last = turns[-1].message.role if turns and not waiting else ""
        if message.role == "system" and not roles.later_system:
            texts = turns[-1].texts if last in _JOINED else waiting
            texts.append(_REMINDER.format(message.content) if message.content else "")
        elif message.role == "user" and _joins(last, roles):
            turns[-1].texts.append(message.content)
        else:
            if any(waiting) and message.role not in _JOINED:
                turns.append(_Turn(Message(role="user"), waiting))
                waiting = []
            turns.append(_Turn(message, [*waiting, message.content]))
            waiting = []
    if any(waiting):
        turns.append(_Turn(Message(role="user"), waiting))
    whole = (turn.whole() for turn in turns)
    return [*whole] if roles.any_call_ids else [_with_short_ids(message) for message in whole]


def _with_calls_alone(message: Message) -> Sequence[Message]:
    """Return a message whose text beside its calls is a message of its own, before them."""
    if not (message.tool_calls and message.content):
        return [message]
    return replace(message, tool_calls=()), Message(role=message.role, tool_calls=message.tool_calls)


# Later system messages may be parts of messages with these roles.
_JOINED = ("user", "tool")


def _joins(last_role: str, roles: MessageRoles) -> bool:
    """Whether a message of the user has to be a part of the message before it."""
    if last_role == "user":
        return not roles.successive_users
    return last_role == "tool" and not roles.user_after_results


@dataclass(frozen=True, slots=True)
class _Turn:
    message: Message
    texts: list[str]

    def whole(self) -> Message:
        if self.texts == [self.message.content]:
            return self.message
        return replace(self.message, content=_BETWEEN.join(text for text in self.texts if text))


def _with_short_ids(message: Message) -> Message:
    calls = tuple(replace(call, id=_short_id(call.id)) for call in message.tool_calls)
    return replace(message, tool_calls=calls, tool_call_id=_short_id(message.tool_call_id))


def _short_id(call_id: str) -> str:
    """Return an id of nine letters and digits, always the same one for an id."""
    if not call_id or _SHORT_ID.fullmatch(call_id):
        return call_id
    return hashlib.sha256(call_id.encode(errors="surrogatepass")).hexdigest()[:9]
