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
from pathlib import Path
from typing import Any

from genserve.errors import SEE_LOG, InvalidRequest, ModelFailed, RepositoryError
from genserve.prompt import Chat, Message

logger = logging.getLogger(__name__)

# Marks the end of a continued message; a code point that is not a character, so that no message contains it.
_MARK = "\udfff"
_REMEDY = "take the template from the model's original checkpoint"
# The variables that a request does not set by name.
_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})

MAX_CPU_S = 2.0             # to compile a template, or to render a chat, which takes some 0.1 ms
MAX_RENDER_S = 10.0         # wall-clock time, for a busy machine
MAX_START_S = 30.0
MAX_BYTES = 2**29           # of the process, which starts with 26 MB
# Limits of a prompt: the characters that a template writes itself, more than any needs, and how many times it
# may repeat the content of a request. Tokenizing a million characters takes a second and 100 MB.
MAX_OWN_CHARS = 2**18
MAX_TIMES_SHOWN = 4
# The environment variables that it gets; others may hold passwords and API keys.
ENVIRONMENT = ("PATH", "TZ", "TZDIR", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")


class ChatTemplate:
    """A Jinja template, rendered as by `transformers.apply_chat_template`, in a separate process.

    Safe from any thread.

    Args:
        source: the template.
        special_tokens: the variables `bos_token`, `eos_token` and so on.
        name: of its file, for the log.

    Attributes:
        source: the template.
        variables: the names that a request may set in addition to the messages.
        tools_variable: the name of the tools in the template; None: it knows no tools.

    Raises:
        RepositoryError: the template is not valid Jinja, or takes too much time or memory to compile.
    """

    def __init__(self, source: str, *, special_tokens: Mapping[str, str], name: str) -> None:
        self.source = source
        self._name = name
        self._process = TemplateProcess(source, special_tokens=special_tokens)
        try:
            names = self._process.compile()
        except TemplateFailed as error:
            place = "the chat template cannot be compiled: " if isinstance(error, TemplateExceeded) else ""
            raise RepositoryError(f"{name}: {place}{error}", remedy=_REMEDY) from None
        self.variables = names - _RESERVED
        # SmolLM3 has the latter only.
        self.tools_variable = next((name for name in ("tools", "xml_tools") if name in names), None)

    def render(self, chat: Chat, *, change: Callable[[str], str] = str) -> str:
        """Render the prompt for the assistant's next turn, or for the rest of the last one.

        Args:
            chat: its tools are left out if the template knows none.
            change: of each text of the request.

        Raises:
            InvalidRequest: the template rejects these messages, or drops the message to continue (`field` is
                `messages`); or it does not use one of `chat.template_kwargs`.
            ModelFailed: the template is broken, or exceeded its limit on time, memory or output. The log has
                the reason.
        """
        for name in chat.template_kwargs:
            self._require_variable(name)
        variables = chat_variables(chat, change, tools_variable=self.tools_variable)
        if chat.continue_final_message:
            variables["messages"][-1]["content"] += _MARK + " "
        rendered = self._render(variables)
        return _up_to_mark(rendered) if chat.continue_final_message else rendered

    def close(self) -> None:
        """End the process after the chat that it renders now; a later `render` starts another."""
        self._process.close()

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
        except NotSerializable as error:    # only from a caller in this process
            field = "chat_template_kwargs"
            raise InvalidRequest(f"{field} must be JSON-serializable: {error}", field=field) from None


def chat_variables(
    chat: Chat, change: Callable[[str], str], *, tools_variable: str | None
) -> dict[str, Any]:
    """Return the variables of a template, as those of transformers' apply_chat_template.

    Args:
        chat: to render.
        change: of each text of the request; roles and keys of messages stay.
        tools_variable: the name of the tools; None: without them.
    """
    tools = [map_strings(tool.as_dict(), change) for tool in chat.tools] or None
    return {
        "messages": [_message(message, change) for message in chat.messages],
        "tools": None,
        "documents": None,
        "add_generation_prompt": chat.begins_turn,
        **({tools_variable: tools} if tools_variable else {}),
        **{name: map_strings(value, change) for name, value in chat.template_kwargs.items()},
    }


def _message(message: Message, change: Callable[[str], str]) -> dict[str, Any]:
    """Return a message with the arguments of calls as objects, as templates expect them."""
    fields: dict[str, Any] = message.as_dict()
    for name in fields.keys() - {"role", "tool_calls"}:
        fields[name] = change(fields[name])
    if message.tool_calls:
        fields["tool_calls"] = [
            {
                "id": change(call.id),
                "type": "function",
                "function": {
                    "name": change(call.name),
                    "arguments": map_strings(call.parsed_arguments(), change),
                },
            }
            for call in message.tool_calls
        ]
    return fields


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
    return before.replace(_MARK + " ", "").replace(_MARK, "")  # it may show the message twice


class TemplateFailed(Exception):
    """The template raised, or is not valid Jinja; the message is for the log."""


class TemplateExceeded(TemplateFailed):
    """The template exceeded a limit on time, memory or output; or its process died or answered nonsense."""


class ChatRejected(Exception):
    """The template rejected the chat; the message is for the client."""


class NotSerializable(Exception):
    """A variable of the template cannot be written as JSON."""


class TemplateProcess:
    """Compiles a template and renders chats one by one, in a sandboxed process; safe from any thread.

    The first call starts the process, and so does the first one after the process has ended: after `close`,
    after an exceeded limit, or by itself. The process ends with its input, so it outlives neither this
    object nor the server.
    """

    def __init__(
        self, source: str, *, special_tokens: Mapping[str, str], max_cpu_s: float = MAX_CPU_S
    ) -> None:
        self._max_cpu_s = max_cpu_s
        self._template = _json({"source": source, "special_tokens": dict(special_tokens)})
        self._lock = threading.Lock()   # held while the process is used
        self._child: _Child | None = None
        self._is_closed = False         # the thread that uses the process ends it afterwards
        self._variables: frozenset[str] = frozenset()

    def compile(self) -> frozenset[str]:
        """Return the names of the variables that the template reads and does not set.

        Raises:
            TemplateFailed: it does not compile.
            TemplateExceeded: it does not compile within its limits.
        """
        with self._turn():
            return self._variables

    def render(self, variables: Mapping[str, Any]) -> str:
        """Render a prompt from variables, which must be JSON.

        Raises:
            ChatRejected: the template called `raise_exception`, or the chat lacks a part that it needs.
            TemplateFailed: it raised another exception.
            TemplateExceeded: it exceeded its limits.
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
        """End the process after the chat that it renders now, without waiting for it."""
        self._is_closed = True
        self._end_if_closed()

    def _end_if_closed(self) -> None:
        # A thread that holds the lock does this again after it has released it.
        if self._is_closed and self._lock.acquire(blocking=False):
            try:
                self._is_closed = False
                self._end()
            finally:
                self._lock.release()

    @contextmanager
    def _turn(self) -> Iterator[_Child]:
        """Wait for the process, and have it compile the template if it is new.

        At most as many threads wait as the model has to prepare requests, each `MAX_RENDER_S` at most.
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
        except BaseException:   # such as Ctrl-C, before the answer has come
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
    """The process, for one call at a time."""

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
            if size > MAX_BYTES:    # more than its memory limit
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
        """Kill it; a second call does nothing."""
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
        self._process.kill()    # it may only have closed its output
        status = self._process.wait()
        if status == -signal.SIGPROF:
            return f"it takes more than {self._max_cpu_s:g} s of CPU time"
        return f"its process ended with status {status}"


def _json(value: object) -> bytes:
    # Lone surrogates are placeholders in a chat; if escaped, two of them would become a pair.
    return json.dumps(value, ensure_ascii=False).encode(errors="surrogatepass")
