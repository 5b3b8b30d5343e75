"""Opened models: text models in this process and on servers, which commands use through one interface."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self, Unpack

from genserve.cli.local_models import local_models
from genserve.cli.model_choice import bring_model, choose_remote
from genserve.completion import Completion, Stream
from genserve.export import DEFAULT_MODEL
from genserve.log import at_level
from genserve.prompt import Messages, Prompts
from genserve.sampling.sampling_options import SamplingOptions
from genserve.store import default_repository

if TYPE_CHECKING:
    from genserve.cli.flags import RemoteServer
    from genserve.client import Client
    from genserve.repository.repository import Repository
    from genserve.textmodel.text_model import TextModel


class TextGenerator(Protocol):
    """The interface by which commands use a model; `genserve.LLM` implements it."""

    def stream(self, prompt: str, **options: Unpack[SamplingOptions]) -> Stream:
        """Complete a prompt."""

    def chat_stream(
        self, messages: Messages, *, return_progress: bool = False, **options: Unpack[SamplingOptions]
    ) -> Stream:
        """Answer a chat."""

    def complete(self, prompts: Prompts, **options: Unpack[SamplingOptions]) -> tuple[Completion, ...]:
        """Complete prompts."""

    def tokenize(self, prompt: Messages, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Return the token ids of a text or of a chat."""

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of token ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedModel:
    """A loaded model, in this process or on a server."""

    name: str
    max_length: int | None  # the context length in tokens; None: unknown
    text_model: TextGenerator
    default_sampling_params: SamplingOptions  # the options that the model recommends


def open_model(
    name: str | None,
    *,
    repository: Path | None,
    server: RemoteServer | None,
    max_model_len: str | None = None,
) -> AbstractContextManager[OpenedModel]:
    """Load a model, or find it on a server, for a `with`; without a name, the only or the default model.

    A missing local model is pulled, see `bring_model`.

    Args:
        name: the name of the model.
        repository: the folder of local models; None: the store.
        server: the server that has the model; None: it is local.
        max_model_len: the context length of a local model, see `LLM`.

    Raises:
        GenserveError: the model does not exist or cannot be loaded, or the server does not answer.
    """
    if server:
        return _remote_model(name, server=server)
    return _local_model(name, repository=repository, max_model_len=max_model_len)


class ModelSwitch:
    """Holds the open model of a chat, and replaces it by another model."""

    def __init__(
        self,
        open_model: Callable[[str | None], AbstractContextManager[OpenedModel]],
        *,
        names: Callable[[], Collection[str]],
    ) -> None:
        """Store the functions; opens no model yet.

        Args:
            open_model: opens a model; None: the default model.
            names: returns the names of the models that can be opened.
        """
        self.open = open_model
        self.names = names
        self._held = ExitStack()

    def switch(self, name: str | None) -> OpenedModel:
        """Open a model, and close the previous one; raises the errors of `open_model`."""
        with ExitStack() as opening:
            model = opening.enter_context(self.open(name))
            self.adopt(opening.pop_all())
        return model

    def adopt(self, opened: ExitStack) -> None:
        """Hold a model that was opened elsewhere, and close the previous one."""
        before, self._held = self._held, opened
        before.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        self._held.close()


def known_models(repository: Path | None, *, server: RemoteServer | None) -> Collection[str]:
    """Return the names of the models that `open_model` opens, except models of the Hugging Face hub.

    Raises:
        RepositoryError: the repository does not exist.
        Unreachable: the server does not answer.
    """
    if server:
        with server.client() as client:
            return client.models()
    models = local_models(repository or default_repository())
    return sorted({DEFAULT_MODEL, *(model.name for model in models)})


@contextmanager
def loading(name: str) -> Iterator[None]:
    """Show that a model is being loaded into this process. A failure is raised, so it is not logged too."""
    from genserve.cli.console import make_console

    with (
        at_level("genserve.repository.load_errors", logging.CRITICAL),
        at_level("genserve.repository.model_lifecycle", logging.CRITICAL),
        make_console(stderr=True).status(f"loading {name}"),
    ):
        yield


@contextmanager
def started(repository: Repository, name: str) -> Iterator[TextModel]:
    """Run a text model of a repository in this process, and close the repository at the end."""
    try:
        with loading(name):
            model = repository.start_text_model(name)
        yield model
    finally:
        repository.close()


@contextmanager
def _local_model(
    name: str | None, *, repository: Path | None, max_model_len: str | None
) -> Iterator[OpenedModel]:
    folder, name = bring_model(name, repository=repository)
    with loading(name):
        from genserve.llm import LLM

        llm = LLM(name, model_repository=folder, max_model_len=max_model_len)
    with llm:
        yield OpenedModel(
            name=name,
            max_length=llm.max_length,
            text_model=llm,
            default_sampling_params=llm.default_sampling_params,
        )


@contextmanager
def _remote_model(name: str | None, *, server: RemoteServer) -> Iterator[OpenedModel]:
    with server.client() as client:
        known = client.model_cards()
        name = choose_remote(name, list(known))
        yield OpenedModel(
            name=name,
            max_length=known[name].max_length,
            text_model=_RemoteModel(client=client, name=name),
            default_sampling_params=known[name].default_sampling_params,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _RemoteModel:
    """Uses one model of a server as a `TextGenerator`."""

    client: Client
    name: str

    def stream(self, prompt: str, **options: Unpack[SamplingOptions]) -> Stream:
        return self.client.stream(prompt, model=self.name, **options)

    def chat_stream(
        self, messages: Messages, *, return_progress: bool = False, **options: Unpack[SamplingOptions]
    ) -> Stream:
        return self.client.chat_stream(messages, model=self.name, return_progress=return_progress, **options)

    def complete(self, prompts: Prompts, **options: Unpack[SamplingOptions]) -> tuple[Completion, ...]:
        return self.client.complete(prompts, model=self.name, **options)

    def tokenize(self, prompt: Messages, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        return self.client.tokenize(prompt, model=self.name, add_special_tokens=add_special_tokens)

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return self.client.detokenize(token_ids, model=self.name, skip_special_tokens=skip_special_tokens)
