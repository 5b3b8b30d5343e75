"""Model access: a model in this process or behind a URL, with one face for the commands."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Unpack

from genserve.errors import ModelNotFound
from genserve.request import Message
from genserve.sampling.params import SamplingOptions
from genserve.stream import Stream

if TYPE_CHECKING:
    from genserve.client import Client

__all__ = ["OpenedModel", "TextModel", "choose_remote", "open_model"]


class TextModel(Protocol):
    """What the commands ask of a model; `genserve.LLM` is one."""

    def stream(self, prompt: str, **options: Unpack[SamplingOptions]) -> Stream:
        """Go on from a prompt."""

    def chat_stream(self, messages: Sequence[Message], **options: Unpack[SamplingOptions]) -> Stream:
        """Answer a chat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedModel:
    """A model that is ready to be asked."""

    name: str
    max_length: int | None      # tokens of prompt and answer together; None: not known
    text_model: TextModel


@contextmanager
def open_model(name: str | None, *, repository: Path, url: str | None) -> Iterator[OpenedModel]:
    """Load the model, or find it on the server at `url`; without a name, take the only or default one.

    Raises:
        GenserveError: it is not there, cannot be loaded, or the server does not answer.
    """
    with _remote_model(name, url=url) if url else _local_model(name, repository=repository) as opened:
        yield opened


@contextmanager
def _local_model(name: str | None, *, repository: Path) -> Iterator[OpenedModel]:
    from genserve.cli.local_models import choose_model
    from genserve.cli.render import make_console

    name = choose_model(name, repository=repository)
    with make_console(stderr=True).status(f"loading {name}"):
        from genserve.llm import LLM

        llm = LLM(repository, name)
    with llm:
        yield OpenedModel(name=name, max_length=llm.max_length, text_model=llm)


@contextmanager
def _remote_model(name: str | None, *, url: str) -> Iterator[OpenedModel]:
    from genserve.client import Client

    with Client(url) as client:
        name = choose_remote(name, client.models())
        yield OpenedModel(name=name, max_length=None, text_model=_RemoteModel(client=client, name=name))


def choose_remote(name: str | None, known: Sequence[str]) -> str:
    """Return the model of a server to ask: the one asked for, or the only one that it has.

    Raises:
        ModelNotFound: it has no such model; or several, and none was asked for.
    """
    if name is None and len(known) == 1:
        return known[0]
    if name is None or name not in known:
        raise ModelNotFound(
            "the server has several models, or none" if name is None else f"the server has no model {name!r}",
            remedy=f"name one of: {', '.join(known) or 'none is loaded'}",
        )
    return name


@dataclass(frozen=True, slots=True, kw_only=True)
class _RemoteModel:
    """One model of a server."""

    client: Client
    name: str

    def stream(self, prompt: str, **options: Unpack[SamplingOptions]) -> Stream:
        return self.client.stream(prompt, model=self.name, **options)

    def chat_stream(self, messages: Sequence[Message], **options: Unpack[SamplingOptions]) -> Stream:
        return self.client.chat_stream(messages, model=self.name, **options)
