"""Flags: the flags that several commands share, and the values of `--set`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from genserve.cli.completion_command import set_assignments
from genserve.cli.parser import UsageError
from genserve.client_credentials import tls_context
from genserve.errors import InvalidRequest
from genserve.settings import Flag, flag, read_max_model_len

if TYPE_CHECKING:
    import ssl

    from genserve.client import Client
    from genserve.sampling.sampling_options import SamplingOptions

DOCUMENTATION = "https://genserve.github.io/genserve/"
JSON_FLAG = Flag(
    help=f"Print one JSON document and nothing else; its keys: {DOCUMENTATION}cli/", names=("--json",)
)
MAX_TOKENS = Flag(
    help="Maximum length of an answer, in tokens.", heading="Sampling", variable="GENSERVE_MAX_TOKENS"
)
sampling_flag = partial(Flag, heading="Sampling")
server_flag = partial(Flag, heading="Server")


@dataclass(frozen=True, kw_only=True)
class RepositoryFlags:
    """The repository of a command."""

    model_repository: Path | None = flag(
        None,
        Flag(
            help="Folder of the models. Default: the store in GENSERVE_HOME.",
            heading="Model",
            variable="GENSERVE_MODEL_REPOSITORY",
        ),
    )


@dataclass(frozen=True, kw_only=True)
class RepositoriesFlags:
    """The repositories of a command that reads several."""

    model_repository: list[Path] | None = flag(
        None,
        Flag(
            help="Folder of models; repeatable. Default: the store in GENSERVE_HOME.",
            names=("--model-repository", "--model-store"),
            variable="GENSERVE_MODEL_REPOSITORY",
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteServer:
    """A server that a command uses instead of a repository."""

    url: str
    verify: ssl.SSLContext | bool       # see `genserve.Client`

    def client(self) -> Client:
        """Return a client of the server, with the key in GENSERVE_API_KEY."""
        from genserve.client import Client

        return Client(self.url, verify=self.verify)


@dataclass(frozen=True, kw_only=True)
class TlsFlags:
    """How the certificate of a server is verified."""

    ca: Path | None = flag(
        None, server_flag(help="Certificate of the authority that signed the server's, in a PEM file.")
    )
    insecure: bool = flag(False, server_flag(help="Do not verify the certificate of the server."))


@dataclass(frozen=True, kw_only=True)
class ServerFlags(TlsFlags):
    """The server that a command uses instead of a repository."""

    url: str | None = flag(
        None,
        server_flag(
            help="Use the server at this URL, with the key in GENSERVE_API_KEY, instead of the repository.",
            variable="GENSERVE_BASE_URL",
        ),
    )

    def server(self) -> RemoteServer | None:
        """Return the server that the command line names; None: it uses a repository.

        Raises:
            UsageError: there are flags for a server, but no URL.
            InvalidRequest: the file has no certificate, or GENSERVE_CLIENT_CERT names a file that cannot be
                used.
        """
        if self.url is None:
            if self.ca or self.insecure:
                raise UsageError(f"{'--ca' if self.ca else '--insecure'} needs --url")
            return None
        verify = tls_context(ca=self.ca, insecure=self.insecure) if self.ca or self.insecure else True
        return RemoteServer(url=self.url, verify=verify)


@dataclass(frozen=True, kw_only=True)
class ModelFlags(ServerFlags, RepositoryFlags):
    """Where a model is that answers: in a repository, or on a server."""

    max_model_len: str | None = flag(
        None,
        Flag(
            help="Context length, in tokens, such as 32768, 32k or 32K (1024s). Default: the model's own, as "
            "far as its config and the memory of the KV cache allow.",
            heading="Model",
            variable="GENSERVE_MAX_MODEL_LEN",
            metavar="N",
            validate=read_max_model_len,
        ),
    )

    def server(self) -> RemoteServer | None:
        """See `ServerFlags.server`; a context length is a usage error, too."""
        server = super().server()
        if server and self.max_model_len:
            raise UsageError("--max-model-len is for a model of the repository, not for one of a server")
        return server


@dataclass(frozen=True, kw_only=True)
class SamplingFlags:
    """The sampling parameters that chats and completions have."""

    max_tokens: int | None = flag(None, MAX_TOKENS)
    seed: int | None = flag(
        None, sampling_flag(help="The same seed gives the same text.", variable="GENSERVE_SEED")
    )
    set_: list[str] = flag(
        list,
        sampling_flag(
            help="Any other sampling parameter, such as repetition_penalty=1.2; repeatable. Lists and "
            f"objects are JSON. The parameters: {DOCUMENTATION}sampling/",
            names=("--set",),
            metavar="NAME=VALUE",
            complete=set_assignments,
        ),
    )


def with_assignments(options: SamplingOptions, assignments: Iterable[str]) -> SamplingOptions:
    """Return the options, updated by the NAME=VALUE of each `--set`.

    Raises:
        InvalidRequest: an assignment has no =, or the name or the value is invalid.
    """
    from genserve.sampling.sampling_params import sampling_params

    merged: dict[str, object] = {**options}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals:
            raise InvalidRequest(f"--set {assignment} has no value", remedy=f"write --set {assignment}=VALUE")
        merged[name] = read_value(value)
    sampling_params(merged)     # validate now, before a model is loaded
    return cast("SamplingOptions", merged)


def read_value(text: str) -> object:
    """Read a value as JSON, or else as text; `none` and the empty text are None."""
    try:
        return json.loads(text)
    except ValueError:
        return None if text in ("", "none") else text
