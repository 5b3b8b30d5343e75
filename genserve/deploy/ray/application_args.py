"""Application args: what the builder of the Serve application builds, as `args` of a config file has it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import Field, fields, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError, field_validator

from genserve.errors import InvalidRequest, require, suggestion, validation_message
from genserve.settings import Flag, ServerSettings

# Serve starts the processes and chooses the models; a deployment has no port but the HTTP port, which the
# replicas of its ingress share, and no shared memory.
_HEADINGS_OF_OTHERS = ("Ports", "Connections of gRPC")
_PORTS = frozenset(("host", "http_port"))
_SETTINGS_OF_OTHERS = frozenset(
    (
        "model_repository", "model_control_mode", "model_memory_budget", "model_keep_alive", "load_model",
        "repository_poll_s", "exit_on_error",
        "allow_client_shm", "grpc_header_forward_pattern", "grpc_restricted_protocol",
    )
)  # fmt: skip


class RoutingWeights(BaseModel):
    """The weights of `PrefixRouter`; None: its default."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    new_weight: float | None = None
    decode_tokens: float | None = None
    blocked_weight: float | None = None


class ApplicationArgs(BaseModel):
    """The arguments of `deploy/ray/application.py`.

    Attributes:
        model_repository: folders of the repository, at the same paths on every machine of the cluster.
        models: names of the models to serve, each with the names of the models that its code calls by BLS.
        settings: fields of `ServerSettings` that differ from their defaults.
        routing: weights of the router.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model_repository: tuple[Path, ...]
    models: dict[str, tuple[str, ...]]
    settings: dict[str, Any] = {}
    routing: RoutingWeights = RoutingWeights()

    @field_validator("settings")
    @classmethod
    def _known(cls, value: dict[str, Any]) -> dict[str, Any]:
        try:
            checked_settings(value)
        except InvalidRequest as error:
            raise ValueError(str(error)) from error
        return value

    def server_settings(self) -> ServerSettings:
        """Return the settings of ingress and replicas, with the API keys of the environment."""
        return replace(
            checked_settings(self.settings),
            model_repository=self.model_repository,
            api_key=os.environ.get("GENSERVE_API_KEY") or None,
            control_key=os.environ.get("GENSERVE_CONTROL_KEY") or None,
        )


def known_settings() -> dict[str, Field[Any]]:
    """Return the fields of `ServerSettings` that a deployment has, by name."""
    return {
        setting.name: setting
        for setting in fields(ServerSettings)
        if setting.name not in _SETTINGS_OF_OTHERS
        and (flag := setting.metadata.get("flag")) is not None
        and (flag.heading not in _HEADINGS_OF_OTHERS or setting.name in _PORTS)
    }


def checked_settings(values: Mapping[str, Any]) -> ServerSettings:
    """Return the settings of a config file.

    Raises:
        InvalidRequest: a name is unknown, or a value is not allowed; `field` is the name.
    """
    known = known_settings()
    require(values.get("http_port") != 0, "http_port", "must be a port that clients know")
    for name, value in values.items():
        if name not in known:
            raise InvalidRequest(
                f"there is no setting {name!r}", remedy=suggestion(name, known=known), field=name
            )
        flag: Flag = known[name].metadata["flag"]
        if isinstance(value, int | float):
            require(flag.minimum is None or value >= flag.minimum, name, f"must be at least {flag.minimum}")
            require(flag.maximum is None or value <= flag.maximum, name, f"must be at most {flag.maximum}")
    try:
        settings = TypeAdapter(ServerSettings).validate_python(dict(values))
    except ValidationError as error:
        [first, *_] = error.errors()
        field = str(first["loc"][0])
        raise InvalidRequest(f"{field}: {validation_message(first)}", field=field) from error
    for name in values:
        validate = known[name].metadata["flag"].validate
        try:
            if validate is not None:
                validate(values[name])
        except ValueError as error:
            raise InvalidRequest(f"{name}: {error}", field=name) from error
    return settings
