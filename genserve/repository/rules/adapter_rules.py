"""Adapter rules: the base of an adapter, and the fields of its config that the base decides."""

from __future__ import annotations

from collections.abc import Iterator

from genserve.config.diagnostics import Diagnostic
from genserve.errors import suggestion
from genserve.repository.rules.facts import ModelFacts

_READ = frozenset({"name", "backend", "version_policy", "default_model_filename", "parameters"})


def check_adapter(facts: ModelFacts) -> Iterator[Diagnostic]:
    """Reject an adapter whose base is no text model; warn of the fields that its base has."""
    if facts.config.backend != "adapter":
        return
    name = facts.config.base_model
    if name is None:
        yield facts.error(
            "backend",
            f"the config of adapter {facts.name} does not name its base",
            remedy='add `parameters { key: "base_model" value { string_value: "NAME" } }`',
        )
    elif name not in facts.text_models:
        problem = "does not generate text" if name in facts.entries else "is not in the repository"
        yield facts.error(
            "parameters",
            f"base_model {name!r} {problem}",
            remedy=suggestion(name, known=facts.text_models),
            key="base_model",
        )
    if len(facts.served) > 1:
        latest = facts.served[-1]
        yield facts.warning(
            "version_policy",
            f"version_policy is ignored in an adapter: its base runs one version, {latest}",
            remedy=f"write `version_policy {{ specific {{ versions: {latest} }} }}`",
        )
    for field, _ in facts.parsed.message.ListFields():
        if field.name not in _READ:
            yield facts.warning(
                field.name,
                f"{field.name} is ignored in an adapter: its base has it",
                remedy="leave it out",
            )
