"""Source model: runs a checkpoint in transformers, as the reference for its export."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.modeling_layers import GradientCheckpointingLayer

from genserve.errors import ExportError
from genserve.export.checkpoint import Checkpoint
from genserve.export.reference import Reference, text_ids


def run_source(
    checkpoint: Checkpoint,
    *,
    context_length: int,
    norms: Mapping[str, str],
    advance: Callable[[int], None] = lambda _units: None,
) -> Reference:
    """Run the source once over both texts, with the weights of one layer at a time in memory.

    Args:
        checkpoint: of any architecture of transformers.
        context_length: the model's, in tokens.
        norms: the norms to observe: role to the name of the module.
        advance: called with 1 after each layer.

    Raises:
        ExportError: transformers cannot build the model, the tensors do not have the shapes that the config
            states, the logits are not finite, or the tokenizer is broken or of another model.
    """
    seen, ids = text_ids(checkpoint, context_length=context_length)
    model = _streamed_model(checkpoint)
    _require_known(np.concatenate([seen, ids]), model=model, source=checkpoint.source)
    hidden: list[torch.Tensor] = []

    def leave_out_seen(_module: Any, args: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Only held-out tokens reach the head, because the logits are the largest array of all."""
        hidden.append(args[0][len(seen) :])
        return hidden[0]

    model.get_output_embeddings().register_forward_pre_hook(leave_out_seen)
    squares: dict[str, torch.Tensor] = {}

    def observe(_module: Any, _args: Any, output: torch.Tensor, *, role: str) -> None:
        flat = output.reshape(-1, output.shape[-1])  # some modules put rows and tokens in one dimension
        squares[role] = flat[: seen.size].square().mean(dim=0)

    for role, name in norms.items():
        model.get_submodule(name).register_forward_hook(partial(observe, role=role))
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):  # the base class of transformers' decoder layers
            module.register_forward_hook(lambda *_call: advance(1))
    with torch.inference_mode():
        logits = model(torch.from_numpy(np.concatenate([seen, ids])), use_cache=False).logits
    if not torch.isfinite(torch.stack(logits.aminmax())).all():
        raise ExportError(
            f"{checkpoint.source} computes logits that are not finite",
            remedy="its weights are broken; download it again",
        )
    return Reference(
        ids=ids,
        hidden=hidden[0].numpy(),
        logits=logits.numpy(),
        activations={role: square.sqrt().numpy() for role, square in squares.items()},
    )


def source_model(checkpoint: Checkpoint) -> PreTrainedModel:
    """Return the model of the checkpoint as transformers builds it, in float32, with its weights loaded.

    Raises:
        ExportError: the tensors do not have the shapes that the config states.
    """
    model = _empty_model(checkpoint)
    names = checkpoint.tensor_names & model.state_dict().keys()
    weights = {name: torch.from_numpy(checkpoint.tensor(name)) for name in names}
    try:
        missing = model.load_state_dict(weights, strict=False, assign=True).missing_keys
    except RuntimeError as error:
        raise _misshapen(checkpoint, error) from error
    assert set(missing) <= set(model.all_tied_weights_keys), missing
    model.tie_weights()
    return model


def _empty_model(checkpoint: Checkpoint) -> PreTrainedModel:
    """Return the model with uninitialized weights, whose memory is reserved and not yet touched."""
    config = AutoConfig.for_model(**checkpoint.config)
    try:
        with no_init_weights():
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                config, attn_implementation="eager", dtype=torch.float32, trust_remote_code=False
            )
    except (AssertionError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ExportError(
            f"transformers cannot build {checkpoint.source} from its config: {' '.join(str(error).split())}",
            remedy="config.json does not match the model; download it again",
        ) from error
    return model.eval()


def _streamed_model(checkpoint: Checkpoint) -> PreTrainedModel:
    """Return the model, each of whose modules has its weights only while it is called."""
    model = _empty_model(checkpoint)
    tied = dict(model.all_tied_weights_keys)

    def load(module: torch.nn.Module, _args: Any, *, prefix: str) -> None:
        for part, empty in list(module.named_parameters(recurse=False)):
            name = f"{prefix}.{part}"
            name = name if name in checkpoint.tensor_names else tied.get(name, name)
            weight = torch.from_numpy(checkpoint.tensor(name))
            if weight.shape != empty.shape:
                raise _misshapen(checkpoint, f"{name} is {tuple(weight.shape)}, not {tuple(empty.shape)}")
            setattr(module, part, torch.nn.Parameter(weight, requires_grad=False))

    for prefix, module in model.named_modules():
        empties = dict(module.named_parameters(recurse=False))
        if empties:
            module.register_forward_pre_hook(partial(load, prefix=prefix))
            module.register_forward_hook(partial(_unload, empties=empties))
    return model


def _unload(
    module: torch.nn.Module, _args: Any, _output: Any, *, empties: Mapping[str, torch.nn.Parameter]
) -> None:
    for part, empty in empties.items():
        setattr(module, part, empty)


def _misshapen(checkpoint: Checkpoint, error: object) -> ExportError:
    return ExportError(
        f"the tensors of {checkpoint.source} have other shapes than its config states: {error}",
        remedy="the checkpoint's files do not belong together; download it again",
    )


def _require_known(ids: NDArray[np.int64], *, model: PreTrainedModel, source: str) -> None:
    last, largest = model.get_input_embeddings().weight.shape[0] - 1, int(ids.max())
    if largest > last:
        raise ExportError(
            f"the tokenizer of {source} has a token {largest}, but the model's vocabulary ends at {last}",
            remedy="the checkpoint's files do not belong together; download it again",
        )
