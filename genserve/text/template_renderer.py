"""Template renderer: the program of a separate process that compiles one chat template and renders chats.

A template is a program that comes with a model. Jinja's sandbox bounds what it can access, but neither time
nor memory, so it runs in a process that can be killed. The process imports jinja2 and nothing else outside
the standard library, from the folders that follow the limits on the command line. Its client is
`chat_template.py`.

A message is a length in 8 bytes, big-endian, followed by JSON. The first message describes the template, each
later one a chat. An answer is a pair: `done` and the result, or `rejected` (the chat is invalid), `failed`
(the template is broken) or `exceeded` (the template exceeded a limit) and the reason.
"""

from __future__ import annotations

import gc
import sys
from importlib.util import find_spec

if __name__ == "__main__":
    gc.disable()  # the imports leave no garbage to look for, which would take a tenth of the start
    sys.path += sys.argv[3:]
    # Jinja imports hashlib, which would load OpenSSL: 4 of 21 MB. Python's own algorithms are enough, where
    # they exist: Fedora's Python, for example, has OpenSSL's only.
    if find_spec("_sha1"):
        sys.modules["_hashlib"] = None  # type: ignore[assignment]

import json
import os
import resource
import signal
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from typing import Any, BinaryIO, TypeAlias

from jinja2 import Template, TemplateError, TemplateSyntaxError, Undefined, UndefinedError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_REASON_CHARS = 600

Answer: TypeAlias = tuple[str, Any]


class Renderer:
    """One template in a sandbox, with the environment of `transformers.apply_chat_template`."""

    def __init__(self) -> None:
        self._environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            undefined=_Missing,
            extensions=[loopcontrols, _GenerationBlock],
        )
        self._environment.filters["tojson"] = _to_json
        self._environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        self._template: Template | None = None
        self._special_tokens: Mapping[str, str] = {}

    def answer(self, message: Mapping[str, Any]) -> Answer:
        """Compile the template in the first call, and render a chat in each later one; raises MemoryError."""
        return self._compile(**message) if self._template is None else self._render(self._template, **message)

    def _compile(self, source: str, special_tokens: Mapping[str, str]) -> Answer:
        try:
            named = meta.find_undeclared_variables(self._environment.parse(source))
            self._template = self._environment.from_string(source)
        except MemoryError:
            raise
        except TemplateSyntaxError as error:
            return "failed", f"line {error.lineno} of the chat template: {_reason(error)}"
        except Exception as error:  # such as a RecursionError
            return "failed", f"the chat template cannot be compiled: {_reason(error)}"
        self._special_tokens = special_tokens
        return "done", sorted(named - self._environment.globals.keys() - special_tokens.keys())

    def _render(self, template: Template, variables: Mapping[str, Any], max_chars: int) -> Answer:
        try:
            text = template.render({**self._special_tokens, **variables})
        except MemoryError:
            raise
        except (_TemplateRejectionError, UndefinedError) as error:
            return "rejected", _reason(error)
        except Exception as error:  # the template may raise anything
            return "failed", f"{type(error).__name__}: {_reason(error)}"
        if len(text) > max_chars:
            return "exceeded", f"it writes {len(text)} characters; the limit is {max_chars}"
        return "done", text


class _TemplateRejectionError(TemplateError):
    """The template called `raise_exception`."""


class _Missing(Undefined):
    """A part that the chat lacks, by its name in the template; Jinja's message would name a Python class."""

    @property
    def _undefined_message(self) -> str:
        return self._undefined_hint or f"{self._undefined_name!r} is missing"


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's text for training; here it renders its content."""

    tags = {"generation"}  # noqa: RUF012  the base class declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, **options: Any) -> str:
    # Jinja's own filter escapes HTML, on which no model was trained.
    return json.dumps(value, **{"ensure_ascii": False} | options)


def _raise_exception(message: str) -> None:
    raise _TemplateRejectionError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _reason(error: Exception) -> str:
    # The reason may quote a chat, whose placeholders of special tokens are lone surrogates: no log can
    # contain them.
    return str(error)[:MAX_REASON_CHARS].encode(errors="replace").decode()


def _serve(asked: BinaryIO, answers: BinaryIO, *, max_cpu_s: float) -> None:
    """Answer until stdin closes or the memory is used up."""
    renderer: Renderer | None = Renderer()
    while renderer is not None:
        content = _read(asked, int.from_bytes(_read(asked, 8)))
        _set_alarm(max_cpu_s)
        try:
            answer = _json(renderer.answer(json.loads(content.decode(errors="surrogatepass"))))
        except MemoryError:
            renderer, answer = None, _json(("exceeded", "it exceeds its memory limit"))
        _set_alarm(0)
        answers.write(len(answer).to_bytes(8) + answer)
        answers.flush()


def _read(stream: BinaryIO, size: int) -> bytes:
    content = stream.read(size)
    if len(content) < size:
        raise EOFError
    return content


def _json(answer: Answer) -> bytes:
    return json.dumps(answer, ensure_ascii=False).encode(errors="surrogatepass")


def _set_alarm(cpu_s: float) -> None:
    """End this process after this much CPU time from now; 0: never."""
    signal.setitimer(signal.ITIMER_PROF, cpu_s)


def _bound(*, max_bytes: int) -> None:
    """Limit the memory of this process, and ignore Ctrl-C: the server ends it."""
    for group_signal in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(group_signal, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    for limit, size in ((resource.RLIMIT_AS, max_bytes), (resource.RLIMIT_CORE, 0)):
        with suppress(ValueError, OSError):
            resource.setrlimit(limit, (size, size))


if __name__ == "__main__":
    gc.freeze()
    gc.enable()
    _bound(max_bytes=int(sys.argv[2]))
    with suppress(EOFError, OSError):
        _serve(sys.stdin.buffer, sys.stdout.buffer, max_cpu_s=float(sys.argv[1]))
    os._exit(0)
