"""Deploy config: a model repository as the config file of a Ray Serve application.

The file is Serve's own (`serve deploy FILE`, a RayService of Kubernetes), and people edit and keep it:
`import_path` names the builder of `application.py`, `args` what it builds, `deployments` the options.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from genserve.config.model_config import ModelConfig
from genserve.deploy.ray.autoscaling import ScalingTargets
from genserve.errors import RepositoryError, suggestion
from genserve.machine import default_threads
from genserve.repository.index import ModelEntry, all_step_models, fingerprint, scan, step_models
from genserve.repository.model_validation import Validator
from genserve.repository.text_stages import TextStages
from genserve.textmodel.logits_config import num_pipeline_stages

IMPORT_PATH = "genserve.deploy.ray.application:build"
INGRESS = "ingress"
POLICY = "genserve.deploy.ray.autoscaling:TokenLoadPolicy"
# A change of its value replaces the replicas of a deployment, since it is part of their environment.
FINGERPRINT = "GENSERVE_MODEL_FINGERPRINT"
# What a replica does, Serve's part included, runs on one event loop: a second one would take turns with it.
_VARIABLES = {"RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0", "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0"}
_THREADS = ("intra_op_thread_count", "INTRA_OP_THREAD_COUNT", "TF_NUM_INTRA_THREADS")
# Answers may take this long to end on a replica that is being replaced.
_DRAIN_S = 600.0
# The share of the replicas, rounded up, that start anew before old ones stop.
_SURGE_PERCENT = 25


@dataclass(frozen=True, slots=True, kw_only=True)
class DeployedModel:
    """A model that a deployment serves, with the models in its replicas.

    Attributes:
        entry: the model.
        stages: the stages of a text model; empty: the model is none.
        parts: all models that its replicas load, without the model itself.
        needed: the parts that its code calls, and no step of an ensemble names.
    """

    entry: ModelEntry
    stages: TextStages
    parts: tuple[ModelEntry, ...]
    needed: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Name of the model and of its deployment."""
        return self.entry.name

    @property
    def fingerprint(self) -> str:
        """Changes with each file that its replicas may read."""
        files = [fingerprint(part.path) for part in (self.entry, *self.parts)]
        return hashlib.sha256(repr(files).encode()).hexdigest()[:16]


def find_models(
    roots: Sequence[Path], names: Iterable[str] = (), *, needed: Mapping[str, Sequence[str]] | None = None
) -> list[DeployedModel]:
    """Return the models to deploy: the named ones, or all models that are no part of another model.

    Args:
        roots: folders of the repository.
        names: the models to deploy; empty: all.
        needed: the models that a model's code calls by BLS, by its name; they run in its replicas.

    Raises:
        RepositoryError: a root is not a folder or has no models, or a model does not exist or is broken.
    """
    needed = needed or {}
    entries = scan(roots)
    if adapters := [name for name in names if name in entries and entries[name].base_model]:
        raise RepositoryError(
            f"{adapters[0]!r} is an adapter, which a deployment does not serve",
            remedy="merge it: `genserve export --adapter`",
        )
    entries = {name: entry for name, entry in entries.items() if entry.base_model is None}
    validator = Validator(entries)
    texts = validator.text_models
    parts = {part.name for entry in entries.values() for part in step_models(entry, entries)}
    drafts = {name for stages in texts.values() if (name := _draft(stages))}
    called = {name for group in needed.values() for name in group}
    wanted = list(names) or [name for name in entries if name not in parts | drafts | called]
    for name in [*wanted, *called]:
        if name not in entries:
            raise RepositoryError(
                f"there is no model {name!r} in {', '.join(map(str, roots))}",
                remedy=suggestion(name, known=entries),
            )
    if INGRESS in wanted:
        raise RepositoryError(f"{INGRESS!r} is the name of the ingress", remedy="give the model another name")
    if not wanted:
        raise RepositoryError(
            f"there is no model in {', '.join(map(str, roots))}", remedy="`genserve pull smollm2` brings one"
        )
    return [_deployed(entries[name], validator, needed=tuple(needed.get(name, ()))) for name in wanted]


def _deployed(
    entry: ModelEntry,
    validator: Validator,
    *,
    needed: tuple[str, ...],
) -> DeployedModel:
    entries, stages = validator.entries, validator.text_models.get(entry.name, {})
    draft = _draft(stages)
    roots = [entry, *(entries[name] for name in (*needed, *([draft] if draft in entries else ())))]
    group = {part.name: part for root in roots for part in (root, *all_step_models(root, entries))}
    for part in group.values():
        if error := validator.config_error(part):
            raise error
        if not part.is_ensemble:
            part.latest_version()  # raises if there is none
    del group[entry.name]
    return DeployedModel(entry=entry, stages=stages, parts=tuple(group.values()), needed=needed)


def _draft(stages: TextStages) -> str:
    config = stages["logits"].config if stages else None
    return config.parameters.get("draft_model", "") if config else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """The range in which the replicas of generation models are scaled."""

    min_replicas: int = 1
    max_replicas: int = 1


def serve_config(
    models: Sequence[DeployedModel],
    *,
    name: str,
    roots: Sequence[Path],
    settings: Mapping[str, Any],
    scale: Scale,
) -> dict[str, Any]:
    """Return the config of a Serve application with one deployment for each model and one ingress.

    Args:
        models: the models to deploy.
        name: the name of the application.
        roots: folders of the repository, which every machine of the cluster has at these paths.
        settings: the fields of `ServerSettings` that differ from their defaults.
        scale: how many replicas each generation model has.
    """
    args = {
        "model_repository": [str(root.resolve()) for root in roots],
        "models": {model.name: list(model.needed) for model in models},
        "settings": dict(settings),
    }
    deployments = [_model_options(model, scale=scale) for model in models]
    application = {
        "name": name,
        "route_prefix": None,   # Serve's proxies have no part in it
        "import_path": IMPORT_PATH,
        "args": args,
        "logging_config": {"enable_access_log": False},     # the ingress has one of its own
        "deployments": [_ingress_options(), *deployments],
    }
    config = {"proxy_location": "Disabled", "applications": [application]}
    return with_fingerprints(config, models, application=name)


def with_fingerprints(
    config: Mapping[str, Any], models: Sequence[DeployedModel], *, application: str
) -> dict[str, Any]:
    """Return a config with its models' present fingerprints; replicas with other ones are replaced."""
    values = {model.name: model.fingerprint for model in models}
    applications = []
    for app in config["applications"]:
        if app["name"] == application:
            options = {one["name"]: one for one in app.get("deployments", [])}
            named = {name: options.get(name, {"name": name}) for name in (*options, *values)}
            app = {**app, "deployments": [_marked(one, values.get(name)) for name, one in named.items()]}
        applications.append(app)
    return {**config, "applications": applications}


def _marked(options: Mapping[str, Any], value: str | None) -> dict[str, Any]:
    if value is None:
        return dict(options)
    actor = dict(options.get("ray_actor_options") or {})
    environment = dict(actor.get("runtime_env") or {})
    environment["env_vars"] = {**environment.get("env_vars", {}), FINGERPRINT: value}
    return {**options, "ray_actor_options": {**actor, "runtime_env": environment}}


def num_cpus(config: Mapping[str, Any]) -> float:
    """Return the CPUs for which the replicas of a config ask at most, each deployment with one to spare."""
    total = 0.0
    for application in config["applications"]:
        for options in application.get("deployments", []):
            of_one = (options.get("ray_actor_options") or {}).get("num_cpus", 1)
            total += of_one * (1 + _most_replicas(options))
    return total


def _most_replicas(options: Mapping[str, Any]) -> int:
    scaling = options.get("autoscaling_config")
    most = scaling.get("max_replicas", 1) if scaling else options.get("num_replicas") or 1
    return int(most)


def _model_options(model: DeployedModel, *, scale: Scale) -> dict[str, Any]:
    if model.stages:
        return _generation_options(model, scale=scale)
    configs = [part.config for part in (model.entry, *model.parts) if part.config and not part.is_ensemble]
    return {
        "name": model.name,
        "num_replicas": 1,
        **_replacement(),
        "ray_actor_options": {
            "num_cpus": max(1, sum(map(_num_cpus, configs))),
            "num_gpus": max(map(_num_gpus, configs), default=0),    # each model numbers its GPUs from 0
            "runtime_env": {"env_vars": dict(_VARIABLES)},
        },
    }


def _generation_options(model: DeployedModel, *, scale: Scale) -> dict[str, Any]:
    config = model.stages["logits"].config
    assert config is not None, model.name
    num_stages = num_pipeline_stages(config)
    num_gpus = _num_gpus(config, most=num_stages)   # one engine runs the model, on a device for each stage
    return {
        "name": model.name,
        **_scaling(scale),
        **_replacement(),
        "ray_actor_options": {
            "num_cpus": 1 if num_gpus else num_stages * _threads(config) or default_threads(),
            "num_gpus": num_gpus,
            "runtime_env": {"env_vars": dict(_VARIABLES)},
        },
    }


def _replacement() -> dict[str, Any]:
    """Return the options of rolling updates."""
    return {"graceful_shutdown_timeout_s": _DRAIN_S, "max_surge_percent": _SURGE_PERCENT}


def _scaling(scale: Scale) -> dict[str, Any]:
    if scale.min_replicas == scale.max_replicas:
        return {"num_replicas": scale.min_replicas}
    targets = ScalingTargets()
    kwargs = {"target_usage": targets.usage, "target_waiting_tokens": targets.waiting_tokens}
    scaling = {
        "min_replicas": scale.min_replicas,
        "max_replicas": scale.max_replicas,
        "upscale_delay_s": 10.0,
        "downscale_delay_s": 300.0,
        "policy": {"policy_function": POLICY, "policy_kwargs": kwargs},
    }
    return {"autoscaling_config": scaling}


def _ingress_options() -> dict[str, Any]:
    return {
        "name": INGRESS,
        "num_replicas": 1,
        **_replacement(),
        "ray_actor_options": {"num_cpus": 1, "runtime_env": {"env_vars": dict(_VARIABLES)}},
    }


def _threads(config: ModelConfig) -> int:
    """Return the threads that a config sets for one instance; 0: none."""
    values = [config.parameters[name] for name in _THREADS if name in config.parameters]
    return max((int(value) for value in values if value.isdecimal()), default=0)


def _num_cpus(config: ModelConfig) -> int:
    groups = [group for group in config.instance_groups if group.kind != "KIND_GPU"]
    num_instances = sum(group.count for group in groups) if config.instance_groups else 1
    return num_instances * max(1, _threads(config))


def _num_gpus(config: ModelConfig, *, most: int | None = None) -> int:
    """Return the GPUs that instances name, or as many as they can use (`most`) if they name none."""
    groups = [group for group in config.instance_groups if group.kind == "KIND_GPU"]
    named = {gpu for group in groups for gpu in group.gpus}
    if not named:
        return (most or 1) if groups else 0
    return len(named) if most is None else min(most, len(named))
