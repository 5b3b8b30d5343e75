"""Kubernetes' schemas: what an API server would reject of a document, unknown fields included.

Kubernetes' own kinds are validated by its OpenAPI document; those of other projects by their recorded
CustomResourceDefinitions (scripts/record_crds.py).
"""

from __future__ import annotations

import gzip
import json
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator
from kubernetes_validate.utils import schema_contents
from referencing import Registry, Resource

__all__ = ["OLDEST_KUBERNETES", "documents", "problem"]

_CRDS = Path(__file__).parent / "crds"
OLDEST_KUBERNETES = "1.29.0"     # the oldest version that Chart.yaml allows
_VERSIONS = (OLDEST_KUBERNETES, "1.35.0")


def documents(text: str) -> list[dict[str, Any]]:
    """Return the documents of a file, without empty ones."""
    return [document for document in yaml.safe_load_all(text) if document]


def problem(document: dict[str, Any]) -> str:
    """Return the first problem of a document; empty: it is valid.

    Raises:
        LookupError: there is no schema of its kind.
    """
    kind, api_version = document["kind"], document["apiVersion"]
    recorded = _CRDS / f"{kind}.json.gz"
    if recorded.exists():
        validators = [_of_crd(recorded, api_version)]
    else:
        group, slash, version = api_version.rpartition("/")
        name = f"{kind}-{group.partition('.')[0]}{slash and '-'}{version}".lower()
        validators = [_of_kubernetes(name, kubernetes) for kubernetes in _VERSIONS]
    for validator in validators:
        for error in validator.iter_errors(document):
            return f"{'.'.join(map(str, error.absolute_path))}: {error.message}"
    return ""


@cache
def _of_kubernetes(name: str, version: str) -> Draft202012Validator:
    """Return the validator of a kind. The package's own `validate` would read all definitions each time."""
    try:
        schema = schema_contents(f"{_folder(version)}/{name}.json", version)
    except FileNotFoundError as error:
        raise LookupError(f"Kubernetes {version} has no {name}") from error
    return Draft202012Validator(schema, registry=_definitions(version))


@cache
def _definitions(version: str) -> Registry[Any]:
    contents = schema_contents(f"{_folder(version)}/_definitions.json", version)
    return Resource.from_contents(contents) @ Registry()


def _folder(version: str) -> str:
    return f"kubernetes-json-schema/v{version}-local-strict"


@cache
def _of_crd(recorded: Path, api_version: str) -> Draft202012Validator:
    schema = _strict(json.loads(gzip.decompress(recorded.read_bytes()))[api_version])
    schema["required"] = ["apiVersion", "kind", "metadata", *schema.get("required", ())]
    return Draft202012Validator(schema)


def _strict(schema: Any) -> Any:
    """A structural schema of a CustomResourceDefinition in plain JSON schema, closed for unknown fields."""
    if not isinstance(schema, dict):
        return schema
    strict = {
        name: {field: _strict(part) for field, part in value.items()}
        if name == "properties"
        else [_strict(part) for part in value]
        if name in ("allOf", "anyOf", "oneOf")
        else _strict(value)
        for name, value in schema.items()
        if not name.startswith("x-kubernetes-") and name not in ("format", "nullable")
    }
    if schema.get("x-kubernetes-int-or-string"):
        strict = {"type": ["integer", "string"]}
    if schema.get("nullable") and "type" in strict:
        strict["type"] = [strict["type"], "null"]
    # The parts of allOf, anyOf and oneOf only add to the properties of the schema around them.
    if strict.get("type") == "object" and "properties" in strict:
        keeps_unknown = schema.get("x-kubernetes-preserve-unknown-fields", False)
        strict.setdefault("additionalProperties", keeps_unknown)
    return strict
