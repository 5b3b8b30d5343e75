"""Stage rules: fields of a text model's configs that its engine does not support.

A stage is validated like any other model, and by these rules as well. Loading applies them too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from genserve.config.diagnostics import Diagnostic, Severity
from genserve.config.model_config import ModelConfig, WarmupInput
from genserve.config.parameter_rules import LOGITS_PARAMETERS
from genserve.config.parse import ParsedConfig
from genserve.config.supported_fields import Role, unsupported_in_role
from genserve.errors import RepositoryError, suggestion
from genserve.text.tool_formats import TOOL_FORMATS
from genserve.textmodel.logits_config import (
    CacheKind,
    LogitsNames,
    cache_kind,
    context_length,
    num_pipeline_stages,
)
from genserve.textmodel.text_inference import INPUTS, OUTPUT

DRAFT_PARAMETERS = frozenset({"speculation", "draft_model"})
_CACHE_PARAMETERS = frozenset({"kv_cache_bytes", "prefix_cache"})
_THREAD_PARAMETERS = frozenset({"intra_op_thread_count", "INTRA_OP_THREAD_COUNT", "INTER_OP_THREAD_COUNT"})
_LEAVE_OUT = "leave it out"


def stage_diagnostics(
    parsed: ParsedConfig, config: ModelConfig, role: Role | None, *, served: Sequence[int]
) -> Iterator[Diagnostic]:
    """Yield the fields without effect in the role of a model, or in a model without a role.

    Args:
        parsed: the config with its positions.
        config: its values.
        role: of the model in the text models that it is part of; None: it is part of none.
        served: the versions that its version policy serves, ascending; empty: the policy has an error.
    """
    if role is None:
        if config.backend in ("onnxruntime", "pytorch"):
            names = LOGITS_PARAMETERS - DRAFT_PARAMETERS
            yield from _parameters(parsed, config, names, where="a model that is not a logits stage")
        return
    for field in unsupported_in_role(parsed.message, role):
        yield parsed.diagnostic(field.severity, field.path, field.message, remedy=_LEAVE_OUT)
    yield from _instance_groups(parsed, config, role)
    if role is Role.DECODER:
        yield from _tensors(parsed, config)
        yield from _tool_format(parsed, config)
    if role is not Role.TOKENIZER and len(served) > 1:      # a tokenizer is also served as a model of its own
        message = f"version_policy is ignored in a {role}: the engine runs one version, {served[-1]}"
        remedy = f"write `version_policy {{ specific {{ versions: {served[-1]} }} }}`"
        yield parsed.diagnostic(Severity.WARNING, "version_policy", message, remedy=remedy)
    yield from _parameters(parsed, config, _unread_parameters(config, role), where=f"a {role}")
    if role in (Role.LOGITS, Role.LOGITS_WITHOUT_CACHE):
        yield from _pipeline(parsed, config)
        yield from _warmups(parsed, config)


def draft_diagnostics(
    parsed: ParsedConfig, config: ModelConfig, *, text_models: Collection[str], is_stage: bool
) -> Iterator[Diagnostic]:
    """Yield the errors in the parameters that choose what drafts tokens for a logits stage.

    Args:
        parsed: the config with its positions.
        config: its values.
        text_models: the names of all text models of the repository.
        is_stage: whether a text model has this stage.
    """
    wanted = [name for name in ("speculation", "draft_model") if name in config.parameters]
    if not wanted or config.backend not in ("onnxruntime", "pytorch"):
        return
    if not is_stage:
        message = f"parameter {wanted[0]!r} has no effect: no ensemble that generates text has this stage"
        yield _of_parameter(parsed, Severity.WARNING, wanted[0], message, remedy=_LEAVE_OUT)
        return
    if len(wanted) > 1 and config.parameters["speculation"] != "none":
        message = f"model {config.name} has two drafts, `speculation` and `draft_model`"
        yield _of_parameter(parsed, Severity.ERROR, wanted[-1], message, remedy="leave one of them out")
    name = config.parameters.get("draft_model")
    if name is not None and name not in text_models:
        yield _of_parameter(
            parsed,
            Severity.ERROR,
            "draft_model",
            f"draft_model {name!r} is not in the repository as a model that generates text",
            remedy="name an ensemble of a tokenizer, a logits and a decoder stage",
        )


def _of_parameter(
    parsed: ParsedConfig, severity: Severity, key: str, message: str, *, remedy: str
) -> Diagnostic:
    return parsed.diagnostic(severity, "parameters", message, remedy=remedy, key=key)


def _instance_groups(parsed: ParsedConfig, config: ModelConfig, role: Role) -> Iterator[Diagnostic]:
    """Yield the instance groups and GPUs beyond those of the engine: one, or one for each pipeline stage."""
    num_stages, num_devices = _num_stages(config), 0
    instead = "one engine runs the model, on the first device of the first group"
    if num_stages > 1:
        instead = f"its pipeline has {num_stages} stages"
        kinds = {group.kind for group in config.instance_groups}
        if {"KIND_CPU", "KIND_GPU"} <= kinds:
            message = "the stages of a pipeline run on devices of one kind: KIND_CPU or KIND_GPU"
            remedy = "write one kind into all instance groups"
            yield parsed.diagnostic(Severity.ERROR, "instance_group", message, remedy=remedy)
    for index, group in enumerate(config.instance_groups):
        unused = num_stages - num_devices
        num_devices += max(1, len(group.gpus))
        if num_devices > num_stages:
            path, found = f"instance_group[{index}]", f"instance group {index + 1}"
            if unused > 0:
                path, found = f"{path}.gpus", f"GPU {group.gpus[unused]}"
            message = f"{found} is ignored in a {role}: {instead}"
            yield parsed.diagnostic(Severity.WARNING, path, message, remedy=_LEAVE_OUT)


def _num_stages(config: ModelConfig) -> int:
    try:
        return num_pipeline_stages(config)
    except RepositoryError:
        return 1        # an error of the parameters, reported with them


def _pipeline(parsed: ParsedConfig, config: ModelConfig) -> Iterator[Diagnostic]:
    """Yield the error of a pipeline of other graphs than those of `genserve export`."""
    is_exported = config.backend == "onnxruntime" and cache_kind(config) is CacheKind.IN_PLACE
    if _num_stages(config) > 1 and not is_exported:
        message = "parameter 'pipeline_stages' is for ONNX graphs that write their KV cache in place"
        remedy = f"{_LEAVE_OUT}, or export the model with `genserve export --pipeline-stages`"
        yield _of_parameter(parsed, Severity.ERROR, "pipeline_stages", message, remedy=remedy)


def _tensors(parsed: ParsedConfig, config: ModelConfig) -> Iterator[Diagnostic]:
    """Yield the tensors that a decoding loop does not get or give."""
    for index, spec in enumerate(config.inputs):
        is_logits = spec.data_type == "TYPE_FP32" and not spec.optional     # by whatever name
        if spec.name not in INPUTS and not is_logits:
            message = f"input '{spec.name}' is ignored in a decoder stage: a request cannot set it"
            remedy = suggestion(spec.name, known=sorted(INPUTS))
            yield parsed.diagnostic(Severity.WARNING, f"input[{index}].name", message, remedy=remedy)
    for index, spec in enumerate(config.outputs):
        if spec.name != OUTPUT:
            message = f"output '{spec.name}' is ignored in a decoder stage: it gives {OUTPUT} alone"
            yield parsed.diagnostic(Severity.WARNING, f"output[{index}].name", message, remedy=_LEAVE_OUT)
    if not config.output(OUTPUT):
        message = f"a decoder stage gives {OUTPUT}, which this config lacks"
        remedy = f'add `output {{ name: "{OUTPUT}" data_type: TYPE_STRING dims: [ 1 ] }}`'
        yield parsed.diagnostic(Severity.ERROR, "output", message, remedy=remedy)


def _tool_format(parsed: ParsedConfig, config: ModelConfig) -> Iterator[Diagnostic]:
    """Yield the error of an unknown format of tool calls."""
    name = config.parameters.get("tool_format", "hermes")
    if name not in TOOL_FORMATS:
        message = f"tool_format {name!r} is unknown"
        remedy = suggestion(name, known=TOOL_FORMATS)
        yield _of_parameter(parsed, Severity.ERROR, "tool_format", message, remedy=remedy)


def _unread_parameters(config: ModelConfig, role: Role) -> frozenset[str]:
    """Return the parameters of a config that nothing reads in this role."""
    names = frozenset(config.parameters)
    if role is Role.DECODER:
        return names - {"tool_format"}
    if role is Role.ENSEMBLE:
        return names & (LOGITS_PARAMETERS | _THREAD_PARAMETERS)
    if role is Role.LOGITS_WITHOUT_CACHE:
        return names & _CACHE_PARAMETERS
    if role is Role.LOGITS and cache_kind(config) is CacheKind.IN_PLACE:
        return names - LOGITS_PARAMETERS - _THREAD_PARAMETERS
    return frozenset()


def _parameters(
    parsed: ParsedConfig, config: ModelConfig, names: frozenset[str], *, where: str
) -> Iterator[Diagnostic]:
    for name in sorted(names & config.parameters.keys()):
        belongs = name in LOGITS_PARAMETERS
        remedy = "write it into the config of a logits stage with a KV cache" if belongs else _LEAVE_OUT
        message = f"parameter {name!r} has no effect in {where}"
        yield _of_parameter(parsed, Severity.WARNING, name, message, remedy=remedy)


def _warmups(parsed: ParsedConfig, config: ModelConfig) -> Iterator[Diagnostic]:
    """Yield the warm-up samples that the engine cannot run."""
    try:
        input_ids, longest = LogitsNames.of(config).input_ids, context_length(config)
    except RepositoryError:
        return      # an error of the tensors or the parameters, reported with them
    for index, sample in enumerate(config.warmups):
        spec = next((spec for spec in sample.inputs if spec.name == input_ids), None)
        problem = _warmup_problem(spec, longest=longest) if spec and sample.batch_size else ""
        if problem:
            yield parsed.diagnostic(
                Severity.ERROR,
                f"model_warmup[{index}].inputs",
                f"failed to run warmup sample '{sample.name}': {problem}",
                remedy="write `zero_data: true` and as many ids as a prompt often has",
                key=input_ids,
            )


def _warmup_problem(spec: WarmupInput, *, longest: int) -> str:
    if spec.source == "random_data":
        return f"random ids of '{spec.name}' are outside the vocabulary"
    num_ids = max(spec.dims, default=1)
    if longest and num_ids > longest:
        return f"{num_ids} token ids are given; the model's context is {longest}"
    return ""
