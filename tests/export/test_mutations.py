"""Each part of the tiny models matters: with a wrong option or tensor, the logits differ from transformers'.

So a graph whose logits equal transformers' (test_families.py) has all parts of its family. The changed
models are run by `DecoderModule`, because it needs no file, or as a graph where it lacks their layers.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from genserve.export.checkpoints.checkpoint import Checkpoint
from genserve.export.checkpoints.rows import Rows
from genserve.export.decoder import (
    Attention,
    Decoder,
    Experts,
    HeadNorm,
    Layer,
    LinearAttention,
    Rotary,
    ShortConv,
)
from genserve.export.decoder_weights import DecoderWeights
from genserve.export.graphs.decoder_graph import write_decoder
from genserve.export.graphs.decoder_module import DecoderModule
from genserve.export.graphs.layers import FusedLayers
from genserve.export.graphs.onnx_graph import OnnxGraphBuilder
from genserve.export.quantization import SCHEMES
from genserve.sampling.logits_array import FloatArray
from genserve.textmodel.runtimes.onnx_logits import OnnxLogits
from tests.export.graphs import conversion_of
from tests.export.rows import logits_of
from tests.export.tiny_models import REPRESENTATIVES, TINY_MODELS, tiny_checkpoint
from tests.support.transformers_reference import reference_logits, reference_model

T = TypeVar("T")
NOTICED = 4e-4  # four times the difference that test_families.py allows


def test_each_kind_of_fault_is_noticed_in_one_model(tmp_path: Path) -> None:
    """In the first of the models that can have it, and there in the first layer."""
    seen: set[str] = set()

    def unseen(faults: Iterable[tuple[str, T]]) -> Iterator[tuple[str, T]]:
        for what, wrong in faults:
            kind = re.sub(r"layers\.\d+\.", "", what)
            if kind not in seen:
                seen.add(kind)
                yield what, wrong

    unnoticed = {}
    for model in TINY_MODELS:
        if model in REPRESENTATIVES and (found := unnoticed_faults(tmp_path / model, model, chosen=unseen)):
            unnoticed[model] = found
    assert unnoticed == {}


@pytest.mark.extended
@pytest.mark.parametrize("model", TINY_MODELS)
def test_a_wrong_part_is_noticed(tmp_path: Path, model: str) -> None:
    assert unnoticed_faults(tmp_path, model, chosen=iter) == []


def unnoticed_faults(folder: Path, model: str, *, chosen: Callable[..., Iterator[Any]]) -> list[str]:
    """Those of the chosen faults of a model that do not change its logits."""
    source = tiny_checkpoint(folder / "checkpoint", **TINY_MODELS[model])
    conversion = conversion_of(source)
    checkpoint, decoder = in_memory(conversion.layout.checkpoint), conversion.decoder
    ids = np.random.default_rng(1).integers(3, 320, 60)
    expected = reference_logits(reference_model(source), ids)

    def difference(decoder: Decoder, weights: DecoderWeights) -> float:
        return float(np.abs(logits(decoder, weights, ids) - expected).max())

    right = conversion.family.weights(checkpoint, decoder)
    assert difference(decoder, right) < NOTICED / 4
    is_normed = "embedding.norm.weight" in right.roles
    unnoticed = [
        what
        for what, wrong in chosen(wrong_decoders(decoder, is_embedding_normed=is_normed))
        if difference(wrong, conversion.family.weights(checkpoint, wrong)) < NOTICED
    ]
    unnoticed += [
        what for what, wrong in chosen(wrong_weights(right, decoder)) if difference(decoder, wrong) < NOTICED
    ]
    return unnoticed


def in_memory(checkpoint: Checkpoint) -> Checkpoint:
    """A checkpoint whose file is read once, for all its wrong models."""
    tensors = {name: checkpoint.load(name, slice(None)) for name in checkpoint.tensor_names}

    def load(name: str, rows: slice) -> FloatArray:
        return tensors[name][rows] if tensors[name].ndim else tensors[name]  # some have no dimensions

    return replace(checkpoint, load=load, shape=lambda name: tensors[name].shape)


def wrong_decoders(decoder: Decoder, *, is_embedding_normed: bool) -> Iterator[tuple[str, Decoder]]:
    """The decoder with each of its options in turn set to another value."""
    yield "norm", replace(decoder, norm="layer" if decoder.norm == "rms" else "rms")
    yield "norm_epsilon", replace(decoder, norm_epsilon=0.1)
    if not is_embedding_normed:
        yield "embedding_scale", replace(decoder, embedding_scale=1.1 * (decoder.embedding_scale or 1))
    yield "residual_scale", replace(decoder, residual_scale=1.1 * decoder.residual_scale)
    yield "logits_scale", replace(decoder, logits_scale=1.1 * decoder.logits_scale)
    yield "logits_softcap", replace(decoder, logits_softcap=1.1 * (decoder.logits_softcap or 1))
    if not decoder.tied:
        yield "tied", replace(decoder, tied=True)
    for part in dict.fromkeys(role.rpartition(".")[0] for role in decoder.scales):
        own = {role: 1.1 * scale for role, scale in decoder.scales.items() if role.startswith(f"{part}.")}
        yield f"scale of {part}", replace(decoder, scales={**decoder.scales, **own})
    if (per_layer := decoder.per_layer) is not None:
        yield "per_layer.epsilon", replace(decoder, per_layer=replace(per_layer, norm_epsilon=0.1))
        scaled = replace(per_layer, embedding_scale=1.1 * per_layer.embedding_scale)
        yield "per_layer.scale", replace(decoder, per_layer=scaled)
    if decoder.altup is not None:
        yield "altup.least", replace(decoder, altup=replace(decoder.altup, least=10.0))
    for index in distinct_layers(decoder):
        layer = decoder.layers[index]
        for what, wrong in (*wrong_layers(layer), *wrong_caches(decoder, index)):
            layers = (*decoder.layers[:index], wrong, *decoder.layers[index + 1 :])
            yield f"layers.{index}.{what}", replace(decoder, layers=layers)
    # With numbers for each layer, the weights would not fit.
    if decoder.per_layer is None and any(layer.attention is not None for layer in decoder.layers[:-1]):
        yield "layers", replace(decoder, layers=decoder.layers[:-1])


def distinct_layers(decoder: Decoder) -> list[int]:
    """The first of the layers of each kind."""
    return sorted({decoder.layers.index(layer) for layer in decoder.layers})


def wrong_layers(layer: Layer) -> Iterator[tuple[str, Layer]]:
    if layer.activation is not None:
        yield "activation", replace(layer, activation="relu" if layer.activation != "relu" else "silu")
        if layer.attention is not None or layer.mixer is not None:
            yield "parallel", replace(layer, parallel=not layer.parallel)
    if layer.gate_cutoff is not None:
        yield "no gate cutoff", replace(layer, gate_cutoff=None)
        yield "gate cutoff", replace(layer, gate_cutoff=1.1 * layer.gate_cutoff)
    if isinstance(layer.mixer, LinearAttention):
        for what, mixer in wrong_mixers(layer.mixer):
            yield what, replace(layer, mixer=mixer)
    elif isinstance(layer.mixer, ShortConv):
        yield "no mixer", replace(layer, mixer=None)
    if layer.experts is not None:
        for what, experts in wrong_experts(layer.experts):
            yield what, replace(layer, experts=experts)
    for what, options in wrong_attentions(layer.attention) if layer.attention else ():
        yield what, replace(layer, attention=replace(layer.attention, **options))


def wrong_caches(decoder: Decoder, index: int) -> Iterator[tuple[str, Layer]]:
    """The layer with the cache of another one than it has, of the same sizes."""
    layer = decoder.layers[index]
    if layer.attention is None or layer.attention.cache_of is None:
        return
    sizes = layer.attention.num_kv_heads, layer.attention.head_dim
    for cache in decoder.dimensions.caches:
        if cache.layer != layer.attention.cache_of and (cache.num_kv_heads, cache.head_dim) == sizes:
            other = replace(layer.attention, cache_of=cache.layer)
            yield f"cache of {cache.layer}", replace(layer, attention=other)


def wrong_mixers(mixer: LinearAttention) -> Iterator[tuple[str, LinearAttention]]:
    yield "steps", replace(mixer, step_limits=(0.45, 0.55))
    if mixer.rule == "gated_delta":
        yield "beta", replace(mixer, beta_scale=1.1 * mixer.beta_scale)
    if mixer.norm:
        yield "epsilon", replace(mixer, norm_epsilon=0.1)
        yield (
            "place of the norm",
            replace(mixer, norm="gate_then_norm" if mixer.norm == "norm_then_gate" else "norm_then_gate"),
        )
        yield "size of the norm", replace(mixer, norm_size=mixer.norm_size // 2)
        yield "no norm", replace(mixer, norm="")


def wrong_experts(experts: Experts) -> Iterator[tuple[str, Experts]]:
    router = experts.router
    if experts.shared:
        yield "no shared expert", replace(experts, shared=False)
    wrong = {
        "score": replace(router, score="sigmoid" if router.score == "softmax" else "softmax"),
        "place of weights": replace(router, scales_inputs=not router.scales_inputs),
    }
    if not experts.beside_mlp:  # their sum is normed
        wrong["scale of weights"] = replace(router, scale=1.1 * router.scale)
    if router.score == "sparsemixer":  # it chooses two, and its weights are what they are
        wrong["jitter"] = replace(router, jitter=0.0)
    else:
        yield "top_k", replace(experts, top_k=experts.top_k - 1 or 2)
        # The weights of the one have the sum 1 already, and outputs beside an MLP are normed.
        if router.score != "softmax_of_top" and not experts.beside_mlp:
            wrong["normalise"] = replace(router, normalise=0.0 if router.normalise is None else None)
    if router.groups is not None:
        groups = router.groups
        wrong["no groups"] = replace(router, groups=None)
        wrong["kept groups"] = replace(router, groups=replace(groups, kept=groups.kept + 1))
        wrong["scores of a group"] = replace(router, groups=replace(groups, top=3 - groups.top))
    for what, changed in wrong.items():
        yield what, replace(experts, router=changed)


def wrong_attentions(attention: Attention) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "scale", {"scale": 1.2 * attention.scale}
    yield "window", {"window": 8 if attention.window is None else None}
    if not attention.alibi:  # no family has both
        yield "softcap", {"softcap": 1.2 * (attention.softcap or 1)}
    if attention.value_norm and attention.cache_of is None:
        yield "no norm of values", {"value_norm": False}
    if attention.chunk is not None:
        yield "no chunk", {"chunk": None}
        yield "chunk", {"chunk": attention.chunk + 1}
    yield "clip", {"clip": 0.1}
    if attention.clip is not None:
        yield "no clip", {"clip": None}
    if attention.rotary is None:
        yield "rotary", {"rotary": Rotary(frequencies=(1.0, 0.1))}
    else:
        rotary = attention.rotary
        yield "no rotary", {"rotary": None}
        yield "frequencies", {"rotary": replace(rotary, frequencies=rotary.frequencies[::-1])}
        if attention.head_norm is None or not attention.head_norm.after_rotary:
            yield "rotary scale", {"rotary": replace(rotary, scale=1.2 * rotary.scale)}
        yield "neighbours", {"rotary": replace(rotary, neighbours=not rotary.neighbours)}
        if rotary.distance is not None:
            yield "distance", {"rotary": replace(rotary, distance=None)}
    if attention.head_norm is not None:
        norm = attention.head_norm
        yield "no head norm", {"head_norm": None}
        yield (
            "kind of head norm",
            {
                "head_norm": HeadNorm(
                    kind="rms" if norm.kind == "layer" else "layer",
                    joint=norm.joint,
                    after_rotary=norm.after_rotary,
                )
            },
        )
        # Rotary positions do not change the norm of Llama 4, which has no weight.
        if attention.rotary is not None and attention.chunk is None:
            yield "place of head norm", {"head_norm": replace(norm, after_rotary=not norm.after_rotary)}
    if attention.latent is not None:
        yield "norms of latents", {"latent": replace(attention.latent, norm_epsilon=0.1)}
    if attention.query_scale is not None:
        yield "no query scale", {"query_scale": None}
        first = attention.query_scale.first + 1
        yield "first of query scale", {"query_scale": replace(attention.query_scale, first=first)}


def wrong_weights(weights: DecoderWeights, decoder: Decoder) -> Iterator[tuple[str, DecoderWeights]]:
    """The weights with each tensor in turn left out: biases 0, norms 1, and others with rows exchanged."""
    layers = distinct_layers(decoder)
    for role in sorted(weights.roles):
        if role == "head.weight" and decoder.tied:
            continue
        if role.startswith("layers."):
            layer = int(role.split(".")[1])
            # Without rotary positions, a bias of keys adds the same to all scores of a query.
            attention = decoder.layers[layer].attention
            has_rotary = attention is not None and attention.rotary is not None
            if layer not in layers or (role.endswith("attention.key.bias") and not has_rotary):
                continue
            if role == f"layers.{len(decoder.layers) - 1}.scale":
                continue  # a norm follows
        yield (
            role,
            replace(
                weights,
                rows=lambda name, wrong=role: Rows.of(_changed(weights, name, wrong=wrong)),
                vector=lambda name, wrong=role: _changed(weights, name, wrong=wrong),
            ),
        )


def _changed(weights: DecoderWeights, role: str, *, wrong: str) -> FloatArray:
    tensor = weights.load(role)
    if role != wrong:
        return tensor
    if role.endswith(".bias"):
        return np.zeros_like(tensor)
    if "norm" in role:
        # A norm without weights has ones already.
        return np.ones_like(tensor) if (tensor != 1).any() else 2 * tensor
    if len(tensor.shape) == 2 and len(tensor) == 1:
        return tensor[:, ::-1].copy()
    return tensor[::-1].copy() if tensor.size > 1 else np.asarray(tensor + np.float32(1))


def logits(decoder: Decoder, weights: DecoderWeights, ids: NDArray[np.int64]) -> FloatArray:
    """The logits [tokens, vocab] of one text in one forward."""
    is_partial = len(decoder.attentions) < len(decoder.layers)
    if is_partial or decoder.kind_of_own_operators is not None:
        return graph_logits(decoder, weights, ids)
    caches, length = decoder.dimensions.caches, len(ids)
    module = DecoderModule(weights, decoder, dtype=torch.float32).eval()
    cache = [torch.zeros((1, length, each.num_kv_heads, each.head_dim)) for each in caches for _ in range(2)]
    with torch.inference_mode():
        found = module(
            torch.from_numpy(ids),
            torch.arange(length),
            torch.tensor([0, length], dtype=torch.int32),
            torch.tensor([0], dtype=torch.int32),
            torch.tensor([[0]], dtype=torch.int32),
            torch.arange(length),
            cache,
        )
    return found.numpy()


def graph_logits(decoder: Decoder, weights: DecoderWeights, ids: NDArray[np.int64]) -> FloatArray:
    """The same by a graph."""
    with tempfile.TemporaryDirectory() as folder:
        part = range(len(decoder.layers))
        with OnnxGraphBuilder(Path(folder)) as graph:
            layers = FusedLayers(graph, SCHEMES["fp32"])
            write_decoder(weights, decoder, layers, kv_cache=np.float32, part=part)
            graph.save(metadata={"genserve.context_length": str(decoder.context_length)})
        model = OnnxLogits(Path(folder) / "model.onnx", max_num_seqs=1, max_length=len(ids), num_threads=1)
        return logits_of(model, ids)
