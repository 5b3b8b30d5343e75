"""The families with the layers of Llama, which differ in norms, rotary positions, scales and names."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

from genserve.export.decoder import Attention, Decoder, HeadNorm, Layer, NormKind, QueryScale, Rotary
from genserve.export.decoder_weights import TensorMap, TensorSource, half, packed, softplus, stacked
from genserve.export.families.family import Family, read_activation, read_rotary, require, rotary_limit

LLAMA_NAMES: TensorMap = MappingProxyType(
    {
        "embedding": "model.embed_tokens",
        "layers.{}.attention.norm": "model.layers.{}.input_layernorm",
        "layers.{}.attention.query": "model.layers.{}.self_attn.q_proj",
        "layers.{}.attention.key": "model.layers.{}.self_attn.k_proj",
        "layers.{}.attention.value": "model.layers.{}.self_attn.v_proj",
        "layers.{}.attention.output": "model.layers.{}.self_attn.o_proj",
        "layers.{}.mlp.norm": "model.layers.{}.post_attention_layernorm",
        "layers.{}.mlp.gate": "model.layers.{}.mlp.gate_proj",
        "layers.{}.mlp.up": "model.layers.{}.mlp.up_proj",
        "layers.{}.mlp.down": "model.layers.{}.mlp.down_proj",
        "norm": "model.norm",
        "head": "lm_head",
    }
)


def describe_llama(
    config: Any,
    *,
    partial_rotary: bool = False,
    neighbours: bool = False,
    gated: bool = True,
    norm: NormKind = "rms",
    epsilon: str = "rms_norm_eps",
) -> Decoder:
    """Return the decoder of a config with Llama's fields, and optionally `layer_types` and `sliding_window`.

    Args:
        config: a config of transformers.
        partial_rotary: whether transformers honours `partial_rotary_factor` in this family.
        neighbours: the rotary positions pair neighbours.
        gated: the MLP has a gate.
        norm: the kind of all norms but those of heads.
        epsilon: the field with the epsilon of norms.
    """
    activation = getattr(config, "hidden_activation", None) or config.hidden_act
    attentions = _attentions(config, partial_rotary=partial_rotary, neighbours=neighbours)
    return Decoder(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        context_length=rotary_limit(config),
        layers=tuple(
            Layer(attention=attention, activation=read_activation(activation, gated=gated))
            for attention in attentions
        ),
        norm=norm,
        norm_epsilon=getattr(config, epsilon),
        tied=config.tie_word_embeddings,
    )


def with_attention(decoder: Decoder, **options: Any) -> Decoder:
    """Return the decoder with other options of the attention in all layers."""
    layers = (
        layer if layer.attention is None else replace(layer, attention=replace(layer.attention, **options))
        for layer in decoder.layers
    )
    return replace(decoder, layers=tuple(layers))


def without_names(names: TensorMap, *roles: str) -> TensorMap:
    """Return the names without those of some roles."""
    return MappingProxyType({role: source for role, source in names.items() if role not in roles})


def _head_dim(config: Any) -> int:
    head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return head_dim


def _declared(config: Any, name: str) -> Any:
    """Return a field of a config; None: the model in transformers has none, and does not read it.

    A recorded config, and those of transformers before 5.4, do not say which fields they have.
    """
    if is_dataclass(config) and all(field.name != name for field in fields(config)):
        return None
    return getattr(config, name, None)


def _attentions(config: Any, *, partial_rotary: bool, neighbours: bool) -> tuple[Attention, ...]:
    num_layers, window = config.num_hidden_layers, _declared(config, "sliding_window")
    head_dim = _head_dim(config)
    default_type = "full_attention" if window is None else "sliding_attention"
    types = getattr(config, "layer_types", None) or [default_type] * num_layers
    # 1: the layer has rotary positions, although the field's name says the opposite.
    rotary_layers = _declared(config, "no_rope_layers") or [1] * num_layers
    rotaries = {
        kind: replace(
            _rotary(config, layer_type=kind, partial_rotary=partial_rotary), neighbours=neighbours
        )
        for kind in set(types)
    }
    return tuple(
        Attention(
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            rotary=rotaries[kind] if is_rotary else None,
            window=window if kind == "sliding_attention" else None,
        )
        for kind, is_rotary in zip(types, rotary_layers, strict=True)
    )


def _rotary(config: Any, *, layer_type: str, partial_rotary: bool) -> Rotary:
    per_type = layer_type in config.rope_parameters
    parameters = config.rope_parameters[layer_type] if per_type else config.rope_parameters
    share = parameters.get("partial_rotary_factor", 1.0)
    require(partial_rotary or share == 1.0, found=f"partial_rotary_factor {share}", known="1.0")
    num_dims = int(_head_dim(config) * share)
    return read_rotary(config, num_dims=num_dims, layer_type=layer_type if per_type else None)


LLAMA = Family(
    name="llama",
    describe=describe_llama,
    names=LLAMA_NAMES,
    prefix="model.",
)

HEAD_NORM_NAMES: TensorMap = MappingProxyType(
    {
        "layers.{}.attention.query_norm": "model.layers.{}.self_attn.q_norm",
        "layers.{}.attention.key_norm": "model.layers.{}.self_attn.k_norm",
    }
)
_QWEN3_NAMES: TensorMap = MappingProxyType({**LLAMA_NAMES, **HEAD_NORM_NAMES})



def _describe_head_norms(config: Any, **options: Any) -> Decoder:
    return with_attention(describe_llama(config, **options), head_norm=HeadNorm())


QWEN2 = Family(name="qwen2", describe=describe_llama, names=LLAMA_NAMES, prefix="model.")
QWEN3 = Family(name="qwen3", describe=_describe_head_norms, names=_QWEN3_NAMES, prefix="model.")

_PHI3_NAMES: TensorMap = MappingProxyType(
    {
        **LLAMA_NAMES,
        **packed("model.layers.{}.self_attn.qkv_proj", stacked),
        "layers.{}.mlp.gate": TensorSource(("model.layers.{}.mlp.gate_up_proj",), unpack=half(0)),
        "layers.{}.mlp.up": TensorSource(("model.layers.{}.mlp.gate_up_proj",), unpack=half(1)),
    }
)

PHI3 = Family(
    name="phi3", describe=partial(describe_llama, partial_rotary=True), names=_PHI3_NAMES, prefix="model."
)


# Granite: scales of embeddings, scores, residuals and logits.
def describe_granite(config: Any) -> Decoder:
    """Return the decoder of a config with the fields of Llama and four scales."""
    return replace(
        with_attention(describe_llama(config), scale=config.attention_multiplier),
        embedding_scale=config.embedding_multiplier,
        residual_scale=config.residual_multiplier,
        logits_scale=1 / config.logits_scaling,
    )


GRANITE = Family(name="granite", describe=describe_granite, names=LLAMA_NAMES, prefix="model.")


# OLMo: norms without weights, then norms after attention and MLP only, and of all heads together.
_OLMO_NAMES: TensorMap = MappingProxyType(
    {
        **LLAMA_NAMES,
        "layers.{}.attention.norm": TensorSource(("model.layers.{}.input_layernorm",), kind="ones"),
        "layers.{}.mlp.norm": TensorSource(("model.layers.{}.post_attention_layernorm",), kind="ones"),
        "norm": TensorSource(("model.norm",), kind="ones"),
    }
)
_POST_NORM_NAMES: TensorMap = MappingProxyType(
    {
        **without_names(LLAMA_NAMES, "layers.{}.attention.norm", "layers.{}.mlp.norm"),
        **HEAD_NORM_NAMES,
        "layers.{}.attention.post_norm": "model.layers.{}.post_attention_layernorm",
        "layers.{}.mlp.post_norm": "model.layers.{}.post_feedforward_layernorm",
    }
)


def _describe_olmo(config: Any) -> Decoder:
    config.layer_norm_eps = 1e-5    # transformers' code has it; the config has no field for it
    decoder = describe_llama(config, norm="layer", epsilon="layer_norm_eps")
    return with_attention(decoder, clip=config.clip_qkv)


def _describe_olmo2(config: Any) -> Decoder:
    return with_attention(describe_llama(config), head_norm=HeadNorm(joint=True))


OLMO = Family(name="olmo", describe=_describe_olmo, names=_OLMO_NAMES, prefix="model.")
OLMO2 = Family(name="olmo2", describe=_describe_olmo2, names=_POST_NORM_NAMES, prefix="model.")


# EXAONE 4: the norms of OLMo 2, and rotary positions only in layers with a window.
def _describe_exaone4(config: Any) -> Decoder:
    decoder = _describe_head_norms(config)
    return decoder if config.sliding_window is None else _rotary_in_windows(decoder)


def _rotary_in_windows(decoder: Decoder) -> Decoder:
    layers = (
        layer
        if layer.attention is None or layer.attention.window
        else replace(layer, attention=replace(layer.attention, rotary=None))
        for layer in decoder.layers
    )
    return replace(decoder, layers=tuple(layers))


EXAONE4 = Family(name="exaone4", describe=_describe_exaone4, names=_POST_NORM_NAMES, prefix="model.")


# GLM: rotary positions of half a head, in pairs of neighbours; GLM-4-0414 has norms after each part, too.
_GLM_NAMES: TensorMap = MappingProxyType(
    {
        **LLAMA_NAMES,
        "layers.{}.mlp.gate": _PHI3_NAMES["layers.{}.mlp.gate"],
        "layers.{}.mlp.up": _PHI3_NAMES["layers.{}.mlp.up"],
    }
)
_GLM4_NAMES: TensorMap = MappingProxyType(
    {
        **_GLM_NAMES,
        "layers.{}.attention.post_norm": "model.layers.{}.post_self_attn_layernorm",
        "layers.{}.mlp.post_norm": "model.layers.{}.post_mlp_layernorm",
    }
)
_describe_glm = partial(describe_llama, partial_rotary=True, neighbours=True)

GLM = Family(name="glm", describe=_describe_glm, names=_GLM_NAMES, prefix="model.")
GLM4 = Family(name="glm4", describe=_describe_glm, names=_GLM4_NAMES, prefix="model.")


# Cohere: attention and MLP in parallel after one norm.
_COHERE_NAMES: TensorMap = MappingProxyType(
    {**LLAMA_NAMES, **HEAD_NORM_NAMES, "layers.{}.mlp.norm": "model.layers.{}.input_layernorm"}
)


def _describe_cohere(config: Any) -> Decoder:
    decoder = describe_llama(config, neighbours=True, norm="layer", epsilon="layer_norm_eps")
    if getattr(config, "use_qk_norm", False):
        decoder = with_attention(decoder, head_norm=HeadNorm(kind="layer"))
    return replace(_in_parallel(decoder), logits_scale=config.logit_scale)


def _describe_cohere2(config: Any) -> Decoder:
    return _rotary_in_windows(_describe_cohere(config))


def _in_parallel(decoder: Decoder) -> Decoder:
    return replace(decoder, layers=tuple(replace(layer, parallel=True) for layer in decoder.layers))


COHERE = Family(name="cohere", describe=_describe_cohere, names=_COHERE_NAMES, prefix="model.")
COHERE2 = Family(name="cohere2", describe=_describe_cohere2, names=_COHERE_NAMES, prefix="model.")


# StableLM: norms with biases, optionally in parallel, and norms of each head with weights of its own.
_STABLELM_NAMES: TensorMap = MappingProxyType(
    {
        **LLAMA_NAMES,
        "layers.{}.mlp.norm": TensorSource(
            ("model.layers.{}.post_attention_layernorm", "model.layers.{}.input_layernorm")
        ),
        **{
            f"layers.{{}}.attention.{role}_norm": TensorSource(
                (f"model.layers.{{}}.self_attn.{name}_layernorm.norms.{{n}}",)
            )
            for role, name in (("query", "q"), ("key", "k"))
        },
    }
)


def _describe_stablelm(config: Any) -> Decoder:
    decoder = describe_llama(config, partial_rotary=True, norm="layer", epsilon="layer_norm_eps")
    if config.qk_layernorm:
        decoder = with_attention(decoder, head_norm=HeadNorm(kind="layer"))
    return _in_parallel(decoder) if config.use_parallel_residual else decoder


STABLELM = Family(name="stablelm", describe=_describe_stablelm, names=_STABLELM_NAMES, prefix="model.")


# Phi 1, 1.5 and 2: one norm with a bias, attention and MLP in parallel, biases everywhere.
_PHI_NAMES: TensorMap = MappingProxyType(
    {
        **without_names(_COHERE_NAMES, "layers.{}.mlp.gate"),
        "layers.{}.attention.output": "model.layers.{}.self_attn.dense",
        "layers.{}.attention.query_norm": "model.layers.{}.self_attn.q_layernorm",
        "layers.{}.attention.key_norm": "model.layers.{}.self_attn.k_layernorm",
        "layers.{}.mlp.up": "model.layers.{}.mlp.fc1",
        "layers.{}.mlp.down": "model.layers.{}.mlp.fc2",
        "norm": "model.final_layernorm",
    }
)


def _describe_phi(config: Any) -> Decoder:
    decoder = describe_llama(config, partial_rotary=True, gated=False, norm="layer", epsilon="layer_norm_eps")
    if config.qk_layernorm:
        decoder = with_attention(decoder, head_norm=HeadNorm(kind="layer"))
    return _in_parallel(decoder)


PHI = Family(name="phi", describe=_describe_phi, names=_PHI_NAMES, prefix="model.")


# StarCoder2, Nemotron, Arcee and Apertus: no gate.
_STARCODER2_NAMES: TensorMap = MappingProxyType(
    {
        **without_names(LLAMA_NAMES, "layers.{}.mlp.gate"),
        "layers.{}.mlp.up": "model.layers.{}.mlp.c_fc",
        "layers.{}.mlp.down": "model.layers.{}.mlp.c_proj",
    }
)
_ARCEE_NAMES: TensorMap = without_names(LLAMA_NAMES, "layers.{}.mlp.gate")
_NEMOTRON_NAMES: TensorMap = MappingProxyType(
    {
        **_ARCEE_NAMES,
        "layers.{}.attention.norm": TensorSource(("model.layers.{}.input_layernorm",), kind="difference"),
        "layers.{}.mlp.norm": TensorSource(("model.layers.{}.post_attention_layernorm",), kind="difference"),
        "norm": TensorSource(("model.norm",), kind="difference"),
    }
)
_APERTUS_NAMES: TensorMap = MappingProxyType(
    {
        **_ARCEE_NAMES,
        **HEAD_NORM_NAMES,
        "layers.{}.attention.norm": "model.layers.{}.attention_layernorm",
        "layers.{}.mlp.norm": "model.layers.{}.feedforward_layernorm",
        "layers.{}.mlp.alpha_p": TensorSource(
            ("model.layers.{}.mlp.act_fn.alpha_p",), unpack=softplus, kind="tensor"
        ),
        "layers.{}.mlp.alpha_n": TensorSource(
            ("model.layers.{}.mlp.act_fn.alpha_n",), unpack=softplus, kind="tensor"
        ),
        "layers.{}.mlp.beta": TensorSource(("model.layers.{}.mlp.act_fn.beta",), kind="tensor"),
    }
)


def _describe_starcoder2(config: Any) -> Decoder:
    return describe_llama(config, gated=False, norm="layer", epsilon="norm_epsilon")


def _describe_nemotron(config: Any) -> Decoder:
    return describe_llama(config, partial_rotary=True, gated=False, norm="layer", epsilon="norm_eps")


def _describe_apertus(config: Any) -> Decoder:
    require(config.hidden_act == "xielu", found=f"hidden_act {config.hidden_act!r}", known="xielu")
    return _describe_head_norms(config, gated=False)


STARCODER2 = Family(
    name="starcoder2", describe=_describe_starcoder2, names=_STARCODER2_NAMES, prefix="model."
)
NEMOTRON = Family(name="nemotron", describe=_describe_nemotron, names=_NEMOTRON_NAMES, prefix="model.")
ARCEE = Family(
    name="arcee", describe=partial(describe_llama, gated=False), names=_ARCEE_NAMES, prefix="model."
)
APERTUS = Family(
    name="apertus",
    describe=_describe_apertus,
    names=_APERTUS_NAMES,
    prefix="model.",
    ignored=(".mlp.act_fn.eps",),
)

# Helium and ERNIE 4.5: Llama with rotary positions in pairs of neighbours.
HELIUM = Family(
    name="helium", describe=partial(describe_llama, neighbours=True), names=LLAMA_NAMES, prefix="model."
)


# Ministral 3: queries grow with the position.
def _describe_ministral3(config: Any) -> Decoder:
    parameters = config.rope_parameters
    length = parameters["original_max_position_embeddings"]
    scale = QueryScale(beta=parameters["llama_4_scaling_beta"], length=length)
    return with_attention(describe_llama(config), query_scale=scale)


MINISTRAL3 = Family(name="ministral3", describe=_describe_ministral3, names=LLAMA_NAMES, prefix="model.")


# Hunyuan: norms of heads after their rotary positions, whose base may be stretched.
_HUNYUAN_NAMES: TensorMap = MappingProxyType(
    {
        **LLAMA_NAMES,
        "layers.{}.attention.query_norm": "model.layers.{}.self_attn.query_layernorm",
        "layers.{}.attention.key_norm": "model.layers.{}.self_attn.key_layernorm",
    }
)


def _describe_hunyuan(config: Any) -> Decoder:
    parameters, head_dim = config.rope_parameters, _head_dim(config)
    if parameters["rope_type"] == "dynamic" and parameters.get("alpha"):
        stretched = parameters["rope_theta"] * parameters["alpha"] ** (head_dim / (head_dim - 2))
        config.rope_parameters = {**parameters, "rope_type": "default", "rope_theta": stretched}
    return with_attention(describe_llama(config), head_norm=HeadNorm(after_rotary=True))


HUNYUAN = Family(name="hunyuan", describe=_describe_hunyuan, names=_HUNYUAN_NAMES, prefix="model.")
