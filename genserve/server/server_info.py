"""Server info: what a server tells the person who started it, once it is ready."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from genserve.errors import GenserveError
from genserve.repository.repository import Repository

__all__ = ["ModelInfo", "ServerInfo", "VersionInfo"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """A model that answers."""

    name: str
    max_length: int             # tokens of prompt and answer together
    max_num_seqs: int
    kv_cache_bytes: int         # at the most
    precision: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionInfo:
    """One version of any model; a line of the repository's index."""

    name: str
    version: int | None         # None: never loaded
    state: str                  # "READY", "UNAVAILABLE" ...
    reason: str                 # of an unavailable one


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """A server that is ready."""

    url: str
    grpc_address: str = ""                  # host and port; empty: there is no gRPC
    metrics_url: str = ""                   # empty: metrics are on the HTTP port alone
    models: tuple[ModelInfo, ...]           # that generate text
    versions: tuple[VersionInfo, ...] = ()
    errors: tuple[GenserveError, ...]       # of models that could not be loaded

    def filled(self, repository: Repository) -> Self:
        """Return this server with the models of a repository."""
        models = tuple(
            ModelInfo(
                name=model.name,
                max_length=model.max_length,
                max_num_seqs=model.max_num_seqs,
                kv_cache_bytes=model.kv_cache_bytes,
                precision=model.precision,
            )
            for model in repository.generation_models
        )
        versions = tuple(
            VersionInfo(name=line.name, version=line.version, state=line.state or "", reason=line.reason)
            for line in repository.index()
        )
        return replace(self, models=models, versions=versions, errors=tuple(repository.errors.values()))
