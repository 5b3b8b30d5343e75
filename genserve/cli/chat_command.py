"""The command `genserve chat`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from genserve.cli.flags import (
    CHAT_TEMPERATURE,
    DEFAULT_REPOSITORY,
    ChatTemperature,
    MaxTokens,
    ModelArgument,
    ModelRepository,
    Seed,
    Set,
    Url,
    with_assignments,
)
from genserve.sampling.sampling_options import SamplingOptions


def chat(
    model: ModelArgument = None,
    model_repository: ModelRepository = DEFAULT_REPOSITORY,
    url: Url = None,
    system: Annotated[str | None, typer.Option(envvar="GENSERVE_SYSTEM", help="The system prompt.")] = None,
    temperature: ChatTemperature = None,
    max_tokens: MaxTokens = None,
    seed: Seed = None,
    set_: Set = [],  # noqa: B006  # typer copies it
) -> None:
    """Chat with a model. Reads one message per line if stdin is not a terminal."""
    from genserve.cli.chat_session import ChatSession, Conversation
    from genserve.cli.model_access import open_model

    options = SamplingOptions(max_tokens=max_tokens, seed=seed)
    if temperature is not None:
        options["temperature"] = temperature
    options = with_assignments(options, set_)
    with open_model(model, repository=model_repository, url=url) as opened:
        recommended = opened.default_sampling_params.get("temperature", CHAT_TEMPERATURE)
        options = {"temperature": recommended, **options}
        session = ChatSession(opened, conversation=Conversation(system=system), options=options)
        if sys.stdin.isatty():
            from genserve.cli.repl import run_repl

            run_repl(session)
        else:
            from genserve.cli.console import read_lines

            for line in read_lines():
                session.ask(line)
