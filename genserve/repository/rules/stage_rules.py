"""Stage rules: fields of a text model's configs that its engine does not support.

The other rules are for stages, too.
"""

from __future__ import annotations

from collections.abc import Iterator

from genserve.config.backends import LOGITS_PARAMETERS
from genserve.config.diagnostics import Diagnostic
from genserve.config.model_config import ModelConfig, WarmupInput
from genserve.errors import RepositoryError, suggestion
from genserve.repository.rules.facts import ModelFacts
from genserve.repository.rules.supported_fields import unsupported_in_role
from genserve.repository.text_stages import Role, stage_owners
from genserve.text.reasoning import REASONING_FORMATS
from genserve.text.tool_formats import TOOL_FORMATS
from genserve.textmodel.logits_config import (
    CacheKind,
    LogitsNames,
    cache_kind,
    context_length,
    num_pipeline_stages,
)
from genserve.textmodel.text_inference import INPUTS, OUTPUT

_LOGITS = frozenset(LOGITS_PARAMETERS)
DRAFT_PARAMETERS = frozenset({"speculation", "draft_model"})
_CACHE_PARAMETERS = frozenset({"kv_cache_bytes", "prefix_cache"})
_THREAD_PARAMETERS = frozenset({"intra_op_thread_count", "INTRA_OP_THREAD_COUNT", "INTER_OP_THREAD_COUNT"})
_LEAVE_OUT = "leave it out"


def check_stage(facts: ModelFacts) -> Iterator[Diagnostic]:
    """Reject or warn of the fields without effect in the role of a model, or in a model without a role."""
    config, role, served = facts.config, facts.role, facts.served
    if role is None:
        if config.backend in ("onnxruntime", "pytorch"):
            names = _LOGITS - DRAFT_PARAMETERS
            yield from _parameters(facts, names, where="a model that is not a logits stage")
        return
    for field in unsupported_in_role(facts.parsed.message, role):
        yield facts.parsed.diagnostic(field.severity, field.path, field.message, remedy=_LEAVE_OUT)
    yield from _instance_groups(facts, role)
    if role is Role.DECODER:
        yield from _tensors(facts)
        yield from _formats(facts)
    if role is not Role.TOKENIZER and len(served) > 1:      # a tokenizer is also served as a model of its own
        message = f"version_policy is ignored in a {role}: the engine runs one version, {served[-1]}"
        remedy = f"write `version_policy {{ specific {{ versions: {served[-1]} }} }}`"
        yield facts.warning("version_policy", message, remedy=remedy)
    yield from _parameters(facts, _unread_parameters(config, role), where=f"a {role}")
    if role in (Role.LOGITS, Role.LOGITS_WITHOUT_CACHE):
        yield from _pipeline(facts)
        yield from _warmups(facts)


def check_inflight_requests(facts: ModelFacts) -> Iterator[Diagnostic]:
    """Warn of a limit of the requests between the stages of a text model."""
    if facts.config.max_inflight_requests and facts.role is Role.ENSEMBLE:
        yield facts.warning(
            "ensemble_scheduling[0].max_inflight_requests",
            "max_inflight_requests is ignored: one engine runs the stages, and requests do not "
            "wait between them",
            remedy="leave it out; --max-queue limits the requests that wait for the engine",
        )


def check_drafts(facts: ModelFacts) -> Iterator[Diagnostic]:
    """Reject invalid parameters that choose what drafts tokens for a logits stage; warn of them elsewhere."""
    config = facts.config
    wanted = [name for name in ("speculation", "draft_model") if name in config.parameters]
    if not wanted or config.backend not in ("onnxruntime", "pytorch"):
        return
    if facts.name not in stage_owners(facts.text_models):
        message = f"parameter {wanted[0]!r} has no effect: no ensemble that generates text has this stage"
        yield facts.warning("parameters", message, remedy=_LEAVE_OUT, key=wanted[0])
        return
    if len(wanted) > 1 and config.parameters["speculation"] != "none":
        message = f"model {config.name} has two drafts, `speculation` and `draft_model`"
        yield facts.error("parameters", message, remedy="leave one of them out", key=wanted[-1])
    name = config.parameters.get("draft_model")
    if name is not None and name not in facts.text_models:
        yield facts.error(
            "parameters",
            f"draft_model {name!r} is not in the repository as a model that generates text",
            remedy="name an ensemble of a tokenizer, a logits and a decoder stage",
            key="draft_model",
        )


def _instance_groups(facts: ModelFacts, role: Role) -> Iterator[Diagnostic]:
    """Yield the instance groups and GPUs that the engine does not use: one serves each pipeline stage."""
    num_stages, num_devices = _num_stages(facts.config), 0
    instead = "one engine runs the model, on the first device of the first group"
    if num_stages > 1:
        instead = f"its pipeline has {num_stages} stages"
        kinds = {group.kind for group in facts.config.instance_groups}
        if {"KIND_CPU", "KIND_GPU"} <= kinds:
            message = "the stages of a pipeline run on devices of one kind: KIND_CPU or KIND_GPU"
            remedy = "write one kind into all instance groups"
            yield facts.error("instance_group", message, remedy=remedy)
    for index, group in enumerate(facts.config.instance_groups):
        unused = num_stages - num_devices
        num_devices += max(1, len(group.gpus))
        if num_devices > num_stages:
            path, found = f"instance_group[{index}]", f"instance group {index + 1}"
            if unused > 0:
                path, found = f"{path}.gpus", f"GPU {group.gpus[unused]}"
            message = f"{found} is ignored in a {role}: {instead}"
            yield facts.warning(path, message, remedy=_LEAVE_OUT)


def _num_stages(config: ModelConfig) -> int:
    try:
        return num_pipeline_stages(config)
    except RepositoryError:
        return 1        # an error of the parameters, reported with them


def _pipeline(facts: ModelFacts) -> Iterator[Diagnostic]:
    """Yield the error of a pipeline whose graphs are not as `genserve export` makes them."""
    is_exported = facts.config.backend == "onnxruntime" and cache_kind(facts.config) is CacheKind.IN_PLACE
    if _num_stages(facts.config) > 1 and not is_exported:
        message = "parameter 'pipeline_stages' is for ONNX graphs that write their KV cache in place"
        remedy = f"{_LEAVE_OUT}, or export the model with `genserve export --pipeline-stages`"
        yield facts.error("parameters", message, remedy=remedy, key="pipeline_stages")


def _tensors(facts: ModelFacts) -> Iterator[Diagnostic]:
    """Yield the tensors that a decoding loop does not get or give."""
    for index, spec in enumerate(facts.config.inputs):
        is_logits = spec.data_type == "TYPE_FP32" and not spec.optional     # by whatever name
        if spec.name not in INPUTS and not is_logits:
            message = f"input '{spec.name}' is ignored in a decoder stage: a request cannot set it"
            remedy = suggestion(spec.name, known=sorted(INPUTS))
            yield facts.warning(f"input[{index}].name", message, remedy=remedy)
    for index, spec in enumerate(facts.config.outputs):
        if spec.name != OUTPUT:
            message = f"output '{spec.name}' is ignored in a decoder stage: it gives {OUTPUT} alone"
            yield facts.warning(f"output[{index}].name", message, remedy=_LEAVE_OUT)
    if not facts.config.output(OUTPUT):
        message = f"a decoder stage gives {OUTPUT}, which this config lacks"
        remedy = f'add `output {{ name: "{OUTPUT}" data_type: TYPE_STRING dims: [ 1 ] }}`'
        yield facts.error("output", message, remedy=remedy)


def _formats(facts: ModelFacts) -> Iterator[Diagnostic]:
    """Yield the errors of unknown formats of tool calls and of reasoning."""
    for key, known in (("tool_format", TOOL_FORMATS), ("reasoning_format", REASONING_FORMATS)):
        name = facts.config.parameters.get(key)
        if name is not None and name not in known:
            remedy = suggestion(name, known=known)
            yield facts.error("parameters", f"{key} {name!r} is unknown", remedy=remedy, key=key)


def _unread_parameters(config: ModelConfig, role: Role) -> frozenset[str]:
    """Return the parameters of a config that nothing reads in this role."""
    names = frozenset(config.parameters)
    if role is Role.DECODER:
        return names - {"tool_format", "reasoning_format"}
    if role is Role.ENSEMBLE:
        return names & (_LOGITS | _THREAD_PARAMETERS)
    if role is Role.LOGITS_WITHOUT_CACHE:
        return names & _CACHE_PARAMETERS
    if role is Role.LOGITS and cache_kind(config) is CacheKind.IN_PLACE:
        return names - _LOGITS - _THREAD_PARAMETERS
    return frozenset()


def _parameters(facts: ModelFacts, names: frozenset[str], *, where: str) -> Iterator[Diagnostic]:
    for name in sorted(names & facts.config.parameters.keys()):
        belongs = name in _LOGITS
        remedy = "write it into the config of a logits stage with a KV cache" if belongs else _LEAVE_OUT
        message = f"parameter {name!r} has no effect in {where}"
        yield facts.warning("parameters", message, remedy=remedy, key=name)


def _warmups(facts: ModelFacts) -> Iterator[Diagnostic]:
    """Yield the warm-up samples that the engine cannot run."""
    try:
        input_ids, longest = LogitsNames.of(facts.config).input_ids, context_length(facts.config)
    except RepositoryError:
        return      # an error of the tensors or the parameters, reported with them
    for index, sample in enumerate(facts.config.warmups):
        spec = next((spec for spec in sample.inputs if spec.name == input_ids), None)
        problem = _warmup_problem(spec, longest=longest) if spec and sample.batch_size else ""
        if problem:
            yield facts.error(
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
