"""Chat template: chat messages to the prompt that a model was trained on, rendered in a separate process.

`template_renderer.py` is the program of that process.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from genserve.errors import SEE_LOG, InvalidRequest, ModelFailed, RepositoryError
from genserve.prompt import Chat, Message, Tool, ToolCall
from genserve.text.message_roles import MessageRoles, arranged, learn_roles
from genserve.text.reasoning_effort import ReasoningVariables

logger = logging.getLogger(__name__)

# Marks the end of a continued message; a code point that is not a character, so that no message contains it.
_MARK = "\udfff"
_REMEDY = "take the template from the model's original checkpoint"
# The template variables that a request cannot set by name.
_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})

# For templates that need a tool.
_TOOL = Tool(name="probe", description="Finds out what the template takes.")

MAX_CPU_S = 2.0  # to compile a template, or to render a chat, which takes some 0.1 ms
MAX_RENDER_S = 10.0  # wall-clock time, for a busy machine
MAX_START_S = 30.0
MAX_BYTES = 2**29  # memory limit of the process, which starts with 26 MB
# Limits of a prompt: the characters that a template writes itself, more than any needs, and how many times it
# may repeat the content of a request. Tokenizing a million characters takes a second and 100 MB.
MAX_OWN_CHARS = 2**18
MAX_TIMES_SHOWN = 4
# The environment variables that the process gets. No others, which may hold passwords and API keys.
ENVIRONMENT = ("PATH", "TZ", "TZDIR", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Traits:
    """What a template reads and takes; see the attributes of `ChatTemplate`."""

    variables: frozenset[str]
    tools_variable: str | None
    tools_in_system: bool
    roles: MessageRoles
    reasoning: ReasoningVariables


# By template and special tokens. A model that is loaded again, or has the template of another, so needs no
# process before its first chat: its start takes 0.1 s.
_TRAITS: dict[tuple[Any, ...], _Traits] = {}
_MAX_TRAITS = 64


class ChatTemplate:
    """A Jinja template, rendered as by `transformers.apply_chat_template`, in a separate process.

    Safe from any thread.

    Args:
        source: the template.
        special_tokens: the variables `bos_token`, `eos_token` and so on.
        name: the template's file name, for the log.

    Attributes:
        source: the template.
        variables: the names that a request may set in addition to the messages.
        tools_variable: the name of the tools in the template; None: it has no variable for them.
        tools_in_system: whether it shows tools that are a field of the system message, as Phi-4-mini's does.
        reasoning: the variables by which the template controls reasoning.
        roles: which messages the template takes.

    Raises:
        RepositoryError: the template is not valid Jinja, or takes too much time or memory to compile.
    """

    def __init__(self, source: str, *, special_tokens: Mapping[str, str], name: str) -> None:
        self.source = source
        self._name = name
        self._process = TemplateProcess(source, special_tokens=special_tokens)
        # Mistral's templates find the reasoning of earlier messages in their contents only.
        self._thinks_in_blocks = "[THINK]" in source and "reasoning_content" not in source
        self._exceeds = False  # a limit in a try, which the first chat reports
        key = (source, *sorted(special_tokens.items()))
        traits = _TRAITS.get(key)
        if traits is None:
            traits = self._learn()
            if len(_TRAITS) >= _MAX_TRAITS:
                _TRAITS.clear()
            if not self._exceeds:
                _TRAITS[key] = traits
        self.variables = traits.variables
        self.tools_variable = traits.tools_variable
        self.tools_in_system = traits.tools_in_system
        self.roles = traits.roles
        self.reasoning = traits.reasoning

    def render(self, chat: Chat, *, change: Callable[[str], str] = str) -> str:
        """Render the prompt for the assistant's next turn, or for the rest of the last one.

        Args:
            chat: its messages are arranged as the template takes them (see `message_roles.py`), and its tools
                left out if it knows none.
            change: is applied to each text of the request.

        Raises:
            InvalidRequest: the template rejects the messages, or drops the message to continue (`field` is
                `messages`); or it does not use one of `chat.template_kwargs`.
            ModelFailed: the template is broken, or exceeded its limit on time, memory or output. The reason
                is in the log.
        """
        for name in chat.template_kwargs:
            self._require_variable(name)
        variables = self.reasoning.values(chat.reasoning)
        messages = arranged(chat.messages, self.roles)
        if messages is not chat.messages:
            chat = replace(chat, messages=tuple(messages))
        variables |= self.values(chat, change)
        is_cut = self.roles.object_arguments and _has_cut_calls(variables)
        if is_cut and not self._renders(variables):
            variables |= self.values(_with_objects(chat), change)
        if chat.continue_final_message:
            last = variables["messages"][-1]
            last["content"] = (last["content"] or "") + _MARK + " "
        rendered = self._render(variables)
        return _up_to_mark(rendered) if chat.continue_final_message else rendered

    def values(self, chat: Chat, change: Callable[[str], str] = str) -> dict[str, Any]:
        """Return the variables for a chat; see `chat_variables`."""
        variables = chat_variables(
            chat,
            change,
            tools_variable=self.tools_variable,
            object_arguments=self.roles.object_arguments,
        )
        if not self.roles.any_content:
            for message in variables["messages"]:
                if "tool_calls" in message:
                    message["content"] = message["content"] or None
        if self.tools_in_system and (tools := chat.template_tools):
            shown = [map_strings(tool.as_dict()["function"], change) for tool in tools]
            _add_tools(variables["messages"], json.dumps(shown, ensure_ascii=False))
        if self._thinks_in_blocks:
            *before, last = variables["messages"]
            last = last if chat.continue_final_message else _with_blocks(last)
            variables["messages"] = [*map(_with_blocks, before), last]
        return variables

    def close(self) -> None:
        """End the process once it has rendered its current chat; a later `render` starts a new one."""
        self._process.close()

    def _learn(self) -> _Traits:
        try:
            names = self._process.compile()
        except TemplateFailed as error:
            place = "the chat template cannot be compiled: " if isinstance(error, TemplateExceeded) else ""
            raise RepositoryError(f"{self._name}: {place}{error}", remedy=_REMEDY) from None
        # SmolLM3's template has only `xml_tools`.
        tools_variable = next((name for name in ("tools", "xml_tools") if name in names), None)
        return _Traits(
            variables=names - _RESERVED,
            tools_variable=tools_variable,
            tools_in_system=tools_variable is None and self._shows_tools_in_system(),
            roles=self._learn_roles(tools_variable or "tools"),
            reasoning=ReasoningVariables(names - _RESERVED, self._try),
        )

    def _try(self, variables: Mapping[str, Any]) -> str | None:
        """Return what the template writes, by default for a short chat; None: it rejects the variables."""
        chat = {"messages": [{"role": "user", "content": "a"}], "tools": None, "documents": None}
        if self._exceeds:
            return None
        try:
            return self._process.render({**chat, "add_generation_prompt": True, **variables})
        except TemplateExceeded:
            self._exceeds = True
        except (ChatRejected, TemplateFailed):
            pass
        return None

    @property
    def knows_tools(self) -> bool:
        """Whether it shows the tools of a chat."""
        return self.tools_variable is not None or self.tools_in_system

    def _shows_tools_in_system(self) -> bool:
        messages = [{"role": "system", "content": "a"}, {"role": "user", "content": "a"}]
        # A template that writes whole messages, as a few do, escapes the newline.
        _add_tools(messages, probe := "probe\ntools")
        return probe in (self._try({"messages": messages}) or "")

    def _learn_roles(self, tools_variable: str) -> MessageRoles:
        """Return what the template takes, without tools, or else with one, which some templates need."""
        tools: dict[str, Any] = {tools_variable: [_TOOL.as_dict()]}
        roles = learn_roles(lambda messages: self._try({"messages": messages}))
        roles = roles or learn_roles(lambda messages: self._try(tools | {"messages": messages}))
        return roles or MessageRoles()

    def _renders(self, variables: Mapping[str, Any]) -> bool:
        """Whether the template accepts the messages."""
        try:
            self._process.render(variables)
        except (ChatRejected, TemplateFailed, NotSerializable):
            return False
        return True

    def _require_variable(self, name: str) -> None:
        if name not in self.variables:
            field = f"chat_template_kwargs.{name[:128]}"
            known = ", ".join(sorted(self.variables)) or "none"
            remedy = f"its variables are: {known}"
            problem = f"the chat template has no variable {name[:128]!r}"
            raise InvalidRequest(f"{field}: {problem}", field=field, remedy=remedy)

    def _render(self, variables: Mapping[str, Any]) -> str:
        try:
            return self._process.render(variables)
        except ChatRejected as error:
            raise InvalidRequest(
                f"the model's chat template rejects these messages: {error}", field="messages"
            ) from None
        except TemplateFailed as error:
            logger.error("%s: the chat template failed: %s", self._name, error)  # noqa: TRY400  the message is complete
            limits = ": it exceeded its limit on time, memory or output"
            exceeded = limits if isinstance(error, TemplateExceeded) else ""
            raise ModelFailed(f"the chat template failed{exceeded}", remedy=f"{SEE_LOG}; {_REMEDY}") from None
        except NotSerializable as error:  # only a caller in this process can cause it
            field = "chat_template_kwargs"
            raise InvalidRequest(f"{field} must be JSON-serializable: {error}", field=field) from None


def chat_variables(
    chat: Chat, change: Callable[[str], str], *, tools_variable: str | None, object_arguments: bool
) -> dict[str, Any]:
    """Return the variables of a template, the same as transformers' apply_chat_template sets.

    Args:
        chat: to render.
        change: is applied to each text of the request, but not to roles and keys of messages.
        tools_variable: the template's name for the tools; None: leaves the tools out.
        object_arguments: whether the arguments of calls are objects; False: they are text.
    """
    tools = [map_strings(tool.as_dict(), change) for tool in chat.template_tools] or None
    return {
        "messages": [
            _message(message, change, object_arguments=object_arguments) for message in chat.messages
        ],
        "tools": None,
        "documents": None,
        "add_generation_prompt": chat.begins_turn,
        **({tools_variable: tools} if tools_variable else {}),
        **{name: map_strings(value, change) for name, value in chat.template_kwargs.items()},
    }


def _add_tools(messages: list[dict[str, Any]], tools: str) -> None:
    """Add tools to the system message, in the field and the words with which Phi-4-mini was trained."""
    if not messages or messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": "You are a helpful assistant with some tools."})
    messages[0]["tools"] = tools


def _has_cut_calls(variables: Mapping[str, Any]) -> bool:
    """Whether the arguments of a call are a text, which some templates cannot read."""
    calls = (call for message in variables["messages"] for call in message.get("tool_calls", ()))
    return any(isinstance(call["function"]["arguments"], str) for call in calls)


def _with_objects(chat: Chat) -> Chat:
    """Return a chat in which the arguments of a call that was cut are an object of what was written."""

    def whole(call: ToolCall) -> ToolCall:
        if not isinstance(call.shown_arguments(), str):
            return call
        try:
            read = from_json(call.arguments, allow_partial="trailing-strings")
        except ValueError:
            read = None
        return replace(call, arguments=json.dumps(read if isinstance(read, dict) else {}))

    messages = (
        replace(message, tool_calls=tuple(map(whole, message.tool_calls))) for message in chat.messages
    )
    return replace(chat, messages=tuple(messages))


def _message(message: Message, change: Callable[[str], str], *, object_arguments: bool) -> dict[str, Any]:
    """Return a message; the arguments of its calls are objects, unless they were cut, or all are text."""
    fields: dict[str, Any] = message.as_dict()
    for name in fields.keys() - {"role", "tool_calls"}:
        fields[name] = change(fields[name])
    if message.reasoning_content:
        fields["thinking"] = fields["reasoning_content"]  # gpt-oss' and LFM2's name, as in transformers
    if message.tool_calls:
        fields["tool_calls"] = [
            {
                "id": change(call.id),
                "type": "function",
                "function": {
                    "name": change(call.name),
                    "arguments": (
                        map_strings(call.shown_arguments(), change)
                        if object_arguments
                        else change(call.arguments)
                    ),
                },
            }
            for call in message.tool_calls
        ]
    return fields


def _with_blocks(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose reasoning is a block of its content."""
    reasoning = message.get("reasoning_content")
    if reasoning is None:
        return message
    text = [{"type": "text", "text": message["content"]}] if message["content"] else []
    return {**message, "content": [{"type": "thinking", "thinking": reasoning}, *text]}


def map_strings(value: Any, change: Callable[[str], Any]) -> Any:
    """Return a JSON value with `change` applied to each of its strings, the keys of objects included."""
    match value:
        case str():
            return change(value)
        case Mapping():
            return {change(key): map_strings(part, change) for key, part in value.items()}
        case list() | tuple():
            return [map_strings(part, change) for part in value]
    return value


def _up_to_mark(rendered: str) -> str:
    """Return the prompt up to the end of the last message, determined as in transformers."""
    before, mark, after = rendered.rpartition(_MARK)
    if not mark:
        raise InvalidRequest(
            "the model's chat template leaves out the end of the last message", field="messages"
        )
    if not after.startswith(" "):  # the template trims messages
        before = before.rstrip()
    return before.replace(_MARK + " ", "").replace(_MARK, "")  # a template may show the message twice


class TemplateFailed(Exception):
    """The template raised, or is not valid Jinja; the message is for the log."""


class TemplateExceeded(TemplateFailed):
    """The template exceeded a limit on time, memory or output, or its process died or answered nonsense."""


class ChatRejected(Exception):
    """The template rejected the chat; the message is for the client."""


class NotSerializable(Exception):
    """A variable of the template cannot be written as JSON."""


class TemplateProcess:
    """Compiles a template and renders chats one by one in a sandboxed process; safe from any thread.

    A call starts the process if none is running: at first, and after the process ended by `close`, by an
    exceeded limit or by itself. The process ends when its input closes, so it outlives neither this object
    nor the server.
    """

    def __init__(
        self, source: str, *, special_tokens: Mapping[str, str], max_cpu_s: float = MAX_CPU_S
    ) -> None:
        self._max_cpu_s = max_cpu_s
        self._template = _json({"source": source, "special_tokens": dict(special_tokens)})
        self._lock = threading.Lock()  # held while the process is used
        self._child: _Child | None = None
        self._is_closed = False  # the thread that uses the process ends it afterwards
        self._variables: frozenset[str] = frozenset()

    def compile(self) -> frozenset[str]:
        """Return the names of the variables that the template reads and does not set.

        Raises:
            TemplateFailed: the template does not compile.
            TemplateExceeded: the template does not compile within its limits.
        """
        with self._turn():
            return self._variables

    def render(self, variables: Mapping[str, Any]) -> str:
        """Render a prompt from variables, which must be JSON.

        Raises:
            ChatRejected: the template called `raise_exception`, or the chat lacks a part that the template
                needs.
            TemplateFailed: the template raised another exception.
            TemplateExceeded: the template exceeded its limits.
            NotSerializable: the variables cannot be written as JSON.
        """
        try:
            content = _json(variables)
        except (TypeError, ValueError, RecursionError) as error:
            raise NotSerializable(str(error)) from None
        max_chars = MAX_OWN_CHARS + MAX_TIMES_SHOWN * len(content)
        message = b'{"max_chars": %d, "variables": %b}' % (max_chars, content)
        with self._turn() as child:
            return str(child.ask(message, within_s=MAX_RENDER_S))

    def close(self) -> None:
        """End the process once it has rendered its current chat, without waiting for it."""
        self._is_closed = True
        self._end_if_closed()

    def _end_if_closed(self) -> None:
        # A thread that holds the lock ends the process itself after it has released the lock.
        if self._is_closed and self._lock.acquire(blocking=False):
            try:
                self._is_closed = False
                self._end()
            finally:
                self._lock.release()

    @contextmanager
    def _turn(self) -> Iterator[_Child]:
        """Wait for the process, and have it compile the template if it is new.

        Only the model's threads that prepare requests wait here, each for `MAX_RENDER_S` at most.
        """
        self._lock.acquire()
        try:
            if self._child is None or not self._child.alive:
                self._start()
            assert self._child is not None
            yield self._child
        except (ChatRejected, TemplateFailed) as error:
            if isinstance(error, TemplateExceeded):
                self._end()
            raise
        except BaseException:  # such as Ctrl-C, before the answer has come
            self._end()
            raise
        finally:
            self._lock.release()
            self._end_if_closed()

    def _start(self) -> None:
        self._end()
        try:
            child = self._child = _Child(max_cpu_s=self._max_cpu_s)
        except OSError as error:
            raise TemplateExceeded(f"its process failed to start: {error}") from None
        self._finalizer = weakref.finalize(self, child.end)
        try:
            self._variables = frozenset(child.ask(self._template, within_s=MAX_START_S))
        except TemplateFailed:
            self._end()
            raise

    def _end(self) -> None:
        if self._child is not None:
            self._finalizer()
            self._child = None


class _Child:
    """The running process, which answers one call at a time."""

    def __init__(self, *, max_cpu_s: float) -> None:
        self._max_cpu_s = max_cpu_s
        specs = (importlib.util.find_spec(package) for package in ("jinja2", "markupsafe"))
        folders = {str(Path(spec.origin).parents[1]) for spec in specs if spec and spec.origin}
        program = str(Path(__file__).with_name("template_renderer.py"))
        command = [sys.executable, "-I", "-S", program, str(max_cpu_s), str(MAX_BYTES), *folders]
        environment = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
        self._socket, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = subprocess.Popen(
                    command,
                    stdin=theirs.fileno(),
                    stdout=theirs.fileno(),
                    stderr=subprocess.DEVNULL,
                    env=environment,
                )
            except OSError:
                self._socket.close()
                raise

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, message: bytes, *, within_s: float) -> Any:
        """Send a message and return the value of its answer; raises ChatRejected, TemplateFailed."""
        deadline_s = time.monotonic() + within_s
        self._socket.settimeout(within_s)
        try:
            self._socket.sendall(len(message).to_bytes(8) + message)
            size = int.from_bytes(self._receive(8, deadline_s=deadline_s))
            if size > MAX_BYTES:  # more than the memory limit of the process
                raise ValueError(size)
            content = self._receive(size, deadline_s=deadline_s)
            kind, value = json.loads(content.decode(errors="surrogatepass"))
        except TimeoutError:
            raise TemplateExceeded(f"it takes longer than {within_s:g} s") from None
        except (OSError, EOFError):
            raise TemplateExceeded(self._death()) from None
        except (ValueError, TypeError, RecursionError):
            raise TemplateExceeded("its process sent an invalid answer") from None
        match kind:
            case "done":
                return value
            case "rejected":
                raise ChatRejected(value)
            case "failed":
                raise TemplateFailed(value)
        raise TemplateExceeded(value)

    def end(self) -> None:
        """Kill the process; a second call does nothing."""
        self._process.kill()
        self._process.wait()
        self._socket.close()

    def _receive(self, size: int, *, deadline_s: float) -> bytearray:
        content = bytearray(size)
        free = memoryview(content)
        while free:
            self._socket.settimeout(max(1e-3, deadline_s - time.monotonic()))
            num_bytes = self._socket.recv_into(free)
            if num_bytes == 0:
                raise EOFError
            free = free[num_bytes:]
        return content

    def _death(self) -> str:
        self._process.kill()  # the process may only have closed its output
        status = self._process.wait()
        if status == -signal.SIGPROF:
            return f"it takes more than {self._max_cpu_s:g} s of CPU time"
        return f"its process ended with status {status}"


def _json(value: object) -> bytes:
    # Lone surrogates are placeholders in a chat; if escaped, two of them would become a pair.
    return json.dumps(value, ensure_ascii=False).encode(errors="surrogatepass")
