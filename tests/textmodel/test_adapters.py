"""Adapters that requests choose: compared with transformers' models, alone and mixed, loaded and dropped."""

from __future__ import annotations

import json
import os
import queue
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from genserve.completion import join_deltas
from genserve.engine.delta_streams import DeltaStream
from genserve.engine.engine_request import Request
from genserve.engine.logits_model import ForwardBatch
from genserve.engine.prefix_cache import root_key
from genserve.errors import ModelNotFound, ModelNotReady, Overloaded, RepositoryError
from genserve.export.export_options import ExportFormat, Precision
from genserve.generation_metrics import Metrics
from genserve.repository.repository import Repository
from genserve.sampling.sampling_params import SamplingParams
from genserve.textmodel.adapters import AcquiredAdapter, Adapters
from genserve.textmodel.receipts import repeated_request
from genserve.textmodel.runtimes.onnx_logits import OnnxLogits
from genserve.textmodel.runtimes.pipeline_logits import PipelineLogits
from genserve.textmodel.text_model import TextModel
from tests.export.adapters import adapted_model, write_adapter
from tests.export.graphs import NOTHING_SEEN, conversion_of, write_conversion, write_graph
from tests.export.tiny_models import TINY_MODELS
from tests.export.tiny_models import tiny_checkpoint as family_checkpoint
from tests.support.representatives import with_extended
from tests.support.transformers_reference import reference_logits

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
IDS = np.random.default_rng(1).integers(3, 300, 40)
Logits = NDArray[np.float32]
T = TypeVar("T")


def adapters_of(logits: Any, *, max_loaded: int = 8) -> Adapters:
    return Adapters(model="tiny", logits=logits, metrics=Metrics().for_model("tiny"), max_loaded=max_loaded)


def forward(
    logits: OnnxLogits,
    rows: Sequence[NDArray[np.int64]],
    adapters: Sequence[AcquiredAdapter | None],
    *,
    chunk: int = 64,
) -> list[Logits]:
    """Run sequences together, in chunks of tokens: [T, vocab] of each."""
    blocks = -(-max(map(len, rows)) // logits.block_size)
    table = np.arange(blocks * len(rows), dtype=np.int32).reshape(len(rows), blocks)
    found: list[list[Logits]] = [[] for _ in rows]
    for start in range(0, max(map(len, rows)), chunk):
        here = [index for index, row in enumerate(rows) if start < len(row)]
        parts = [rows[index][start : start + chunk] for index in here]
        batch = ForwardBatch.of(
            parts,
            num_computed_tokens=[start] * len(here),
            block_table=table[here],
            logits_indices=range(sum(map(len, parts))),
        )
        used = [adapters[index] for index in here]
        batch = replace(batch, adapters=used if any(used) else None)
        split = np.split(logits.forward(batch), np.cumsum([len(part) for part in parts])[:-1])
        for index, part in zip(here, split, strict=True):
            found[index].append(part.copy())
    return [np.concatenate(parts) for parts in found]


def loaded(
    base: Path, folder: Path, *adapters: Path, precision: Precision = "fp32", **options: Any
) -> tuple[OnnxLogits, list[AcquiredAdapter]]:
    written = write_graph(base, folder / "graph", precision=precision, **options)
    logits = written.logits(max_num_seqs=8, max_length=64)
    known = adapters_of(logits)
    for index, adapter in enumerate(adapters):
        known.load(str(index), adapter)
    return logits, [known.acquire(str(index)) for index in range(len(adapters))]


FAMILIES: dict[str, tuple[str, ...]] = {
    "llama": LINEARS,
    "llama_biases": LINEARS,
    "gemma2": LINEARS,
    "gemma3": LINEARS,
    "olmo2": LINEARS,
    "phi": ("q_proj", "k_proj", "v_proj", "dense", "fc1", "fc2"),
    "phi3_longrope": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    "qwen2": LINEARS,
    "qwen3": LINEARS,
    "starcoder2": ("q_proj", "k_proj", "v_proj", "o_proj", "c_fc", "c_proj"),
}


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=() if name in ("llama", "qwen3") else pytest.mark.extended)
        for name in FAMILIES
    ],
)
def test_logits_agree_with_transformers_model_and_hooks(family: str, tmp_path: Path) -> None:
    base = family_checkpoint(tmp_path / "base", **TINY_MODELS[family])
    adapter = write_adapter(tmp_path / "adapter", base, targets=FAMILIES[family], rank=6)
    logits, [own] = loaded(base, tmp_path, adapter)
    plain, found = forward(logits, [IDS, IDS], [None, own])
    expected = reference_logits(adapted_model(base, adapter), IDS)
    assert np.abs(found - expected).max() < 1e-4 * max(1, np.abs(expected).max())
    assert np.abs(found - plain).max() > 0.01


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family_checkpoint(tmp_path_factory.mktemp("base"), **TINY_MODELS["llama"])


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return [
        write_adapter(folder / "all", base, targets=LINEARS, rank=16, seed=1),
        write_adapter(folder / "two", base, targets=("q_proj", "v_proj"), rank=3, seed=2),
        write_adapter(folder / "rs", base, targets=("up_proj", "down_proj"), rank=4, seed=3, use_rslora=True),
    ]


@pytest.mark.parametrize("precision", ["fp32", "int8", pytest.param("int4", marks=pytest.mark.extended)])
def test_a_row_has_the_bits_of_its_adapter_alone(
    precision: Precision, base: Path, adapters: list[Path], tmp_path: Path
) -> None:
    logits, own = loaded(base, tmp_path, *adapters, precision=precision)
    plain = write_graph(base, tmp_path / "plain", precision=precision).logits(max_num_seqs=8, max_length=64)
    chosen = [None, *own, own[0], None, own[1]]
    rng = np.random.default_rng(2)
    rows = [rng.integers(3, 300, length) for length in (30, 1, 17, 40, 30, 3, 9)]
    alone = [forward(logits, [row], [each])[0] for row, each in zip(rows, chosen, strict=True)]
    for chunk in (1, 7, 64):
        for found, expected in zip(forward(logits, rows, chosen, chunk=chunk), alone, strict=True):
            np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(forward(plain, rows[:1], [None])[0], alone[0])


def test_threads_and_stages_of_a_pipeline_change_no_bit(
    base: Path, adapters: list[Path], tmp_path: Path
) -> None:
    logits, own = loaded(base, tmp_path, *adapters)
    chosen = [own[0], None, own[2]]
    rows = [IDS, IDS[:20], IDS[5:]]
    expected = forward(logits, rows, chosen)
    files = [tmp_path / "graph" / "tiny_logits" / "1" / "model.onnx"]
    for threads in (1, 2, 5):
        again = OnnxLogits(files[0], max_num_seqs=8, max_length=64, num_threads=threads)
        for found, wanted in zip(forward(again, rows, chosen), expected, strict=True):
            np.testing.assert_array_equal(found, wanted)
    staged = write_graph(base, tmp_path / "staged", pipeline_stages=2).folder
    pipeline = PipelineLogits(
        [staged / "model.onnx", staged / "model.stage2.onnx"],
        max_num_seqs=8,
        max_length=64,
        max_micro_batch=9,
    )
    known = adapters_of(pipeline)
    for index in (0, 2):
        known.load(str(index), adapters[index])
    of_stages = [known.acquire("0"), None, known.acquire("2")]
    for found, wanted in zip(forward(pipeline, rows, of_stages), expected, strict=True):
        np.testing.assert_array_equal(found, wanted)
    pipeline.close()


def test_the_export_of_int8_says_how_it_has_balanced_inputs(
    base: Path, adapters: list[Path], tmp_path: Path
) -> None:
    """The same adapter changes a graph with balanced inputs as much as one without."""
    adapter = Path(shutil.copytree(adapters[0], tmp_path / "adapter"))
    with_config(lora_alpha=1)(adapter)
    conversion = conversion_of(base, precision="int8")
    rng = np.random.default_rng(3)
    seen = {role: np.exp(rng.normal(0, 1, 64)).astype(np.float32) for role in conversion.norms}
    balanced = write_conversion(
        conversion, tmp_path / "balanced", reference=replace(NOTHING_SEEN, activations=seen)
    )
    changes = []
    for written in (balanced, write_graph(base, tmp_path / "plain", precision="fp32")):
        logits = written.logits(max_num_seqs=8, max_length=64)
        known = adapters_of(logits)
        known.load("a", adapter)
        plain, found = forward(logits, [IDS, IDS], [None, known.acquire("a")])
        changes.append(found - plain)
    error = np.abs(changes[0] - changes[1]).mean() / np.abs(changes[1]).mean()
    assert error < 0.2  # 0.5 if the factors are left out


# What is refused: the change of a folder, and what the error names.


def with_config(**fields: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return change


def with_tensor(name: str, *shape: int, value: float = 0.0) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "adapter_model.safetensors"
        tensors = dict(load_file(path))
        save_file(tensors | {name: np.full(shape, value, np.float32)}, path)

    return change


def with_no_rank(folder: Path) -> None:
    module = f"{_LAYER}self_attn.q_proj"
    with_tensor(f"{module}.lora_A.weight", 0, 64)(folder)
    with_tensor(f"{module}.lora_B.weight", 64, 0)(folder)


def cut(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])


_LAYER = "base_model.model.model.layers.0."
REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "dora": (with_config(use_dora=True), "DoRA"),
    "kind": (with_config(peft_type="LOHA"), "LOHA"),
    "initialization": (with_config(init_lora_weights="pissa"), "pissa"),
    "tokens": (with_config(trainable_token_indices=[1]), "trainable_token_indices"),
    "head": (with_tensor("base_model.model.lm_head.weight", 320, 64), "lm_head"),
    "layers": (with_tensor(f"{_LAYER[:-2]}7.mlp.up_proj.lora_A.weight", 16, 64), "has . layers"),
    "norm": (with_tensor(f"{_LAYER}input_layernorm.weight", 64), "input_layernorm"),
    "bias": (with_tensor(f"{_LAYER}self_attn.q_proj.lora_B.bias", 64), "lora_B.bias"),
    "shape": (with_tensor(f"{_LAYER}self_attn.q_proj.lora_A.weight", 16, 32), "q_proj"),
    "rank": (with_tensor(f"{_LAYER}self_attn.q_proj.lora_A.weight", 7, 64), "same rank"),
    "no rank": (with_no_rank, "same rank"),
    "huge alpha": (with_config(lora_alpha=10**400), "lora_alpha"),
    "infinite": (with_tensor(f"{_LAYER}self_attn.q_proj.lora_A.weight", 16, 64, value=np.inf), "finite"),
    "alpha": (with_config(lora_alpha=None), "lora_alpha"),
    "file": (cut, "adapter_model.safetensors"),
    "json": (lambda folder: (folder / "adapter_config.json").write_text("{"), "JSON"),
    "missing": (lambda folder: (folder / "adapter_model.safetensors").unlink(), "adapter_model.safetensors"),
    "empty": (shutil.rmtree, "adapter_config.json"),
}


@pytest.mark.parametrize(
    "case", with_extended(REFUSED, always={"layers", "shape", "no rank", "infinite", "file", "json"})
)
def test_an_adapter_that_a_request_cannot_choose_is_refused(
    case: str, base: Path, adapters: list[Path], tmp_path: Path
) -> None:
    change, named = REFUSED[case]
    folder = Path(shutil.copytree(adapters[0], tmp_path / "adapter"))
    change(folder)
    known = adapters_of(write_graph(base, tmp_path / "graph").logits(max_num_seqs=1, max_length=64))
    with pytest.raises(RepositoryError, match=named) as raised:
        known.load("a", folder)
    assert raised.value.remedy
    assert len(known) == 0


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"export_format": ExportFormat.TORCHSCRIPT}),
        ("granite", {}),
        ("mixtral", {}),
    ],
)
def test_a_model_that_can_have_no_adapters_says_so(
    family: str, options: dict[str, Any], tmp_path: Path
) -> None:
    base = family_checkpoint(tmp_path / "base", **TINY_MODELS[family])
    adapter = write_adapter(tmp_path / "adapter", base, targets=("q_proj",))
    logits = write_graph(base, tmp_path / "graph", **options).logits(max_num_seqs=1, max_length=64)
    with pytest.raises(RepositoryError) as raised:
        adapters_of(logits).load("a", adapter)
    assert "--adapter" in raised.value.remedy


# Adapters of a text model: requests choose them by name.


@pytest.fixture
def model(tiny_repository: Path) -> Iterator[TextModel]:
    repository = Repository([tiny_repository])
    repository.start()
    found = repository.text_model("tiny")
    assert isinstance(found, TextModel)
    yield found
    repository.close()


@pytest.fixture(scope="module")
def tiny_adapters(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("tiny_adapters")
    return [
        write_adapter(folder / str(seed), tiny_checkpoint, targets=LINEARS, rank=8, seed=seed)
        for seed in range(4)
    ]


def answer(model: TextModel, adapter: str | None, **params: Any) -> Any:
    params = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True} | params
    request = model.prepare("hello there, " * 8, SamplingParams(**params), adapter=adapter)
    with DeltaStream(model.engine, request) as stream:
        return join_deltas(stream)


def answers(model: TextModel, adapters: Sequence[str | None], **params: Any) -> list[tuple[int, ...]]:
    with ThreadPoolExecutor(len(adapters)) as threads:
        found = threads.map(lambda adapter: answer(model, adapter, **params), adapters)
        return [completion.token_ids for completion in found]


def test_answers_of_a_batch_are_those_of_their_adapters_alone(
    model: TextModel, tiny_adapters: list[Path]
) -> None:
    names: list[str | None] = [None, "a", "b"]
    assert model.adapters is not None
    model.adapters.load("a", tiny_adapters[0])
    model.adapters.load("b", tiny_adapters[1])
    searches = {"use_beam_search": True, "beam_width": 3}
    for params in ({}, searches):
        alone = [answer(model, name, **params).token_ids for name in names]
        assert len({*alone}) == 3
        assert answers(model, names * 3, **params) == alone * 3


def test_a_prefix_is_cached_for_its_adapter_alone(model: TextModel, tiny_adapters: list[Path]) -> None:
    assert model.adapters is not None
    first = model.adapters.load("a", tiny_adapters[0])
    model.adapters.load("b", tiny_adapters[1])
    expected = {}
    for name in (None, "a", "b"):
        completion = answer(model, name)
        assert completion.usage.cached_tokens == 0, name
        expected[name] = completion.token_ids
    for name in (None, "a", "b"):
        completion = answer(model, name)
        assert completion.usage.cached_tokens > 0, name
        assert completion.token_ids == expected[name]
    # The same files under another name are the same adapter; other files under its name are another one.
    assert model.adapters.load("c", tiny_adapters[0]).sha256 == first.sha256
    assert answer(model, "c").usage.cached_tokens > 0
    model.adapters.load("a", tiny_adapters[2])
    replaced = answer(model, "a")
    assert replaced.usage.cached_tokens == 0
    assert replaced.token_ids not in expected.values()


def test_the_keys_of_blocks_depend_on_salt_and_adapter() -> None:
    roots = [root_key(salt, adapter=adapter) for salt in (None, "a", "b") for adapter in (None, "a", "b")]
    assert len({*roots}) == len(roots)
    assert Request([1, 2], cache_salt="a").cache_root == root_key("a")


def test_the_least_recently_used_adapter_leaves_the_memory(
    base: Path, adapters: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = write_graph(base, tmp_path / "graph").logits(max_num_seqs=1, max_length=64)
    known = adapters_of(logits, max_loaded=2)
    for index, folder in enumerate(adapters):
        known.load(str(index), folder)
    packed: list[str] = []
    pack = known._pack_again

    def counted(found: Any) -> Any:
        packed.append(found.name)
        return pack(found)

    monkeypatch.setattr(known, "_pack_again", counted)

    def use(name: str) -> None:
        known.release(acquired(known, name))

    for name in ("1", "2", "0", "2", "1", "2"):
        use(name)
    assert packed == ["0", "1"]
    held = known.acquire("2")
    use("0")
    use("1")
    assert known.acquire("2").graphs is held.graphs
    assert packed == ["0", "1", "0", "1"]


def acquired(known: Adapters, name: str) -> AcquiredAdapter:
    """Return an adapter once it is in memory, or cannot be."""
    changed = threading.Event()
    found = known.acquire(name, on_change=changed.set)
    if not found.is_ready:
        assert changed.wait(60)
    return found


def test_adapters_get_room_by_priority_and_in_the_order_of_arrival(
    base: Path, adapters: list[Path], tmp_path: Path
) -> None:
    logits = write_graph(base, tmp_path / "graph").logits(max_num_seqs=1, max_length=64)
    known = adapters_of(logits, max_loaded=1)
    for name in "abcd":
        known.load(name, adapters[0])
    held = acquired(known, "a")
    changes: queue.SimpleQueue[str] = queue.SimpleQueue()

    def wait_for(name: str, **options: Any) -> AcquiredAdapter:
        return known.acquire(name, on_change=partial(changes.put, name), **options)

    b, c = wait_for("b"), wait_for("c")
    again, first, cancelled = wait_for("a"), wait_for("d", priority=-1), wait_for("b")
    known.release(cancelled)
    waiting = [first, b, c, again]
    assert not any(each.is_ready for each in waiting)
    for each in waiting:
        known.release(held)
        assert changes.get(timeout=60) == each.info.name
        assert each.is_ready
        held = each
    known.release(held)
    assert changes.empty()


def test_an_adapter_that_is_unloaded_or_broken_ends_the_wait_for_it(
    base: Path, adapters: list[Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(adapters[0], tmp_path / "adapter"))
    logits = write_graph(base, tmp_path / "graph").logits(max_num_seqs=1, max_length=64)
    known = adapters_of(logits, max_loaded=1)
    for name in "abc":
        known.load(name, adapters[0] if name == "a" else folder)
    held = acquired(known, "a")
    changes: queue.SimpleQueue[str] = queue.SimpleQueue()
    b, c = (known.acquire(name, on_change=partial(changes.put, name)) for name in "bc")
    (folder / "adapter_model.safetensors").unlink()
    known.unload(known.get("b"))
    known.release(held)
    assert [changes.get(timeout=60), changes.get(timeout=60)] == ["b", "c"]
    assert isinstance(b.error, ModelNotReady)
    assert "was unloaded" in b.error.message
    assert isinstance(c.error, ModelNotReady)
    assert "have changed since it was loaded" in c.error.message
    assert acquired(known, "a").is_ready


def test_who_waits_for_an_adapter_gets_the_new_one_if_its_files_are_replaced(
    base: Path, adapters: list[Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(adapters[0], tmp_path / "adapter"))
    logits = write_graph(base, tmp_path / "graph").logits(max_num_seqs=1, max_length=64)
    known = adapters_of(logits, max_loaded=1)
    for name in "abc":
        known.load(name, folder if name == "c" else adapters[1])
    held = acquired(known, "a")
    changes: queue.SimpleQueue[str] = queue.SimpleQueue()
    b, first, second = (known.acquire(name, on_change=partial(changes.put, name)) for name in "bcc")
    before = b.sha256
    known.load("b", adapters[2])  # the files that it waits for are still there
    with_config(lora_alpha=12)(folder)
    new = known.load("c", folder)
    assert first.sha256 != new.sha256
    known.release(held)
    assert changes.get(timeout=60) == "b"
    assert (b.error, b.sha256, b.is_ready) == (None, before, True)
    known.release(b)
    assert [changes.get(timeout=60), changes.get(timeout=60)] == ["c", "c"]
    for each in (first, second):
        assert (each.error, each.sha256, each.is_ready) == (None, new.sha256, True)
        known.release(each)
    assert not known._waiting
    assert [*known._slots] == [new]


def test_who_waits_hears_of_a_new_adapter_that_is_in_memory_already(
    base: Path, adapters: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(adapters[0], tmp_path / "adapter"))
    logits = write_graph(base, tmp_path / "graph").logits(max_num_seqs=1, max_length=64)
    known = adapters_of(logits, max_loaded=2)
    for name in "cab":
        known.load(name, folder if name == "c" else adapters[1])
    opened, pack = threading.Event(), known._pack_again

    def gated(found: Any) -> Any:
        assert opened.wait(60)
        return pack(found)

    monkeypatch.setattr(known, "_pack_again", gated)
    changed = threading.Event()
    waiting = known.acquire("c", on_change=changed.set)
    with_config(lora_alpha=12)(folder)
    new = known.load("c", folder)  # while the old files are read
    assert not changed.is_set()
    opened.set()
    assert changed.wait(60)
    assert (waiting.error, waiting.sha256, waiting.is_ready) == (None, new.sha256, True)


def test_an_adapter_that_is_written_while_it_is_read_is_rejected(
    base: Path, adapters: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(adapters[0], tmp_path / "adapter"))
    logits = write_graph(base, tmp_path / "graph").logits(max_num_seqs=1, max_length=64)
    known = adapters_of(logits, max_loaded=1)
    known.load("a", folder)
    known.load("b", adapters[1])
    pack = known.packer.pack

    def written(peft: Any) -> Any:
        packed = pack(peft)
        with_config(lora_alpha=12)(folder)
        return packed

    monkeypatch.setattr(known.packer, "pack", written)
    assert isinstance(acquired(known, "a").error, ModelNotReady)
    with pytest.raises(RepositoryError, match="while they were read"):
        known.load("c", folder)


def test_an_adapter_that_is_shortened_while_it_is_read_is_rejected(
    base: Path, adapters: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(adapters[0], tmp_path / "adapter"))
    known = adapters_of(write_graph(base, tmp_path / "graph").logits(max_num_seqs=1, max_length=64))
    pack = known.packer.pack

    def shortened(peft: Any) -> Any:
        os.truncate(folder / "adapter_model.safetensors", 2000)
        return pack(peft)

    monkeypatch.setattr(known.packer, "pack", shortened)
    with pytest.raises(RepositoryError, match="it was shortened, and ends before the end of base_model"):
        known.load("a", folder)


def test_requests_that_wait_for_adapters_hold_up_no_other(
    model: TextModel, tiny_adapters: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = model.adapters
    assert known is not None
    monkeypatch.setattr(known, "_max_loaded", 1)
    for name, folder in zip("ab", tiny_adapters, strict=False):
        known.load(name, folder)
    expected = answer(model, "b").token_ids
    held = acquired(known, "a")

    def open_stream(**params: Any) -> DeltaStream:
        params = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True} | params
        request = model.prepare("hello there, " * 8, SamplingParams(**params), adapter="b")
        return DeltaStream(model.engine, request)

    def soon(work: Callable[[], T]) -> T:
        return model.run_soon(work, compiles=False).result(timeout=60)

    streams = [soon(open_stream) for _ in range(5)]
    assert soon(lambda: answer(model, None)).token_ids != expected
    waiting, running = known._metrics._adapter_waiting("b"), known._metrics._adapter_running("b")
    assert (waiting._value.get(), running._value.get()) == (5, 0)
    with soon(partial(open_stream, max_time_ms=1)) as stream:
        assert not join_deltas(stream).token_ids
    streams.pop().close()
    assert not known._slots.keys() & {known.get("b")}
    known.release(held)
    for stream in streams:
        with stream:
            assert join_deltas(stream).token_ids == expected
    model.engine.drain(timeout_s=60)
    assert not known._waiting
    assert not any(slot.users for slot in known._slots.values())
    assert (waiting._value.get(), running._value.get()) == (0, 0)


def test_every_end_of_a_request_gives_its_adapter_back(
    model: TextModel, tiny_adapters: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    known, engine = model.adapters, model.engine
    assert known is not None
    info = known.load("a", tiny_adapters[0])
    given: list[AcquiredAdapter] = []
    acquire = known.acquire

    def counted(name: str, *, count: int, **options: Any) -> AcquiredAdapter:
        given.extend([acquire(name, count=count, **options)] * count)
        return given[-1]

    monkeypatch.setattr(known, "acquire", counted)
    answer(model, "a")
    engine.drain(timeout_s=60)
    assert (len(given), known._slots[info].users) == (1, [])
    params = SamplingParams(max_tokens=100, ignore_eos=True)
    request = model.prepare("hello", params, num_choices=3, adapter="a")
    with DeltaStream(engine, request) as stream:  # cancelled, unless it ends sooner
        next(stream)
    engine.drain(timeout_s=60)
    assert (len(given), known._slots[info].users) == (4, [])
    with pytest.raises(Overloaded):
        engine.submit(*[request] * 2000, sink=mock.Mock())
    assert not known._slots[info].users


def test_all_choices_have_the_adapter_that_the_first_one_has(
    model: TextModel, tiny_adapters: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = model.adapters
    assert known is not None
    known.load("a", tiny_adapters[0])
    acquire = known.acquire

    def replaced(name: str, **options: Any) -> AcquiredAdapter:
        found = acquire(name, **options)
        known.load(name, tiny_adapters[1])
        return found

    monkeypatch.setattr(known, "acquire", replaced)
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    request = model.prepare("hello there, " * 8, params, num_choices=2, adapter="a")
    answers: tuple[list[int], list[int]] = ([], [])
    with DeltaStream(model.engine, request) as stream:
        for delta in stream:
            answers[delta.choice].extend(delta.token_ids)
    assert answers[0] == answers[1]
    assert tuple(answers[1]) != answer(model, "a").token_ids


def test_an_unloaded_adapter_ends_what_it_began(model: TextModel, tiny_adapters: list[Path]) -> None:
    assert model.adapters is not None
    model.adapters.load("a", tiny_adapters[0])
    whole = answer(model, "a", max_tokens=60).token_ids
    params = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    request = model.prepare("hello there, " * 8, params, adapter="a")
    with DeltaStream(model.engine, request) as stream:
        first = next(stream)
        model.adapters.unload(model.adapters.get("a"))
        rest = join_deltas(stream)
    assert (*first.token_ids, *rest.token_ids) == whole
    model.engine.drain(timeout_s=60)
    assert not model.adapters._slots
    for call in (model.adapters.get, lambda name: answer(model, name)):
        with pytest.raises(ModelNotFound):
            call("a")
    with pytest.raises(ModelNotFound):
        DeltaStream(model.engine, request)


def test_an_adapter_for_which_nobody_waits_any_more_is_not_packed(
    base: Path, adapters: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = write_graph(base, tmp_path / "graph").logits(max_num_seqs=1, max_length=64)
    known = adapters_of(logits, max_loaded=1)
    for name in "abc":
        known.load(name, adapters[0])
    monkeypatch.setattr(known, "_max_loaded", 3)
    opened, packed, pack = threading.Event(), [], known._pack_again

    def gated(found: Any) -> Any:
        packed.append(found.name)
        assert opened.wait(60)
        return pack(found)

    monkeypatch.setattr(known, "_pack_again", gated)
    known.acquire("a")
    known.release(known.acquire("b"))
    opened.set()
    known._packing.submit(lambda: None).result(timeout=60)
    assert packed == ["a"]
    assert acquired(known, "b").is_ready


def test_files_that_change_are_not_read_again(base: Path, adapters: list[Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(adapters[0], tmp_path / "adapter"))
    logits = write_graph(base, tmp_path / "graph").logits(max_num_seqs=1, max_length=64)
    known = adapters_of(logits, max_loaded=1)
    known.load("a", folder)
    known.load("b", adapters[1])
    with_config(lora_alpha=12)(folder)
    assert isinstance(acquired(known, "a").error, ModelNotReady)
    before = known.get("a").sha256
    assert known.load("a", folder).sha256 != before
    assert acquired(known, "a").is_ready


def test_a_receipt_has_the_adapter_and_can_be_repeated(model: TextModel, tiny_adapters: list[Path]) -> None:
    assert model.adapters is not None
    info = model.adapters.load("a", tiny_adapters[0])
    receipt = answer(model, "a", return_receipt=True).usage.receipt
    assert receipt["adapter"] == {"name": "a", "sha256": info.sha256}
    assert "adapter" not in answer(model, None, return_receipt=True).usage.receipt
    request = repeated_request(receipt)
    assert request.adapter == "a"
    assert model.repeat(request)["sha256"] == receipt["sha256"]


def test_what_is_known_of_an_adapter(model: TextModel, tiny_adapters: list[Path]) -> None:
    assert model.adapters is not None
    info = model.adapters.load("a", tiny_adapters[0])
    assert (info.rank, info.alpha, info.targets) == (8, 6.0, tuple(sorted(LINEARS)))
    assert info.num_bytes == (tiny_adapters[0] / "adapter_model.safetensors").stat().st_size
    assert [*model.adapters.list()] == [info]
    assert "a" in model.adapters
