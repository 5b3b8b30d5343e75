"""The command `genserve chat`: opens a chat, or answers one question and ends."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, cast

from genserve.cli.completion_command import model_names
from genserve.cli.flags import (
    ModelFlags,
    SamplingFlags,
    sampling_flag,
    with_assignments,
)
from genserve.errors import InvalidRequest, ModelNotFound, closest, suggestion
from genserve.sampling.sampling_options import SamplingOptions
from genserve.settings import Flag, flag

if TYPE_CHECKING:
    from genserve.cli.chat.chat_session import ChatSession

# A word with a letter, and a digit or a separator within a name: llama3.2, qwen3:0.6b, deepseek-r1. Or the
# name of a family.
_LIKE_A_NAME = re.compile(
    r"(?=.*[a-zA-Z])(?=.*[\d:/-])[\w.:/-]+"
    r"|(?i:codellama|deepseek|gemma|gpt|granite|llama|llava|mistral|mixtral|olmo|phi|qwen|smollm|vicuna)",
    re.ASCII,
)


@dataclass(frozen=True, kw_only=True)
class ChatFlags(SamplingFlags, ModelFlags):
    """The flags of `genserve chat`."""

    model: str | None = flag(
        None,
        Flag(
            help="Default: GENSERVE_MODEL, or the only text model, or smollm2. `genserve models --available` "
            "lists models that are pulled by name.",
            is_argument=True,
            complete=model_names,
        ),
    )
    question: str | None = flag(None, Flag(help="Answer this and end. Default: a chat.", is_argument=True))
    system: str | None = flag(None, Flag(help="The system prompt.", variable="GENSERVE_SYSTEM"))
    temperature: float | None = flag(
        None,
        sampling_flag(
            help="0: always the likeliest token. Default: what the model recommends, or else 0.5.",
            variable="GENSERVE_TEMPERATURE",
        ),
    )


def chat(flags: ChatFlags) -> None:
    """Chat with a model, which is pulled if it is missing. A question, or text on stdin, is answered once.

    `genserve chat QUESTION` asks the default model. Text on stdin follows the question after an empty line.
    """
    from genserve.cli.chat.chat_session import ChatSession
    from genserve.cli.chat.conversation import Conversation
    from genserve.cli.chat.keyboard import held_keys
    from genserve.cli.opened_models import ModelSwitch, known_models, open_model
    from genserve.sampling.defaults import CHAT_MAX_TOKENS, chat_sampling_params

    given = {"max_tokens": flags.max_tokens, "seed": flags.seed, "temperature": flags.temperature}
    options = cast(SamplingOptions, {name: value for name, value in given.items() if value is not None})
    options = with_assignments(options, flags.set_)
    server = flags.server()
    names = partial(known_models, flags.model_repository, server=server)
    asked = read_arguments(flags.model, flags.question, known=names, is_remote=server is not None)
    if server and asked.model is None and _is_terminal() and sys.stderr.isatty():
        asked = replace(asked, model=_asked_model(names()))
    message = asked.question if _is_terminal() else _with_stdin(asked.question)
    opening = partial(
        open_model,
        repository=flags.model_repository,
        server=server,
        max_model_len=flags.max_model_len,
    )
    switch = ModelSwitch(opening, names=names)
    with held_keys(), switch as models:
        session = ChatSession(
            models,
            model=asked.model,
            conversation=Conversation(system=flags.system),
            initial_options=lambda opened: {
                **chat_sampling_params(opened.default_sampling_params),
                "max_tokens": CHAT_MAX_TOKENS,
                **options,
            },
        )
        if message is not None:
            _answer_once(session, message)
        else:
            from genserve.cli.chat.repl import run_repl

            run_repl(session)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatArguments:
    """The meaning of the arguments of a command line."""

    model: str | None       # None: the default model
    question: str | None    # None: the command line has no question


def read_arguments(
    first: str | None,
    second: str | None,
    *,
    known: Callable[[], Collection[str]],
    is_remote: bool = False,
) -> ChatArguments:
    """Return the meaning of up to two arguments: MODEL QUESTION, MODEL, or QUESTION.

    Args:
        first: the first argument, or None.
        second: the second argument, or None.
        known: returns the names of the models that may be chosen.
        is_remote: whether the models are a server's. Otherwise further models can be pulled.

    Raises:
        ModelNotFound: a single word is nearly the name of a model, or looks like one: llama3.2, qwen3:0.6b.
    """
    default = os.environ.get("GENSERVE_MODEL") or None
    if first is None or second is not None:
        return ChatArguments(model=first or default, question=second)
    from genserve.export import DEFAULT_MODEL, pull_remedy, pulled_name

    names = known()
    if first in names or pulled_name(first) is not None:
        return ChatArguments(model=first, question=None)
    # A word that is close to a name, or looks like a name, is a name rather than a question.
    meant = closest(first, known=names) if len(first.split()) == 1 else None
    if meant or _LIKE_A_NAME.fullmatch(first):
        remedy = suggestion(first, known=names) if meant or is_remote else pull_remedy(first)
        model = meant or next(iter(names), DEFAULT_MODEL)
        raise ModelNotFound(
            f"there is no model {first!r}",
            remedy=f"{remedy}{'' if remedy.endswith('?') else '.'} A question of one word follows the model: "
            f"`genserve chat {model} {first}`",
        )
    return ChatArguments(model=default, question=first)


def _asked_model(names: Collection[str]) -> str | None:
    """Let the user choose among the models of a server; None: the server has at most one."""
    if len(names) < 2:
        return None
    numbered = {str(number): name for number, name in enumerate(names, 1)}
    print(*(f"{number} {name}" for number, name in numbered.items()), sep="\n", file=sys.stderr)
    while True:
        print("model [1]: ", end="", file=sys.stderr, flush=True)
        typed = input().strip() or "1"
        if typed in names:
            return typed
        if typed in numbered:
            return numbered[typed]


def _is_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def _with_stdin(question: str | None) -> str:
    """Return the question, an empty line, and the text on stdin; the question or the text may be missing.

    Raises:
        InvalidRequest: both are missing, or the text is not in the encoding of the locale.
    """
    from genserve.cli.console import read_text

    text = read_text().strip("\n") if sys.stdin is not None else ""
    message = "\n\n".join(filter(None, (question, text)))
    if not message.strip():
        raise InvalidRequest(
            "there is no question, and nothing on standard input",
            remedy="give a question, or open a chat on a terminal",
        )
    return message


def _answer_once(session: ChatSession, message: str) -> None:
    """Print one answer on stdout; if it was cut short, print the reason on stderr."""
    from genserve.cli.console import counted, make_console
    from genserve.completion import FinishReason

    answer = session.ask(message)
    limit = f"{counted(answer.num_tokens, 'token')}, the limit"
    cut = {
        FinishReason.LENGTH: f"stopped after {limit}; --max-tokens sets another",
        FinishReason.REPETITION: "stopped, since the answer repeated itself; --seed gives another answer",
    }
    if answer.finish_reason is None:    # stopped by Ctrl-C
        raise SystemExit(130)
    if note := cut.get(answer.finish_reason):
        make_console(stderr=True).print(note)
