"""Source model: runs a checkpoint in transformers, as the reference for its export."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from textwrap import shorten
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights

from genserve.errors import ExportError
from genserve.export.checkpoints.checkpoint import Checkpoint
from genserve.export.checkpoints.rows import Rows
from genserve.export.reference import Positions, Reference, text_ids
from genserve.sampling.logits_array import FloatArray

_LARGE = 1 << 25  # numbers of a weight that is not in memory as a whole


@contextmanager
def export_errors(problem: str, *, remedy: str) -> Iterator[None]:
    """Turn any exception of transformers or torch into an ExportError that says what the problem is."""
    try:
        yield
    except ExportError:
        raise
    except Exception as error:
        # Shorten the text, because transformers lists all models that it knows.
        reason = shorten(str(error.__cause__ or error), width=300) or type(error).__name__
        raise ExportError(f"{problem}: {reason}", remedy=remedy) from error


@contextmanager
def without_warnings() -> Iterator[None]:
    """Silence the warnings of torch and transformers, which are meant for authors of models."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)


def run_source(
    checkpoint: Checkpoint,
    *,
    context_length: int,
    norms: Mapping[str, str],
) -> Reference:
    """Run the source once over both texts, with the weights of one layer at a time in memory.

    Args:
        checkpoint: a checkpoint of any architecture in transformers.
        context_length: the model's context length, in tokens.
        norms: the norms to observe: the names of modules by role.

    Raises:
        ExportError: transformers cannot build the model, the tensors do not have the shapes that the config
            states, the logits are not finite, or the tokenizer is broken or belongs to another model.
    """
    seen, ids = text_ids(checkpoint, context_length=context_length)
    model = _streamed_model(checkpoint)
    _require_known(np.concatenate([seen, ids]), model=model, source=checkpoint.source)
    hidden: list[torch.Tensor] = []

    def leave_out(_module: Any, args: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Pass one token to the head, because the logits of all of them are the largest array of all."""
        hidden.append(args[0][len(seen) :])
        return args[0][:1, :1]

    outputs: list[type[Any]] = []
    seen_output = _decoder_of(model).register_forward_hook(
        lambda _module, _args, output: outputs.append(type(output))
    )
    kept = model.get_output_embeddings().register_forward_pre_hook(leave_out)
    squares: dict[str, torch.Tensor] = {}

    def observe(_module: Any, _args: Any, output: torch.Tensor, *, role: str) -> None:
        flat = output.reshape(-1, output.shape[-1])  # some modules put rows and tokens in one dimension
        squares[role] = flat[: seen.size].square().mean(dim=0)

    for role, name in norms.items():
        model.get_submodule(name).register_forward_hook(partial(observe, role=role))
    with torch.inference_mode():
        model(torch.from_numpy(np.concatenate([seen, ids])), use_cache=False)
    kept.remove()
    seen_output.remove()
    logits = _Logits(model=model, output=outputs[0], hidden=hidden[0], source=checkpoint.source)
    first = np.zeros(1, np.int64)
    _require_finite(logits[first, first], hidden[0].numpy(), source=checkpoint.source)
    return Reference(
        ids=ids,
        hidden=hidden[0].numpy(),
        logits=logits,
        activations={role: square.sqrt().numpy() for role, square in squares.items()},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Logits:
    """Logits that transformers' model computes on demand, from what its layers have computed."""

    model: PreTrainedModel
    output: type[Any]  # the class of what its layers return
    hidden: torch.Tensor  # [rows, tokens, hidden], the input of the head
    source: str

    def __getitem__(self, at: tuple[Positions, Positions]) -> FloatArray:
        """See `Logits`."""
        rows, tokens = map(torch.from_numpy, at)
        computed = self.output(last_hidden_state=self.hidden[rows, tokens][None])
        # The head, and what the model does after it, run as they are.
        _decoder_of(self.model).forward = lambda *_args, **_options: computed
        with torch.inference_mode():
            logits: FloatArray = self.model(torch.zeros((1, len(rows)), dtype=torch.long)).logits[0].numpy()
        _require_finite(logits, source=self.source)
        return logits


def _decoder_of(model: PreTrainedModel) -> Any:
    """Return the module with the layers, which transformers does not find in Llama 4."""
    found = model.get_decoder()
    return found.model if found is model else found


def _require_finite(*arrays: FloatArray, source: str) -> None:
    if not all(np.isfinite([array.min(), array.max()]).all() for array in arrays):
        raise ExportError(
            f"{source} computes logits that are not finite",
            remedy="its weights are broken; download it again",
        )


def source_model(checkpoint: Checkpoint) -> PreTrainedModel:
    """Return transformers' model of the checkpoint, in float32, with its weights loaded.

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
    """Return the model with uninitialized weights, whose memory is reserved but untouched."""
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
    """Return a model in which each module has its weights only while it is called.

    Of a large embedding it has the rows that the text needs, and of a large linear layer a part at a time.
    """
    model = _empty_model(checkpoint)
    tied = dict(model.all_tied_weights_keys)

    def own_name(name: str) -> str:
        return name if name in checkpoint.tensor_names else tied.get(name, name)

    def require_shape(name: str, found: Sequence[int], empty: torch.Tensor) -> None:
        if tuple(found) != tuple(empty.shape):
            raise _misshapen(checkpoint, f"{name} is {tuple(found)}, not {tuple(empty.shape)}")

    def load(_caller: torch.nn.Module, _args: Any, *, module: torch.nn.Module, prefix: str) -> None:
        for part, empty in _stored_tensors(module).items():
            name = own_name(f"{prefix}.{part}")
            weight = torch.from_numpy(checkpoint.tensor(name))
            require_shape(name, weight.shape, empty)
            is_parameter = isinstance(empty, torch.nn.Parameter)
            setattr(module, part, torch.nn.Parameter(weight, requires_grad=False) if is_parameter else weight)

    def large(weight: torch.Tensor, *, prefix: str) -> Rows[np.float32]:
        name = own_name(f"{prefix}.weight")
        rows = checkpoint.rows(name)
        require_shape(name, checkpoint.shape(name), weight)
        assert rows is not None
        return rows

    def load_rows(module: Any, args: tuple[Any, ...], *, prefix: str) -> tuple[Any, ...]:
        ids, places = torch.unique(args[0], return_inverse=True)
        weight = _some_rows(large(module.weight, prefix=prefix), ids.numpy())
        module.weight = torch.nn.Parameter(torch.from_numpy(weight), requires_grad=False)
        return (places, *args[1:])

    def product(x: torch.Tensor, *, module: torch.nn.Linear, prefix: str) -> torch.Tensor:
        bias = None if module.bias is None else torch.from_numpy(checkpoint.tensor(f"{prefix}.bias"))
        outputs = x.new_empty((*x.shape[:-1], module.out_features))
        start = 0
        for part in large(module.weight, prefix=prefix).parts(size=_LARGE):
            place = slice(start, start + len(part))
            some = None if bias is None else bias[place]
            outputs[..., place] = torch.nn.functional.linear(x, torch.from_numpy(part), some)
            start = place.stop
        return outputs

    embedding: Any = model.get_input_embeddings()
    for prefix, module in model.named_modules():
        empties = _stored_tensors(module)
        is_large = any(empty.numel() > _LARGE for empty in empties.values())
        if is_large and type(module) is torch.nn.Linear:
            module.forward = partial(product, module=module, prefix=prefix)  # type: ignore[method-assign]
        elif empties:
            caller = module
            # Embeddings of positions need not be called with ids of rows.
            if is_large and (module is embedding or prefix.endswith("embed_tokens_per_layer")):
                module.padding_idx = None  # a row that the text may lack
                module.register_forward_pre_hook(partial(load_rows, prefix=prefix))
            else:
                # A layer with recurrent states reads the weight of its convolution instead of calling it, and
                # Gemma 3n's layers call methods of AltUp.
                if type(module) is torch.nn.Conv1d or hasattr(module, "scale_corrected_output"):
                    caller = model.get_submodule(prefix.rpartition(".")[0])
                caller.register_forward_pre_hook(partial(load, module=module, prefix=prefix))
            caller.register_forward_hook(partial(_unload, module=module, empties=empties))
    return model


def _stored_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters of a module itself, and the buffers that a checkpoint has, by name."""
    return {name: tensor for name, tensor in module.state_dict(keep_vars=True).items() if "." not in name}


def _some_rows(rows: Rows[np.float32], indices: NDArray[np.int64]) -> FloatArray:
    """Return some rows, whose indices ascend."""
    found: list[FloatArray] = []
    start = 0
    for part in rows.parts():
        here = indices[(indices >= start) & (indices < start + len(part))]
        found.append(part[here - start])
        start += len(part)
    return np.concatenate(found)


def _unload(
    _caller: torch.nn.Module,
    _args: Any,
    _output: Any,
    *,
    module: torch.nn.Module,
    empties: Mapping[str, torch.Tensor],
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
