"""Config file: reads and writes the YAML of a Serve application, and says at which line it is wrong."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from genserve.deploy.ray.application_args import ApplicationArgs, known_settings
from genserve.deploy.ray.deploy_config import IMPORT_PATH, POLICY
from genserve.deploy.ray.serve_library import import_ray
from genserve.errors import ConfigError, RepositoryError, suggestion, validation_message

_HEADING = """\
# A Ray Serve application of genserve, to be edited and kept. `genserve deploy ray --config FILE` deploys it,
# and later what has changed. `serve deploy FILE` takes it too, and it is the `serveConfigV2` of a RayService.
"""
_EXAMPLE = "`genserve deploy ray --dry-run` prints one"


def to_yaml(config: Mapping[str, Any]) -> str:
    """Return the text of a config file."""
    text: str = yaml.safe_dump(dict(config), sort_keys=False, width=100)
    return _HEADING + text


def read_config(path: Path) -> dict[str, Any]:
    """Read a config file and check it as Serve does, and for unknown keys, which Serve ignores.

    Raises:
        ConfigError: the file has a mistake; the error has the place of the first one.
        RepositoryError: the file cannot be read.
        MissingDependency: Ray is not installed.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RepositoryError(f"cannot read {path}: {error}", remedy="check the path") from error
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        config = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        where = _place(path, error.problem_mark) if error.problem_mark else str(path)
        raise ConfigError(f"not YAML: {error.problem}", where=where, remedy="correct the line") from error
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError("not a mapping", where=str(path), remedy=_EXAMPLE)
    schema = import_ray("ray.serve.schema").ServeDeploySchema
    for node, name, known in _unknown_keys(root, schema):
        raise ConfigError(
            f"unknown key {name!r}", where=_place(path, node.start_mark), remedy=suggestion(name, known=known)
        )
    for mistake in _errors(config, schema):
        raise _invalid(path, root, **mistake)
    return dict(config)


def _unknown_keys(node: yaml.Node, model: type[BaseModel]) -> Iterator[tuple[yaml.Node, str, list[str]]]:
    """Yield each key that a schema does not have, with the keys that it has."""
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _unknown_keys(item, model)
    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in node.value:
        if key.value not in model.model_fields:
            yield key, key.value, list(model.model_fields)
        elif model is ApplicationArgs and key.value == "settings":
            yield from _unknown_settings(value)
        elif nested := _nested(model, key.value, node):
            yield from _unknown_keys(value, nested)


def _unknown_settings(node: yaml.Node) -> Iterator[tuple[yaml.Node, str, list[str]]]:
    known = list(known_settings())
    if isinstance(node, yaml.MappingNode):
        yield from ((key, key.value, known) for key, _ in node.value if key.value not in known)


def _nested(model: type[BaseModel], name: str, node: yaml.MappingNode) -> type[BaseModel] | None:
    """Return the schema of the values of a field; None: it has none, or is another builder's."""
    if name == "args":
        paths = [value.value for key, value in node.value if key.value == "import_path"]
        return ApplicationArgs if paths == [IMPORT_PATH] else None
    kinds = list(_classes(model.model_fields[name].annotation))
    return next((kind for kind in kinds if issubclass(kind, BaseModel)), None)


def _classes(annotation: Any) -> Iterator[type]:
    if isinstance(annotation, type):
        yield annotation
    for argument in get_args(annotation):
        yield from _classes(argument)


def _errors(config: Any, schema: type[BaseModel]) -> Iterator[dict[str, Any]]:
    """Yield the place of each invalid value, as keys and indices, and what is wrong with it."""
    try:
        schema.model_validate(config)
    except ValidationError as error:
        yield from ({"loc": one["loc"], "message": validation_message(one)} for one in error.errors())
        return
    except (ImportError, AttributeError) as error:  # a policy or router is missing; Serve hides which
        yield {"loc": (), "message": f"cannot import: {error}"}
        return
    for index, application in enumerate(config["applications"]):
        if application["import_path"] == IMPORT_PATH:
            try:
                ApplicationArgs.model_validate(application.get("args", {}))
            except ValidationError as error:
                for one in error.errors():
                    loc = ("applications", index, "args", *one["loc"])
                    yield {"loc": loc, "message": validation_message(one)}
            yield from _scaling_errors(application, ("applications", index, "deployments"))


def _scaling_errors(application: Mapping[str, Any], loc: tuple[str | int, ...]) -> Iterator[dict[str, Any]]:
    """Yield what would never add a replica: Serve sees no requests, since none passes through it."""
    for index, options in enumerate(application.get("deployments") or ()):
        scaling = options.get("autoscaling_config")
        place = (*loc, index, "autoscaling_config")
        if scaling and "policy" not in scaling:
            message = f"needs a policy, such as {{policy_function: '{POLICY}'}}: Serve's own sees no requests"
            yield {"loc": place, "message": message}
        elif scaling and scaling.get("min_replicas") == 0:
            message = "must be at least 1: a request starts no replica"
            yield {"loc": (*place, "min_replicas"), "message": message}


def _invalid(path: Path, root: yaml.Node, *, loc: Sequence[str | int], message: str) -> ConfigError:
    """Return the error of a value, at the last key or item of its place that the file has."""
    node, names = root, []
    for part in loc:
        if (below := _child(node, part)) is not None:
            node = below
            names.append(str(part))
    return ConfigError(
        f"{'.'.join(names)}: {message}" if names else message,
        where=_place(path, node.start_mark),
        remedy=_EXAMPLE,
    )


def _child(node: yaml.Node, part: str | int) -> yaml.Node | None:
    if isinstance(node, yaml.SequenceNode) and isinstance(part, int):
        return node.value[part] if part < len(node.value) else None
    if isinstance(node, yaml.MappingNode):
        return next((value for key, value in node.value if key.value == part), None)
    return None


def _place(path: Path, mark: yaml.Mark) -> str:
    return f"{path}:{mark.line + 1}:{mark.column + 1}"
