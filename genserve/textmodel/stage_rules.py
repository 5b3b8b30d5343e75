"""Stage rules: fields of a text model's configs that its engine does not support.

A stage is validated like any other model, and by these rules as well. Loading applies them too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from genserve.config.diagnostics import Diagnostic, Severity, nearest
from genserve.config.model_config import ModelConfig, WarmupInput
from genserve.config.parameter_rules import LOGITS_PARAMETERS
from genserve.config.parse import ParsedConfig
from genserve.config.supported_fields import Role, unsupported_in_role
from genserve.errors import RepositoryError
from genserve.repository.ensemble_steps import generation_chains, generation_stages, stage_owners
from genserve.repository.index import ModelEntry, served_versions
from genserve.textmodel.logits_config import LogitsNames
from genserve.textmodel.logits_runtime import CacheKind, cache_kind, context_length, is_logits_stage
from genserve.textmodel.text_inference import INPUTS, OUTPUT

__all__ = ["draft_diagnostics", "role_of", "stage_diagnostics"]


def draft_diagnostics(
    entry: ModelEntry, config: ModelConfig, entries: Mapping[str, ModelEntry]
) -> Iterator[Diagnostic]:
    """Yield the diagnostics of a model that may be a logits stage.

    Args:
        entry: the model.
        config: its config.
        entries: all models of the repository, by name.
    """
    parameters = config.parameters
    wanted = [name for name in ("speculation", "draft_model") if name in parameters]
    if not wanted or config.backend not in ("onnxruntime", "pytorch"):
        return
    chains = generation_chains(entries)
    if entry.name not in stage_owners(chains):
        message = f"parameter {wanted[0]!r} has no effect: no ensemble that generates text has this stage"
        yield _diagnostic(entry, Severity.WARNING, wanted[0], message, remedy="leave it out")
        return
    if len(wanted) > 1 and parameters["speculation"] != "none":
        message = f"model {entry.name} has two drafts, `speculation` and `draft_model`"
        yield _diagnostic(entry, Severity.ERROR, wanted[-1], message, remedy="leave one of them out")
    name = parameters.get("draft_model")
    if name is not None and name not in chains:
        yield _diagnostic(
            entry,
            Severity.ERROR,
            "draft_model",
            f"draft_model {name!r} is not in the repository as a model that generates text",
            remedy="name an ensemble of a tokenizer, a logits and a decoder stage",
        )


def _diagnostic(entry: ModelEntry, severity: Severity, key: str, message: str, *, remedy: str) -> Diagnostic:
    return entry.parsed.diagnostic(severity, "parameters", message, remedy=remedy, key=key)


_OF_CACHE = frozenset({"kv_cache_bytes", "prefix_cache"})
_OF_DRAFTS = frozenset({"speculation", "draft_model"})      # of which the rules of drafts tell
_OF_THREADS = frozenset({"intra_op_thread_count", "INTRA_OP_THREAD_COUNT", "INTER_OP_THREAD_COUNT"})
_LEAVE_OUT = "leave it out"


def stage_diagnostics(entry: ModelEntry, config: ModelConfig, role: Role | None) -> Iterator[Diagnostic]:
    """Yield what a model asks for in vain as part of a text model; for other models, what only those do.

    Args:
        entry: the model.
        config: its config.
        role: see `role_of`.
    """
    parsed = entry.parsed
    if role is None:
        if config.backend in ("onnxruntime", "pytorch"):
            names = LOGITS_PARAMETERS - _OF_DRAFTS
            yield from _parameters(parsed, config, names, what="a model that is not a logits stage")
        return
    for field in unsupported_in_role(parsed.message, role):
        yield parsed.diagnostic(field.severity, field.path, field.message, remedy=_LEAVE_OUT)
    for index, group in enumerate(config.instance_groups):
        if index or len(group.gpus) > 1:
            path, what = f"instance_group[{index}]", "a second instance group"
            if not index:
                path, what = f"{path}.gpus", "a second GPU"
            instead = "one engine runs the model, on the first device of the first group"
            message = f"{what} is not honoured in a {role}: {instead}"
            yield parsed.diagnostic(Severity.WARNING, path, message, remedy=_LEAVE_OUT)
    if role is Role.DECODER:
        yield from _tensors(parsed, config)
    if role is not Role.TOKENIZER:  # which is served as a model of its own, too
        yield from _versions(entry, config, role)
    yield from _parameters(parsed, config, _unread(config, role), what=f"a {role}")
    if role in (Role.LOGITS, Role.LOGITS_WITHOUT_CACHE):
        yield from _warmups(parsed, config)


def role_of(entry: ModelEntry, config: ModelConfig, entries: Mapping[str, ModelEntry]) -> Role | None:
    """Return what a model is to the text models that it is a part of; None: it is part of none."""
    if entry.is_ensemble:
        return Role.ENSEMBLE if generation_stages(entry, entries) else None
    of_logits = Role.LOGITS_WITHOUT_CACHE if cache_kind(config) is CacheKind.NONE else Role.LOGITS
    if is_logits_stage(entry):
        return of_logits
    roles = {"tokenizer": Role.TOKENIZER, "logits": of_logits, "decoder": Role.DECODER}
    for ensemble in entries.values():
        steps = ensemble.config.ensemble_steps if ensemble.config else ()
        if any(step.model_name == entry.name for step in steps):
            for name, stage in (generation_stages(ensemble, entries) or {}).items():
                if stage.name == entry.name:
                    return roles[name]
    return None


def _tensors(parsed: ParsedConfig, config: ModelConfig) -> Iterator[Diagnostic]:
    """Yield the tensors that no decoding loop is given or gives."""
    for index, spec in enumerate(config.inputs):
        is_logits = spec.data_type == "TYPE_FP32" and not spec.optional     # by whatever name
        if spec.name not in INPUTS and not is_logits:
            message = f"input '{spec.name}' is not honoured in a decoder stage: a request cannot set it"
            remedy = nearest(spec.name, known=sorted(INPUTS))
            yield parsed.diagnostic(Severity.WARNING, f"input[{index}].name", message, remedy=remedy)
    for index, spec in enumerate(config.outputs):
        if spec.name != OUTPUT:
            message = f"output '{spec.name}' is not honoured in a decoder stage: it gives {OUTPUT} alone"
            yield parsed.diagnostic(Severity.WARNING, f"output[{index}].name", message, remedy=_LEAVE_OUT)
    if not config.output(OUTPUT):
        message = f"a decoder stage gives {OUTPUT}, which this config lacks"
        remedy = f'add `output {{ name: "{OUTPUT}" data_type: TYPE_STRING dims: [ 1 ] }}`'
        yield parsed.diagnostic(Severity.ERROR, "output", message, remedy=remedy)


def _versions(entry: ModelEntry, config: ModelConfig, role: Role) -> Iterator[Diagnostic]:
    """Yield the versions that the policy serves, and the engine does not."""
    try:
        *others, last = served_versions(config, entry.versions)
    except RepositoryError:
        return      # which is a diagnostic of the files, or none of an ensemble
    if others:
        message = f"version_policy is not honoured in a {role}: the engine runs one version, {last}"
        remedy = f"write `version_policy {{ specific {{ versions: {last} }} }}`"
        yield entry.parsed.diagnostic(Severity.WARNING, "version_policy", message, remedy=remedy)


def _unread(config: ModelConfig, role: Role) -> frozenset[str]:
    """Return those parameters of a config that nobody reads in this role."""
    names = frozenset(config.parameters)
    if role is Role.DECODER:
        return names
    if role is Role.ENSEMBLE:
        return names & (LOGITS_PARAMETERS | _OF_THREADS)
    if role is Role.LOGITS_WITHOUT_CACHE:
        return names & _OF_CACHE
    if role is Role.LOGITS and cache_kind(config) is CacheKind.IN_PLACE:
        return names - LOGITS_PARAMETERS - _OF_THREADS
    return frozenset()


def _parameters(
    parsed: ParsedConfig, config: ModelConfig, names: frozenset[str], *, what: str
) -> Iterator[Diagnostic]:
    for name in sorted(names & config.parameters.keys()):
        belongs = name in LOGITS_PARAMETERS
        yield parsed.diagnostic(
            Severity.WARNING,
            "parameters",
            f"parameter {name!r} has no effect in {what}",
            remedy="write it into the config of a logits stage with a KV cache" if belongs else _LEAVE_OUT,
            key=name,
        )


def _warmups(parsed: ParsedConfig, config: ModelConfig) -> Iterator[Diagnostic]:
    """Yield the warm-up samples that the engine cannot run."""
    try:
        input_ids, longest = LogitsNames.of(config).input_ids, context_length(config)
    except RepositoryError:
        return      # which is a diagnostic of the tensors or the parameters
    for index, sample in enumerate(config.warmups):
        spec = next((spec for spec in sample.inputs if spec.name == input_ids), None)
        problem = _problem(spec, longest=longest) if spec and sample.batch_size else ""
        if problem:
            yield parsed.diagnostic(
                Severity.ERROR,
                f"model_warmup[{index}].inputs",
                f"failed to run warmup sample '{sample.name}': {problem}",
                remedy="write `zero_data: true` and as many ids as a prompt often has",
                key=input_ids,
            )


def _problem(spec: WarmupInput, *, longest: int) -> str:
    if spec.source == "random_data":
        return f"random ids of '{spec.name}' are outside the vocabulary"
    num_ids = max(spec.dims, default=1)
    if longest and num_ids > longest:
        return f"{num_ids} token ids are given; the model's context is {longest}"
    return ""
