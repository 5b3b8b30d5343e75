"""Source model: runs a checkpoint in transformers, as the reference for exports.

It runs over two texts in `texts/`, which were written for this purpose and share no sentence: prose,
dialogue, instructions, code, tables, numbers, other languages. `calibration` yields the size of activations;
exported graphs are compared on `held_out`.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.modeling_layers import GradientCheckpointingLayer

from genserve.errors import ExportError, InvalidRequest, ModelFailed, RepositoryError
from genserve.export.checkpoint import Checkpoint
from genserve.prompt import Chat, Message
from genserve.sampling.logits_array import FloatArray
from genserve.text.tokenizer import Tokenizer

_TEXTS = Path(__file__).parent / "texts"
_MAX_LENGTH = 256  # tokens of a row
_MAX_ROWS = 8      # of each text


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """The results of one run of the source."""

    ids: NDArray[np.int64]                  # [rows, tokens] of the held-out text
    logits: FloatArray                      # [rows, tokens, vocab], after each of these tokens
    # By the role of a norm: the root mean square [hidden] of its output over the calibration text.
    activations: Mapping[str, FloatArray]


def read_text(name: Literal["calibration", "held_out"]) -> str:
    """One of the two texts."""
    return (_TEXTS / f"{name}.txt").read_text(encoding="utf-8")


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
    seen, ids = _token_ids(checkpoint, length=min(_MAX_LENGTH, context_length))
    model = _streamed_model(checkpoint)
    _require_known(np.concatenate([seen, ids]), model=model, source=checkpoint.source)
    # Only held-out tokens reach the head, because the logits are the largest array of all.
    model.get_output_embeddings().register_forward_pre_hook(lambda _module, args: (args[0][len(seen) :],))
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
        logits=logits.numpy(),
        activations={role: square.sqrt().numpy() for role, square in squares.items()},
    )


def source_model(checkpoint: Checkpoint) -> PreTrainedModel:
    """The model of the checkpoint as transformers builds it, in float32, with its weights loaded.

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
    """The model with uninitialized weights, whose memory is reserved and not yet touched."""
    config = AutoConfig.for_model(**checkpoint.config)
    try:
        with no_init_weights():
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                config, attn_implementation="eager", dtype=torch.float32
            )
    except (AssertionError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ExportError(
            f"transformers cannot build {checkpoint.source} from its config: {' '.join(str(error).split())}",
            remedy="config.json does not match the model; download it again",
        ) from error
    return model.eval()


def _streamed_model(checkpoint: Checkpoint) -> PreTrainedModel:
    """The model, each of whose modules has its weights only while it is called."""
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


def _token_ids(checkpoint: Checkpoint, *, length: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The calibration and the held-out text as token ids [rows, length] each."""
    with tempfile.TemporaryDirectory() as folder:
        for name, content in checkpoint.tokenizer_files.items():
            (Path(folder) / name).write_bytes(content)
        try:
            tokenizer = Tokenizer.from_folder(Path(folder))
            seen = _rows(tokenizer, "calibration", length=length)
            held_out = _rows(tokenizer, "held_out", length=length)
        except (InvalidRequest, ModelFailed, RepositoryError) as error:
            reason = error.message.replace(f"{folder}/", "")
            raise ExportError(
                f"the tokenizer of {checkpoint.source} cannot be used: {reason}",
                remedy="download it again, or repair the file",
            ) from error
    return seen, held_out


def _require_known(ids: NDArray[np.int64], *, model: PreTrainedModel, source: str) -> None:
    last, largest = model.get_input_embeddings().weight.shape[0] - 1, int(ids.max())
    if largest > last:
        raise ExportError(
            f"the tokenizer of {source} has a token {largest}, but the model's vocabulary ends at {last}",
            remedy="the checkpoint's files do not belong together; download it again",
        )


def _rows(
    tokenizer: Tokenizer, name: Literal["calibration", "held_out"], *, length: int
) -> NDArray[np.int64]:
    chat = [Message(**turn) for turn in json.loads((_TEXTS / f"{name}_chat.json").read_text("utf-8"))]
    if tokenizer.chat_template is None:
        turns = tokenizer.encode("\n\n".join(message.content for message in chat))
    else:
        turns = tokenizer.encode_chat(Chat(messages=tuple(chat)))
    ids = turns + tokenizer.encode(read_text(name))
    num_rows = min(_MAX_ROWS, len(ids) // length)
    return np.array(ids[: num_rows * length]).reshape(num_rows, length)
