"""The graphs of all families against transformers' own models of the same checkpoints."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from genserve import LLM
from genserve.errors import ExportError
from genserve.export import ExportReport, Precision, SilentProgress, export_model
from genserve.export.architectures import FAMILIES, family_of
from genserve.export.form import Form
from tests.checkpoints import tiny_llama_checkpoint
from tests.export.graphs import WrittenGraph, conversion_of, write_conversion, write_graph
from tests.export.tiny_models import TINY_MODELS, tiny_checkpoint
from tests.reference import greedy_ids, reference_logits, reference_model

MAX_DIFFERENCE = 1e-4


@pytest.fixture(scope="module", params=TINY_MODELS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    return tiny_checkpoint(folder / "checkpoint", **TINY_MODELS[request.param])


@pytest.fixture(scope="module", params=[Form.ONNX, Form.TORCHSCRIPT], ids=lambda form: form.value)
def graph(checkpoint: Path, request: pytest.FixtureRequest) -> WrittenGraph:
    form: Form = request.param
    return write_graph(checkpoint, checkpoint.parent / form.value, form=form)


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> PreTrainedModel:
    return reference_model(checkpoint)


def test_a_prefill_in_chunks_equals_the_reference_after_every_token(
    graph: WrittenGraph, reference: PreTrainedModel
) -> None:
    ids = random_ids(100, seed=1)
    logits = chunked_logits(graph, ids)
    assert np.abs(logits - reference_logits(reference, ids)).max() < MAX_DIFFERENCE


def test_rows_that_start_move_and_end_beside_each_other_equal_each_row_alone(
    graph: WrittenGraph, reference: PreTrainedModel
) -> None:
    slots = Slots(graph, reference)
    slots.prefill([random_ids(length, seed=length) for length in (60, 41, 9)], lengths=[40, 23, 1])
    slots.decode(steps=4)
    slots.end(slot=0)
    slots.decode(steps=2)
    slots.prefill_in_chunks(random_ids(50, seed=2), lengths=[16, 7, 20])
    slots.decode(steps=2)
    assert slots.largest_difference < MAX_DIFFERENCE


def test_only_the_rows_that_are_asked_for_get_logits_in_their_order(tmp_path: Path) -> None:
    source, ids = tiny_checkpoint(tmp_path / "checkpoint", **TINY_MODELS["llama"]), random_ids(30, seed=2)
    graph = write_graph(source, tmp_path / "graph")
    logits = graph.cached(batch=1, max_len=30).forward(ids[None], past=[0], rows=[29, 3])
    assert logits.shape == (2, 320)
    assert np.abs(logits - reference_logits(reference_model(source), ids)[[29, 3]]).max() < MAX_DIFFERENCE


@pytest.mark.parametrize(
    ("model", "wrong"),
    [
        ("bloom_4_heads", {"alibi": False}),
        ("gemma", {"embedding_scale": None}),
        ("gemma2", {"attention_softcap": None}),
        ("gemma2", {"logits_softcap": None}),
        ("gemma2", {"attention_scale": 32**-0.5}),
        ("gpt_neox", {"parallel": False}),
        ("gpt2", {"activation": "gelu"}),
    ],
)
def test_a_graph_without_what_its_family_has_is_far_from_the_reference(
    tmp_path: Path, model: str, wrong: dict[str, Any]
) -> None:
    source = tiny_checkpoint(tmp_path / "checkpoint", **TINY_MODELS[model])
    conversion = conversion_of(source)
    changed = replace(conversion, decoder=replace(conversion.decoder, **wrong))
    assert difference_of(write_conversion(changed, tmp_path / "graph"), source) > 4 * MAX_DIFFERENCE


@pytest.mark.parametrize("wrong", [{"window": None}, {"rotary": None}])
def test_layers_may_differ_in_their_windows_and_angles(tmp_path: Path, wrong: dict[str, None]) -> None:
    source = tiny_checkpoint(tmp_path / "checkpoint", **TINY_MODELS["gemma3"])
    conversion = conversion_of(source)
    first, *others = conversion.decoder.attentions
    changed = replace(conversion.decoder, attentions=(replace(first, **wrong), *others))
    graph = write_conversion(replace(conversion, decoder=changed), tmp_path / "graph")
    assert difference_of(graph, source) > 4 * MAX_DIFFERENCE


@pytest.mark.parametrize("model", ["gemma3", "gpt_neox", "opt", "phi3", "qwen3", "smollm3"])
def test_an_export_in_fp32_is_its_source(tmp_path: Path, model: str) -> None:
    assert export(model, tmp_path, precision="fp32").largest_logit_difference < MAX_DIFFERENCE


@pytest.mark.parametrize("model", ["bloom_6_heads", "gemma2", "gpt_neox"])
def test_an_export_in_int8_is_close_to_its_source(tmp_path: Path, model: str) -> None:
    report = export(model, tmp_path, precision="int8")
    assert report.largest_logit_difference > MAX_DIFFERENCE  # or it is not in 8 bits
    assert report.perplexity_ratio < 1.01


@pytest.mark.parametrize("model", ["bloom_6_heads", "gpt2"])
def test_answers_that_grow_beside_each_other_are_those_of_transformers(tmp_path: Path, model: str) -> None:
    export(model, tmp_path, precision="fp32")
    prompts = ["the rain in spain", "a", "stays mainly in the plain, and so on"]
    with LLM(tmp_path / "repository") as llm, ThreadPoolExecutor(len(prompts)) as pool:
        answers = pool.map(lambda prompt: llm.generate(prompt, max_tokens=16, ignore_eos=True).text, prompts)
        found = list(answers)
    assert found == [greedy_answer(tmp_path / "tiny", prompt, num_tokens=16) for prompt in prompts]


def test_a_checkpoint_that_was_saved_without_its_head_has_the_same_graph(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "checkpoint", **TINY_MODELS["gpt2"])
    path = source / "model.safetensors"
    headless = {name.removeprefix("transformer."): value for name, value in load_file(path).items()}
    # Recomputed from the config, and yet in old checkpoints.
    save_file(headless | {"h.0.attn.bias": np.ones((1, 1, 8, 8), np.uint8)}, path)
    assert difference_of(write_graph(source, tmp_path / "graph"), source) < MAX_DIFFERENCE


@pytest.mark.parametrize(
    ("config", "what"),
    [
        ({"hidden_act": "mish"}, "mish"),
        ({"rope_scaling": {"rope_type": "proportional"}}, "proportional"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised"),
        ({"architectures": ["FooForCausalLM"]}, "FooForCausalLM"),
        ({"head_dim": 24}, "head_dim 24"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3"),
    ],
)
def test_what_the_graph_would_not_honour_is_refused_by_name(
    tmp_path: Path, config: dict[str, Any], what: str
) -> None:
    source = tiny_llama_checkpoint(tmp_path / "checkpoint", **config)
    with pytest.raises(ExportError, match=what) as caught:
        write_graph(source, tmp_path / "graph")
    assert "known" in caught.value.remedy


@pytest.mark.parametrize(
    ("model", "config", "what"),
    [
        ("gpt2", {"n_embd": 80, "n_head": 4}, "head_dim 20"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("bloom", {"apply_residual_connection_post_layernorm": True}, "apply_residual"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gpt_neox", {"hidden_size": 128, "num_attention_heads": 4}, "heads that turn in 8"),
        ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before"),
        ("opt", {"word_embed_proj_dim": 32}, "word_embed_proj_dim 32"),
    ],
)
def test_each_family_refuses_what_its_graph_has_not(model: str, config: dict[str, Any], what: str) -> None:
    family = next(family for family in FAMILIES.values() if family.name == model)
    with pytest.raises(ExportError, match=what):
        family.decoder({"model_type": model} | config)


def test_a_text_ends_where_longrope_would_turn_by_other_angles() -> None:
    decoder = FAMILIES["Phi3ForCausalLM"].decoder({**TINY_MODELS["phi3_longrope"], "pad_token_id": 2})
    assert decoder.context_length == 128


def test_an_architecture_without_a_family_has_none() -> None:
    assert family_of({"architectures": ["FooForCausalLM"]}) is None
    assert family_of({}) is None


@pytest.mark.parametrize("unnamed", [{}, {"architectures": None}, {"architectures": []}])
def test_a_config_that_names_no_architecture_is_of_that_of_its_model_type(unnamed: dict[str, Any]) -> None:
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
def test_a_config_that_makes_no_sense_is_an_export_error(tmp_path: Path, broken: dict[str, Any]) -> None:
    source = tiny_llama_checkpoint(tmp_path / "checkpoint")
    path = source / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | broken))
    with pytest.raises(ExportError, match=r"config\.json"):
        write_graph(source, tmp_path / "graph")


def test_the_graph_says_what_it_is(tiny_checkpoint: Path, tmp_path: Path) -> None:
    folder = write_graph(tiny_checkpoint, tmp_path, precision="fp16").folder
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    assert {entry.key: entry.value for entry in model.metadata_props} == {
        "genserve.family": "llama",
        "genserve.precision": "fp16",
        "genserve.context_length": "256",
        "genserve.source": "tiny",
    }


class Slots:
    """Rows in the slots of a logits model; each forward is compared with the reference on the row alone."""

    def __init__(self, graph: WrittenGraph, reference: PreTrainedModel) -> None:
        self.model = graph.logits(num_slots=4, max_length=64)
        self.reference = reference
        self.rows: list[NDArray[np.int64]] = []
        self.expected: list[NDArray[np.float32]] = []
        self.past: list[int] = []
        self.largest_difference = 0.0

    def prefill(self, rows: list[NDArray[np.int64]], *, lengths: list[int]) -> None:
        slots = [self.add(row) for row in rows]
        chunks = [row[:length].tolist() for row, length in zip(rows, lengths, strict=True)]
        self.compare(self.model.prefill(chunks, first_slot=slots[0], past=0), slots=slots, lengths=lengths)

    def prefill_in_chunks(self, row: NDArray[np.int64], *, lengths: list[int]) -> None:
        slot = self.add(row)
        for length in lengths:
            past = self.past[slot]
            logits = self.model.prefill([row[past : past + length].tolist()], first_slot=slot, past=past)
            self.compare(logits, slots=[slot], lengths=[length])

    def decode(self, *, steps: int) -> None:
        slots = range(len(self.rows))
        for _ in range(steps):
            tokens = np.array([row[at] for row, at in zip(self.rows, self.past, strict=True)])
            logits = self.model.decode(tokens, np.array(self.past))
            self.compare(logits, slots=slots, lengths=[1] * len(slots))

    def end(self, *, slot: int) -> None:
        """The last row moves into the slot."""
        self.model.move(source=len(self.rows) - 1, target=slot, length=self.past[-1])
        for values in (self.rows, self.expected, self.past):
            values[slot] = values[-1]
            values.pop()

    def add(self, row: NDArray[np.int64]) -> int:
        self.rows.append(row)
        self.expected.append(reference_logits(self.reference, row))
        self.past.append(0)
        return len(self.rows) - 1

    def compare(
        self, logits: NDArray[np.float32], *, slots: Sequence[int], lengths: Sequence[int]
    ) -> None:
        for slot, length, found in zip(slots, lengths, logits, strict=True):
            self.past[slot] += length
            difference = np.abs(found - self.expected[slot][self.past[slot] - 1]).max()
            self.largest_difference = max(self.largest_difference, float(difference))


def export(model: str, folder: Path, *, precision: Precision) -> ExportReport:
    source, repository = tiny_checkpoint(folder / "tiny", **TINY_MODELS[model]), folder / "repository"
    return export_model(
        str(source), repository=repository, name="m", precision=precision, progress=SilentProgress()
    )


def chunked_logits(graph: WrittenGraph, ids: NDArray[np.int64]) -> NDArray[np.float32]:
    cached, logits, past = graph.cached(batch=1, max_len=128), [], 0
    for length in (16, 7, 30, 1, len(ids) - 54):
        chunk = ids[None, past : past + length]
        logits.append(cached.forward(chunk, past=[past], rows=range(length)))
        past += length
    return np.concatenate(logits)


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
