"""The graphs of all families, compared with transformers' models of the same checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from genserve import LLM
from genserve.errors import ExportError
from genserve.export import ExportReport, Precision, SilentProgress, export_model
from genserve.export.decoder import Decoder
from genserve.export.export_options import ExportFormat
from genserve.export.families import FAMILIES, family_of
from genserve.export.graphs.onnx_graph import OnnxGraphBuilder
from genserve.export.parity import forward_rows
from tests.export.graphs import WrittenGraph, conversion_of, write_conversion, write_graph
from tests.export.rows import BlockPool, Row
from tests.export.tiny_models import HYBRID_TYPES, OWN_TYPES, REPRESENTATIVES, TINY_MODELS, tiny_checkpoint
from tests.support.representatives import with_extended
from tests.support.tiny_llama import tiny_llama_checkpoint
from tests.support.transformers_reference import greedy_ids, reference_logits, reference_model

MAX_DIFFERENCE = 1e-4
# Operators of ONNX whose numbers are rounded once, as IEEE 754 says, or copied, or integers. Others, such as
# MatMul, Exp or a norm, have other bits on other processors.
EXACT_OPERATORS = {
    *("Add", "Sub", "Mul", "Div", "Sqrt", "Sum", "Max", "Relu", "Clip"),
    *("Concat", "Gather", "Identity", "Reshape", "Split", "Squeeze", "Unsqueeze"),
    *("Cast", "GreaterOrEqual", "Less", "Range", "ReduceSum", "Size", "Where"),
}
HYBRIDS = [
    name
    for name, config in TINY_MODELS.items()
    if config["model_type"] in HYBRID_TYPES or name.startswith("granite4_h")
]
# They have layers that only genserve's operators compute.
ONNX_ONLY = [*HYBRIDS, *(name for name, config in TINY_MODELS.items() if config["model_type"] in OWN_TYPES)]
EXPERT_MODELS = [
    name
    for name, config in TINY_MODELS.items()
    if config.get("num_experts_per_tok") and name not in ONNX_ONLY
]


@pytest.fixture(scope="module", params=with_extended(TINY_MODELS, always=REPRESENTATIVES))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    return tiny_checkpoint(folder / "checkpoint", **TINY_MODELS[request.param])


FORMATS = [
    pytest.param(ExportFormat.ONNX, id="onnx"),
    pytest.param(ExportFormat.TORCHSCRIPT, id="torchscript", marks=pytest.mark.extended),
]


@pytest.fixture(scope="module", params=FORMATS)
def graph(checkpoint: Path, request: pytest.FixtureRequest) -> WrittenGraph:
    export_format: ExportFormat = request.param
    if export_format is ExportFormat.TORCHSCRIPT and checkpoint.parent.name.startswith(tuple(ONNX_ONLY)):
        pytest.skip("TorchScript does not have its layers")
    return write_graph(checkpoint, checkpoint.parent / export_format.value, export_format=export_format)


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> PreTrainedModel:
    return reference_model(checkpoint)


def test_a_prompt_in_chunks_equals_the_reference_after_every_token(
    graph: WrittenGraph, reference: PreTrainedModel
) -> None:
    ids = random_ids(100, seed=1)
    logits = chunked_logits(graph, ids)
    assert np.abs(logits - reference_logits(reference, ids)).max() < MAX_DIFFERENCE


def test_the_bits_of_a_graph_do_not_depend_on_the_processor(
    graph: WrittenGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of ONNX Runtime, it has exact operators only; ours have equal bits on all instruction sets."""
    if graph.export_format is ExportFormat.TORCHSCRIPT:
        pytest.skip("kernels of torch have other bits on other processors")
    nodes = onnx.load(graph.folder / "model.onnx", load_external_data=False).graph.node
    assert {node.op_type for node in nodes if node.domain != "genserve"} <= EXACT_OPERATORS
    ids = random_ids(50, seed=3)
    found = chunked_logits(graph, ids, lengths=(49, 1))
    monkeypatch.setenv("GENSERVE_KERNELS", "portable")
    assert chunked_logits(graph, ids, lengths=(17, 33)).tobytes() == found.tobytes()


def test_the_numbers_of_exact_operators_are_those_of_numpy(tmp_path: Path) -> None:
    """Some libraries approximate quotients and square roots."""
    x, y = np.random.default_rng(0).uniform(0.1, 10, (2, 300, 1001)).astype(np.float32)
    expected = {"Add": x + y, "Sub": x - y, "Mul": x * y, "Div": x / y, "Sqrt": np.sqrt(x), "Sum": x + y + y}
    with OnnxGraphBuilder(tmp_path) as graph:
        graph.input("x", np.float32, ("rows", 1001))
        graph.input("y", np.float32, ("rows", 1001))
        for op in expected:
            graph.node(op, {"Sqrt": ["x"], "Sum": ["x", "y", "y"]}.get(op, ["x", "y"]), op)
            graph.output(op, np.float32, ("rows", 1001))
        graph.save(metadata={})
    session = ort.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    for op, found in zip(expected, session.run(list(expected), {"x": x, "y": y}), strict=True):
        assert found.tobytes() == expected[op].tobytes(), op


def test_prompts_chunks_and_decodes_in_one_forward_equal_each_sequence_alone(
    graph: WrittenGraph, reference: PreTrainedModel
) -> None:
    """Four rows: a second chunk, a whole prompt, decodes, and a decode with drafted tokens."""
    rows = [Row(random_ids(length, seed=length)) for length in (60, 41, 33, 9)]
    pool = BlockPool(graph.logits(max_num_seqs=4, max_length=64), seed=0)
    found: list[list[NDArray[np.float32]]] = [[] for _ in rows]
    for lengths in ([17, 0, 30, 1], [20, 41, 1, 1], [1, 0, 1, 6], [22, 0, 1, 1]):
        company = [index for index, length in enumerate(lengths) if length]
        parts = pool.forward(
            [rows[index] for index in company], lengths=[lengths[index] for index in company]
        )
        for index, part in zip(company, parts, strict=True):
            found[index].append(part)
    for row, parts in zip(rows, found, strict=True):
        assert row.num_left == 0
        expected = reference_logits(reference, row.ids)
        assert np.abs(np.concatenate(parts) - expected).max() < MAX_DIFFERENCE


def test_only_the_requested_tokens_have_logits_in_their_order(tmp_path: Path) -> None:
    source, ids = tiny_checkpoint(tmp_path / "checkpoint", **TINY_MODELS["llama"]), random_ids(30, seed=2)
    model = write_graph(source, tmp_path / "graph").logits(max_num_seqs=1, max_length=32)
    expected = reference_logits(reference_model(source), ids)
    for asked in ([29], [3, 29]):
        logits = forward_rows(model, ids[None], past=[0], logits_indices=asked)
        assert logits.shape == (len(asked), 320)
        assert np.abs(logits - expected[asked]).max() < MAX_DIFFERENCE


@pytest.mark.parametrize(
    ("model", "wrong"),
    [
        ("bloom_4_heads", {"alibi": False}),
        pytest.param("gemma", {"embedding_scale": None}, marks=pytest.mark.extended),
        ("gemma2", {"softcap": None}),
        pytest.param("gemma2", {"logits_softcap": None}, marks=pytest.mark.extended),
        pytest.param("gemma2", {"scale": 32**-0.5}, marks=pytest.mark.extended),
        ("gpt_neox", {"parallel": False}),
        pytest.param("gpt2", {"activation": "gelu"}, marks=pytest.mark.extended),
    ],
)
def test_a_graph_without_a_part_of_its_family_is_far_from_the_reference(
    tmp_path: Path, model: str, wrong: dict[str, Any]
) -> None:
    source = tiny_checkpoint(tmp_path / "checkpoint", **TINY_MODELS[model])
    conversion = conversion_of(source)
    changed = replace(conversion, decoder=with_options(conversion.decoder, wrong))
    assert difference_of(write_conversion(changed, tmp_path / "graph"), source) > 4 * MAX_DIFFERENCE


@pytest.mark.parametrize("wrong", [{"window": None}, {"rotary": None}])
def test_layers_may_have_different_windows_and_angles(tmp_path: Path, wrong: dict[str, None]) -> None:
    source = tiny_checkpoint(tmp_path / "checkpoint", **TINY_MODELS["gemma3"])
    conversion = conversion_of(source)
    first, *others = conversion.decoder.layers
    first = replace(first, attention=replace(first.attention, **wrong))
    changed = replace(conversion.decoder, layers=(first, *others))
    graph = write_conversion(replace(conversion, decoder=changed), tmp_path / "graph")
    assert difference_of(graph, source) > 4 * MAX_DIFFERENCE


@pytest.mark.parametrize(
    "model",
    with_extended(
        ["gemma3", "glm4_moe", "gpt_neox", "nemotron_h", "opt", "phi3", "qwen3", "smollm3"],
        always={"gpt_neox", "nemotron_h"},
    ),
)
def test_an_export_in_fp32_equals_its_source(tmp_path: Path, model: str) -> None:
    assert export(model, tmp_path, precision="fp32").largest_logit_difference < MAX_DIFFERENCE


@pytest.mark.parametrize(
    "model",
    with_extended(
        ["apertus", "bloom_6_heads", "gemma2", "gpt_neox", "falcon_h1", "olmo2", "phi", "qwen3_moe"],
        always={"bloom_6_heads", "falcon_h1", "qwen3_moe"},
    ),
)
def test_an_export_in_int8_is_close_to_its_source(tmp_path: Path, model: str) -> None:
    report = export(model, tmp_path, precision="int8")
    assert report.largest_logit_difference > MAX_DIFFERENCE  # or it would not be quantized
    assert report.perplexity_ratio < 1.01


@pytest.mark.extended
@pytest.mark.parametrize("precision", ["int8", "int4"])
@pytest.mark.parametrize("model", [*EXPERT_MODELS, *ONNX_ONLY])
def test_experts_and_own_operators_in_few_bits_are_close_to_their_source(
    tmp_path: Path, model: str, precision: Precision
) -> None:
    """`-rP` displays the figures. A norm of outputs that are nearly zero makes some logits differ much."""
    report = export(model, tmp_path, precision=precision)
    print(
        f"{model} in {precision}: top-1 agreement {report.top1_agreement:.3f}, divergence "
        f"{report.divergence:.4f}, perplexity {report.perplexity_ratio:.4f} times that of its source"
    )
    assert report.largest_logit_difference > MAX_DIFFERENCE
    assert report.perplexity_ratio < (1.01 if precision == "int8" else 1.1)
    assert report.divergence < (0.02 if precision == "int8" else 0.5)


@pytest.mark.parametrize(
    "model",
    with_extended(["bloom_6_heads", "gpt2", "qwen3_5", "gemma4"], always={"bloom_6_heads", "qwen3_5"}),
)
def test_batched_answers_are_those_of_transformers(tmp_path: Path, model: str) -> None:
    export(model, tmp_path, precision="fp32")
    prompts = ["the rain in spain", "a", "stays mainly in the plain, and so on"]
    with LLM(model_repository=tmp_path / "repository") as llm, ThreadPoolExecutor(len(prompts)) as pool:
        answers = pool.map(lambda prompt: llm.generate(prompt, max_tokens=16, ignore_eos=True).text, prompts)
        found = list(answers)
    assert found == [greedy_answer(tmp_path / "tiny", prompt, num_tokens=16) for prompt in prompts]


def test_a_checkpoint_saved_without_its_head_has_the_same_graph(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "checkpoint", **TINY_MODELS["gpt2"])
    path = source / "model.safetensors"
    headless = {name.removeprefix("transformer."): value for name, value in load_file(path).items()}
    # Old checkpoints have it, although it is recomputed from the config.
    save_file(headless | {"h.0.attn.bias": np.ones((1, 1, 8, 8), np.uint8)}, path)
    assert difference_of(write_graph(source, tmp_path / "graph"), source) < MAX_DIFFERENCE


@pytest.mark.parametrize(
    ("config", "what"),
    [
        ({"hidden_act": "mish"}, "mish"),
        ({"rope_scaling": {"rope_type": "proportional"}}, "proportional"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3"),
    ],
)
def test_config_options_that_the_graph_does_not_support_are_rejected_by_name(
    tmp_path: Path, config: dict[str, Any], what: str
) -> None:
    source = tiny_llama_checkpoint(tmp_path / "checkpoint", **config)
    with pytest.raises(ExportError, match=what) as caught:
        write_graph(source, tmp_path / "graph")
    assert "known" in caught.value.remedy


@pytest.mark.parametrize(
    ("model", "config", "what"),
    [
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("bloom", {"apply_residual_connection_post_layernorm": True}, "apply_residual"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before"),
        ("opt", {"word_embed_proj_dim": 32}, "word_embed_proj_dim 32"),
    ],
)
def test_each_family_rejects_options_that_its_graph_does_not_support(
    model: str, config: dict[str, Any], what: str
) -> None:
    family = next(family for family in FAMILIES.values() if family.name == model)
    with pytest.raises(ExportError, match=what):
        family.decoder({"model_type": model} | config)


@pytest.mark.parametrize(
    ("model", "config", "what"),
    [
        ("granite4_h", {"hidden_act": "gelu"}, "convolutions with the activation 'gelu'"),
        ("nemotron_h", {"mamba_hidden_act": "gelu"}, "convolutions with the activation 'gelu'"),
        ("qwen3_5", {"hidden_act": "gelu"}, "convolutions with the activation 'gelu'"),
        ("qwen3_5", {"layer_types": ["sliding_attention", "full_attention"]}, "type sliding_attention"),
    ],
)
def test_hybrids_reject_what_their_mixers_do_not_support(
    model: str, config: dict[str, Any], what: str
) -> None:
    changed = {**TINY_MODELS[model], **config}
    family = family_of(changed)
    assert family is not None
    with pytest.raises(ExportError, match=what):
        family.decoder(changed)


def test_experts_in_fp16_are_refused(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "checkpoint", **TINY_MODELS["qwen3_moe"])
    with pytest.raises(ExportError, match="fp16 has no experts") as caught:
        conversion_of(source, precision="fp16")
    assert "--format torchscript" in caught.value.remedy
    conversion_of(source, precision="fp16", export_format=ExportFormat.TORCHSCRIPT)


@pytest.mark.parametrize(
    ("options", "place"),
    [
        ({"precision": "fp16"}, "a graph in fp16"),
        ({"export_format": ExportFormat.TORCHSCRIPT}, "TorchScript"),
    ],
)
@pytest.mark.parametrize(
    ("model", "kind"), [("lfm2", "with recurrent states"), ("gemma4", "that share the cache")]
)
def test_layers_are_refused_where_there_are_none(
    tmp_path: Path, model: str, kind: str, options: dict[str, Any], place: str
) -> None:
    source = tiny_checkpoint(tmp_path / "checkpoint", **TINY_MODELS[model])
    with pytest.raises(ExportError, match=f"{place} has no layers {kind}"):
        conversion_of(source, **options)


@pytest.mark.parametrize("model", with_extended(ONNX_ONLY, always={"granite4_h", "gemma4"}))
def test_its_bits_are_the_same_in_any_batch_and_chunks(tmp_path: Path, model: str) -> None:
    graph = write_graph(tiny_checkpoint(tmp_path / "checkpoint", **TINY_MODELS[model]), tmp_path / "graph")
    texts = [random_ids(length, seed=length) for length in (90, 31, 70)]
    found = {}
    for length in (1, 7, 64):
        pool = BlockPool(graph.logits(max_num_seqs=3, max_length=128, num_threads=2), seed=length)
        found[length] = pool.run([Row(ids) for ids in texts], length=length)
    alone = BlockPool(graph.logits(max_num_seqs=3, max_length=128))
    for index, ids in enumerate(texts):
        [expected] = alone.run([Row(ids)], length=len(ids))
        for length, logits in found.items():
            assert logits[index].tobytes() == expected.tobytes(), length


@pytest.mark.parametrize("model", [pytest.param("gemma3n", marks=pytest.mark.extended), "gemma4"])
def test_layers_without_a_cache_of_their_own_run_only_the_tokens_with_logits(
    tmp_path: Path, model: str
) -> None:
    graph = write_graph(tiny_checkpoint(tmp_path / "checkpoint", **TINY_MODELS[model]), tmp_path / "graph")
    path = graph.folder / graph.export_format.file_name
    nodes = onnx.load(path, load_external_data=False).graph.node
    gathered = [node.output[0] for node in nodes if "logits_indices" in node.input]
    inputs = {output: node.input for node in nodes for output in node.output if output not in gathered}
    found = {"layers.2.attention.heads": set(), "layers.3.attention.qkv": set(), "logits": set()}
    for start, seen in found.items():
        left = [start]
        while left:
            value = left.pop()
            if value not in seen and not value.startswith("present."):
                seen.add(value)
                left += inputs.get(value, [])
    assert {start: "input_ids" in seen for start, seen in found.items()} == {
        "layers.2.attention.heads": True,
        "layers.3.attention.qkv": False,
        "logits": False,
    }

    model_of = partial(graph.logits, max_num_seqs=3, max_length=128)
    texts, lengths = [random_ids(length, seed=length) for length in (90, 31, 70)], (60, 31, 1)
    wanted = [0, 59, 60, 89, 91]
    pool, whole = BlockPool(model_of(num_threads=2), seed=1), BlockPool(model_of())
    logits = pool.logits(rows := [Row(ids) for ids in texts], lengths=lengths, wanted=wanted)
    everything = np.concatenate(whole.forward([Row(ids) for ids in texts], lengths=lengths))
    assert logits.tobytes() == everything[wanted].tobytes()
    # Further tokens read what tokens without logits have written.
    logits = pool.logits([rows[0], rows[2]], lengths=(30, 69), wanted=[29, 98])
    for found_logits, ids in zip(logits, (texts[0], texts[2]), strict=True):
        [expected] = BlockPool(model_of()).run([Row(ids)], length=len(ids))
        assert found_logits.tobytes() == expected[-1].tobytes()


def test_keys_of_layers_that_share_a_cache_are_ignored(tmp_path: Path) -> None:
    """Checkpoints of Gemma 4 have them."""
    source = tiny_checkpoint(tmp_path / "checkpoint", **TINY_MODELS["gemma4"])
    path = source / "model.safetensors"
    unused = {
        f"model.layers.5.self_attn.{name}.weight": np.ones(shape, np.float32)
        for name, shape in (("k_proj", (64, 64)), ("v_proj", (64, 64)), ("k_norm", 32))
    }
    expected = reference_logits(reference_model(source), ids := random_ids(100, seed=1))
    save_file(load_file(path) | unused, path)
    found = chunked_logits(write_graph(source, tmp_path / "graph"), ids)
    assert np.abs(found - expected).max() < MAX_DIFFERENCE


def test_only_layers_with_a_cache_of_their_own_take_memory_for_it(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "checkpoint", **TINY_MODELS["gemma4"])
    graph = write_graph(source, tmp_path / "graph")
    caches = graph.dimensions.caches
    assert [(each.layer, each.num_kv_heads, each.head_dim) for each in caches] == [
        (0, 2, 16), (1, 2, 32), (2, 2, 16)
    ]  # fmt: skip
    model = graph.logits(max_num_seqs=1, max_length=128)
    numbers = sum(each.num_kv_heads * each.head_dim for each in caches)
    assert model.cache.block_bytes == model.block_size * 2 * numbers * 4


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    config = {**TINY_MODELS["glm4_moe"], "num_nextn_predict_layers": 1}
    source = tiny_checkpoint(tmp_path / "checkpoint", **config)
    path = source / "model.safetensors"
    predictor = {"model.layers.2.eh_proj.weight": np.ones((64, 128), np.float32)}
    save_file(load_file(path) | predictor, path)
    assert difference_of(write_graph(source, tmp_path / "graph"), source) < MAX_DIFFERENCE


def test_the_context_ends_where_longrope_changes_its_angles() -> None:
    decoder = FAMILIES["Phi3ForCausalLM"].decoder({**TINY_MODELS["phi3_longrope"], "pad_token_id": 2})
    assert decoder.context_length == 128


def test_the_context_of_a_config_with_yarn_is_the_longer_one() -> None:
    scaled = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    config = {**TINY_MODELS["llama_yarn_rope"], "max_position_embeddings": 256}
    read = FAMILIES["LlamaForCausalLM"].decoder
    assert read({**config, "rope_scaling": scaled}).context_length == 1024
    written = {**config, "max_position_embeddings": 1024}
    assert read({**written, "rope_scaling": scaled}).context_length == 1024


def test_a_window_that_the_model_in_transformers_does_not_read_is_none() -> None:
    llama, mistral = (
        family_of(config).decoder(config)
        for config in (TINY_MODELS[name] | {"sliding_window": 4} for name in ("llama", "mistral"))
    )
    assert {attention.window for attention in llama.attentions} == {None}
    assert {attention.window for attention in mistral.attentions} == {4}


def test_an_architecture_without_a_family_has_none() -> None:
    assert family_of({"architectures": ["FooForCausalLM"]}) is None
    assert family_of({}) is None


@pytest.mark.parametrize("unnamed", [{}, {"architectures": None}, {"architectures": []}])
def test_a_config_without_an_architecture_has_that_of_its_model_type(unnamed: dict[str, Any]) -> None:
    config = {**TINY_MODELS["llama"], **unnamed}
    family = family_of(config)
    assert family is FAMILIES["LlamaForCausalLM"]
    assert family.decoder(config).context_length == 128


@pytest.mark.parametrize(
    "broken",
    [
        {"num_attention_heads": "four"},
        {"num_key_value_heads": 0},
        {"max_position_embeddings": 1},
        {"rope_scaling": {"rope_type": "llama3"}},
        {"model_type": "bloom"},
        {"model_type": "gpt2"},
    ],
)
def test_an_invalid_config_is_an_export_error(tmp_path: Path, broken: dict[str, Any]) -> None:
    source = tiny_llama_checkpoint(tmp_path / "checkpoint")
    path = source / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | broken))
    with pytest.raises(ExportError, match=r"config\.json"):
        write_graph(source, tmp_path / "graph")


def test_the_graph_has_metadata(tiny_checkpoint: Path, tmp_path: Path) -> None:
    folder = write_graph(tiny_checkpoint, tmp_path, precision="fp16").folder
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    assert {entry.key: entry.value for entry in model.metadata_props} == {
        "genserve.family": "llama",
        "genserve.operators": "8",
        "genserve.precision": "fp16",
        "genserve.context_length": "256",
        "genserve.source": "tiny",
    }


def with_options(decoder: Decoder, options: Mapping[str, Any]) -> Decoder:
    """The decoder with other options, in all layers, of itself, of its layers or of their attention."""

    def own(part: object) -> dict[str, Any]:
        return {name: value for name, value in options.items() if hasattr(part, name)}

    layers = []
    for layer in decoder.layers:
        attention = replace(layer.attention, **own(layer.attention))
        layers.append(replace(layer, attention=attention, **own(layer)))
    return replace(decoder, layers=tuple(layers), **own(decoder))


def export(model: str, folder: Path, *, precision: Precision) -> ExportReport:
    source, repository = tiny_checkpoint(folder / "tiny", **TINY_MODELS[model]), folder / "repository"
    return export_model(
        str(source), repository=repository, name="m", precision=precision, progress=SilentProgress()
    )


def chunked_logits(
    graph: WrittenGraph, ids: NDArray[np.int64], *, lengths: tuple[int, ...] = (16, 7, 30, 1, 46)
) -> NDArray[np.float32]:
    pool, row = BlockPool(graph.logits(max_num_seqs=1, max_length=128)), Row(ids)
    return np.concatenate([pool.forward([row], lengths=[length])[0] for length in lengths])


def difference_of(graph: WrittenGraph, source: Path) -> float:
    ids = random_ids(100, seed=1)
    found, expected = chunked_logits(graph, ids), reference_logits(reference_model(source), ids)
    return float(np.abs(found - expected).max())


def greedy_answer(source: Path, prompt: str, *, num_tokens: int) -> str:
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    ids = greedy_ids(reference_model(source), tokenizer.encode(prompt).ids, num_tokens=num_tokens)
    answer: str = tokenizer.decode(ids)
    return answer


def random_ids(length: int, *, seed: int) -> NDArray[np.int64]:
    return np.random.default_rng(seed).integers(3, 320, length)
