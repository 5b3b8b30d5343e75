"""The command `genserve chat`: opens a chat, or answers one question and ends."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, cast

import typer

from genserve.cli.completion_command import model_names
from genserve.cli.flags import MaxTokens, ModelRepository, Seed, Set, Url, sampling_option, with_assignments
from genserve.errors import InvalidRequest, ModelNotFound, closest
from genserve.sampling.sampling_options import SamplingOptions

if TYPE_CHECKING:
    from genserve.cli.chat.chat_session import ChatSession


def chat(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Default: GENSERVE_MODEL, or the only text model, or smollm2.", autocompletion=model_names
        ),
    ] = None,
    question: Annotated[str | None, typer.Argument(help="Answer this and end. Default: a chat.")] = None,
    model_repository: ModelRepository = None,
    url: Url = None,
    system: Annotated[str | None, typer.Option(envvar="GENSERVE_SYSTEM", help="The system prompt.")] = None,
    temperature: Annotated[
        float | None,
        sampling_option(
            envvar="GENSERVE_TEMPERATURE",
            help="0: always the likeliest token. Default: what the model recommends, or else 0.5.",
        ),
    ] = None,
    max_tokens: MaxTokens = None,
    seed: Seed = None,
    set_: Set = [],  # noqa: B006  # typer copies it
) -> None:
    """Chat with a model, which is pulled if it is missing. A question, or text on stdin, is answered once.

    `genserve chat QUESTION` asks the default model. Text on stdin follows the question after an empty line.
    """
    from genserve.cli.chat.chat_session import ChatSession
    from genserve.cli.chat.conversation import Conversation
    from genserve.cli.chat.keyboard import held_keys
    from genserve.cli.model_access import ModelSwitch, known_models, open_model
    from genserve.sampling.defaults import CHAT_MAX_TOKENS, chat_sampling_params

    given = {"max_tokens": max_tokens, "seed": seed, "temperature": temperature}
    options = cast(SamplingOptions, {name: value for name, value in given.items() if value is not None})
    options = with_assignments(options, set_)
    names = partial(known_models, model_repository, url=url)
    asked = read_arguments(model, question, known=names)
    message = asked.question if _is_terminal() else _with_stdin(asked.question)
    switch = ModelSwitch(partial(open_model, repository=model_repository, url=url), names=names)
    with held_keys(), switch as models:
        session = ChatSession(
            models,
            model=asked.model,
            conversation=Conversation(system=system),
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

    model: str | None       # None: the default one
    question: str | None    # None: none was given


def read_arguments(
    first: str | None, second: str | None, *, known: Callable[[], Collection[str]]
) -> ChatArguments:
    """Return the meaning of up to two arguments: MODEL QUESTION, MODEL, or QUESTION.

    Args:
        first: the first one; None: there is none.
        second: the second one; None: there is none.
        known: returns the names of the models that may be chosen.

    Raises:
        ModelNotFound: a single word is nearly the name of a model.
    """
    default = os.environ.get("GENSERVE_MODEL") or None
    if first is None or second is not None:
        return ChatArguments(model=first or default, question=second)
    from genserve.export import pulled_name

    names = known()
    if first in names or pulled_name(first) is not None:
        return ChatArguments(model=first, question=None)
    # A word that is close to a name is a misspelt name rather than a question.
    if len(first.split()) == 1 and (meant := closest(first, known=names)):
        raise ModelNotFound(
            f"there is no model {first!r}",
            remedy=f"did you mean {meant}? A question of one word follows the model: "
            f"`genserve chat {meant} {first}`",
        )
    return ChatArguments(model=default, question=first)


def _is_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def _with_stdin(question: str | None) -> str:
    """Return the question, an empty line, and the text on stdin; any of the two may be missing.

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
    """Print one answer on stdout; what cut it short is said on stderr."""
    from genserve.cli.console import make_console
    from genserve.completion import FinishReason

    answer = session.ask(message)
    limit = f"{answer.num_tokens} tokens, the limit"
    cut = {
        FinishReason.LENGTH: f"stopped after {limit}; --max-tokens sets another",
        FinishReason.REPETITION: "stopped, since the answer repeated itself; --seed gives another answer",
    }
    if answer.finish_reason is None:    # Ctrl-C
        raise typer.Exit(130)
    if note := cut.get(answer.finish_reason):
        make_console(stderr=True).print(note)
