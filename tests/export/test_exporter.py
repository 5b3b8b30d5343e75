"""Exports into a repository: added and kept files, and failures."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import get_args

import numpy as np
import onnx
import pytest
from safetensors.numpy import load_file, save_file

from genserve.errors import ExportError, MissingDependency
from genserve.export import ExportReport, FileFormat, Precision, SilentProgress, export_model
from genserve.export.export_options import ExportFormat, Unit
from genserve.export.model_folders import ModelFolders
from genserve.llm import LLM
from genserve.repository.model_validation import repository_diagnostics
from genserve.textmodel.runtimes.torchscript_logits import TorchLogits
from tests.export import tiny_models
from tests.export.ggufs import write_gguf
from tests.export.graphs import conversion_of, write_graph
from tests.support.representatives import with_extended
from tests.support.tiny_llama import tiny_llama_checkpoint, tiny_tokenizer

STAGES = {"tiny", "tiny_tokenizer", "tiny_logits", "tiny_decoder"}


class InterruptedProgress(SilentProgress):
    """The user interrupts the export when a task is done."""

    def __init__(self, task: str) -> None:
        self._task = task

    @contextmanager
    def task(
        self, name: str, *, total: int | None = None, unit: Unit = ""
    ) -> Iterator[Callable[[int], None]]:
        with super().task(name, total=total, unit=unit) as advance:
            yield advance
        if name.startswith(self._task):
            raise KeyboardInterrupt


class BytesProgress(SilentProgress):
    """Adds up the bytes of each task that has them."""

    def __init__(self) -> None:
        self.totals: dict[str, int] = {}
        self.done: dict[str, int] = {}

    @contextmanager
    def task(
        self, name: str, *, total: int | None = None, unit: Unit = ""
    ) -> Iterator[Callable[[int], None]]:
        counted: list[int] = []
        yield counted.append
        if unit == "bytes":
            assert total is not None
            self.totals[name], self.done[name] = total, sum(counted)


@pytest.mark.parametrize("kind", ["folder", pytest.param("gguf", marks=pytest.mark.extended)])
def test_progress_counts_the_bytes_of_the_files_once(tmp_path: Path, kind: str) -> None:
    source = tiny_llama_checkpoint(tmp_path / "tiny")
    weights = source / "model.safetensors"
    if kind == "gguf":
        source = weights = write_gguf(source, tmp_path / "tiny.gguf", kind="Q8_0")
    progress = BytesProgress()
    export(source, tmp_path / "repository", precision="int8", progress=progress)  # it reads some twice
    assert progress.totals.keys() == {"running the source", "converting to int8"}
    assert progress.done == progress.totals
    for total in progress.totals.values():
        assert 0.5 < total / weights.stat().st_size <= 1  # a file has a tokenizer or names, too


def export(
    source: Path,
    repository: Path,
    *,
    name: str = "tiny",
    file_format: FileFormat = "onnx",
    precision: Precision | None = "fp32",
    beside: str | None = None,
    overwrite: bool = False,
    progress: SilentProgress | None = None,
) -> ExportReport:
    return export_model(
        str(source),
        repository=repository,
        name=name,
        file_format=file_format,
        precision=precision,
        beside=beside,
        overwrite=overwrite,
        progress=progress or SilentProgress(),
    )


@pytest.fixture
def exported(tiny_repository: Path, tmp_path: Path) -> None:
    """What `export(tiny_checkpoint, tmp_path)` writes."""
    shutil.copytree(tiny_repository, tmp_path, dirs_exist_ok=True)


def contents(repository: Path) -> dict[str, bytes]:
    files = sorted(path for path in repository.rglob("*") if path.is_file())
    return {str(path.relative_to(repository)): path.read_bytes() for path in files}


@pytest.mark.parametrize(
    "precision",
    with_extended((known for known in get_args(Precision) if known != "source"), always={"fp32", "int4"}),
)
def test_an_export_is_four_stages_that_serve_within_the_bounds_of_their_precision(
    tiny_checkpoint: Path, tmp_path: Path, precision: Precision
) -> None:
    report = export(tiny_checkpoint, tmp_path, precision=precision)
    assert {path.name for path in tmp_path.iterdir()} == STAGES
    assert ModelFolders("tiny").are_complete(tmp_path)
    assert report.path == tmp_path / "tiny"
    assert report.precision == precision
    logits = tmp_path / "tiny_logits" / "1"
    assert report.size_bytes == sum(path.stat().st_size for path in logits.glob("model.onnx*"))
    written = json.loads((logits / "parity.json").read_text())
    assert written["top1_agreement"] == report.top1_agreement
    assert written["largest_logit_difference"] == report.largest_logit_difference
    assert written["perplexity_ratio"] == report.perplexity_ratio
    assert written["divergence"] == report.divergence
    assert written["tokens"] >= 1000


@pytest.mark.parametrize("precision", with_extended(["fp32", "fp16"], always={"fp32"}))
def test_torchscript_is_one_file_with_its_sizes(
    tiny_checkpoint: Path, tmp_path: Path, precision: Precision
) -> None:
    report = export(tiny_checkpoint, tmp_path, file_format="torchscript", precision=precision)
    assert ModelFolders("tiny").are_complete(tmp_path)
    logits = tmp_path / "tiny_logits" / "1"
    assert {path.name for path in logits.iterdir()} == {"model.pt", "parity.json", ".gitkeep"}
    assert report.size_bytes == (logits / "model.pt").stat().st_size
    assert report.largest_logit_difference < (1e-4 if precision == "fp32" else 0.1)
    loaded = TorchLogits(logits / "model.pt", max_num_seqs=2)
    assert (loaded.max_length, loaded.vocab_size, loaded.metadata["genserve.family"]) == (256, 320, "llama")
    # 2 layers of keys and values of 2 heads of 16 numbers.
    assert loaded.kv_cache_bytes == 2 * 256 * (2 * 2 * 2 * 16) * (4 if precision == "fp32" else 2)


@pytest.mark.parametrize(
    ("export_format", "precision"), [(ExportFormat.ONNX, "int8"), (ExportFormat.TORCHSCRIPT, "fp32")]
)
def test_the_default_precision_depends_on_the_format(
    tiny_checkpoint: Path, export_format: ExportFormat, precision: Precision
) -> None:
    conversion = conversion_of(tiny_checkpoint, precision=None, export_format=export_format)
    assert conversion.layout.precision == precision


def test_a_precision_that_the_format_does_not_support_is_rejected(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    with pytest.raises(ExportError, match="int8") as caught:
        export(tiny_checkpoint, tmp_path / "repository", file_format="torchscript", precision="int8")
    assert "fp32, fp16" in caught.value.remedy
    assert not (tmp_path / "repository").exists()


@pytest.mark.usefixtures("exported")
def test_a_config_of_another_format_is_not_kept(tiny_checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "tiny_logits" / "1" / "model.onnx").unlink()
    with pytest.raises(ExportError, match=r"tiny_logits/config\.pbtxt"):
        export(tiny_checkpoint, tmp_path, file_format="torchscript")
    export(tiny_checkpoint, tmp_path, file_format="torchscript", overwrite=True)
    assert 'backend: "pytorch"' in (tmp_path / "tiny_logits" / "config.pbtxt").read_text()


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_every_weight_of_a_graph_is_read(tiny_checkpoint: Path, tmp_path: Path, precision: Precision) -> None:
    written = write_graph(tiny_checkpoint, tmp_path, precision=precision)
    graph = onnx.load(written.folder / "model.onnx", load_external_data=False).graph
    read = {name for node in graph.node for name in node.input}
    assert {weight.name for weight in graph.initializer} <= read


def test_the_weights_are_in_one_file_next_to_the_graph(tiny_repository: Path) -> None:
    folder = tiny_repository / "tiny_logits" / "1"
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    places = {
        entry.value
        for tensor in model.graph.initializer
        for entry in tensor.external_data
        if entry.key == "location"
    }
    assert places == {"model.onnx.data"}
    assert (folder / "model.onnx").stat().st_size < 20_000


def test_the_tokenizer_stage_has_the_files_of_the_checkpoint(
    tiny_checkpoint: Path, tiny_repository: Path
) -> None:
    found = contents(tiny_repository / "tiny_tokenizer" / "1")
    assert found.keys() == {
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "generation_config.json",
    }
    assert found["tokenizer.json"] == (tiny_checkpoint / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("task", ["loading", "reading", "converting", "comparing"])
def test_an_interrupted_export_leaves_nothing(tiny_checkpoint: Path, tmp_path: Path, task: str) -> None:
    repository = tmp_path / "repository"
    repository.mkdir()
    with pytest.raises(KeyboardInterrupt):
        export(tiny_checkpoint, repository, progress=InterruptedProgress(task))
    assert not list(repository.iterdir())


@pytest.mark.usefixtures("exported")
def test_an_interrupted_overwrite_changes_nothing(tiny_checkpoint: Path, tmp_path: Path) -> None:
    before = contents(tmp_path)
    other = tiny_llama_checkpoint(tmp_path.parent / "other", seed=1)
    with pytest.raises(KeyboardInterrupt):
        export(other, tmp_path, overwrite=True, progress=InterruptedProgress("comparing"))
    assert contents(tmp_path) == before


def test_an_export_too_far_from_its_source_is_not_installed(tmp_path: Path) -> None:
    source = tiny_llama_checkpoint(tmp_path / "wild")
    weights = load_file(source / "model.safetensors")
    # Logits of about 10^5, which float32 cannot represent to 0.001.
    weights["model.norm.weight"] *= 1e5
    save_file(weights, source / "model.safetensors")
    with pytest.raises(ExportError, match="too far from its source"):
        export(source, tmp_path / "repository")
    assert not list((tmp_path / "repository").iterdir())


@pytest.mark.usefixtures("exported")
def test_existing_weights_are_only_overwritten_on_demand(tiny_checkpoint: Path, tmp_path: Path) -> None:
    before = contents(tmp_path)
    other = tiny_llama_checkpoint(tmp_path.parent / "wider", seed=1, vocab_size=400)
    with pytest.raises(ExportError, match="already") as caught:
        export(other, tmp_path)
    assert "--overwrite" in caught.value.remedy
    assert contents(tmp_path) == before
    export(other, tmp_path, overwrite=True)
    after = contents(tmp_path)
    assert after.keys() == before.keys()
    changed = {path for path in after if after[path] != before[path]}
    assert changed >= {
        "tiny_logits/1/model.onnx.data",
        "tiny_logits/config.pbtxt",
        "tiny_tokenizer/1/tokenizer.json",
    }


@pytest.mark.usefixtures("exported")
def test_the_user_s_files_stay(tiny_checkpoint: Path, tmp_path: Path) -> None:
    decoder = tmp_path / "tiny_decoder" / "1" / "model.py"
    configs = [tmp_path / stage / "config.pbtxt" for stage in STAGES]
    for path in (decoder, *configs):
        path.write_text(path.read_text() + "# mine\n")
    (tmp_path / "tiny_logits" / "1" / "model.onnx").unlink()
    export(tiny_checkpoint, tmp_path)
    assert all(path.read_text().endswith("# mine\n") for path in (decoder, *configs))
    export(tiny_checkpoint, tmp_path, overwrite=True)
    assert decoder.read_text().endswith("# mine\n")
    assert not (tmp_path / "tiny_logits" / "config.pbtxt").read_text().endswith("# mine\n")


@pytest.mark.usefixtures("exported")
def test_a_config_of_another_model_is_not_kept_with_new_weights(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / "tiny_logits" / "1" / "model.onnx").unlink()
    with pytest.raises(ExportError, match=r"tiny_logits/config\.pbtxt") as caught:
        export(tiny_checkpoint, tmp_path, precision="fp16")
    assert "--overwrite" in caught.value.remedy


@pytest.mark.usefixtures("exported")
def test_a_tuned_config_is_kept_with_new_weights(tiny_checkpoint: Path, tmp_path: Path) -> None:
    config = tmp_path / "tiny_logits" / "config.pbtxt"
    config.write_text(config.read_text().replace(": 32", ": 8"))
    (tmp_path / "tiny_logits" / "1" / "model.onnx").unlink()
    export(tiny_checkpoint, tmp_path)
    assert "max_batch_size: 8" in config.read_text()


@pytest.mark.usefixtures("exported")
def test_new_configs_take_the_batch_size_of_a_tuned_ensemble(tiny_checkpoint: Path, tmp_path: Path) -> None:
    for stage in STAGES:
        config = tmp_path / stage / "config.pbtxt"
        config.write_text(config.read_text().replace(": 32", ": 64"))
    export(tiny_checkpoint, tmp_path, overwrite=True)
    assert all("max_batch_size: 64" in (tmp_path / stage / "config.pbtxt").read_text() for stage in STAGES)
    assert not any(repository_diagnostics([tmp_path]).values())


@pytest.mark.usefixtures("exported")
def test_the_config_selects_an_additional_graph(tiny_checkpoint: Path, tmp_path: Path) -> None:
    before = contents(tmp_path)
    report = export(tiny_checkpoint, tmp_path, precision="fp16", beside="half")
    added = contents(tmp_path).items() - before.items()
    names = {"model.onnx", "model.onnx.data", "parity.json"}
    assert {path for path, _ in added} == {f"tiny_logits/1/half/{name}" for name in names}
    assert before.items() <= contents(tmp_path).items()
    assert report.precision == "fp16"
    config = tmp_path / "tiny_logits" / "config.pbtxt"
    config.write_text(config.read_text() + 'default_model_filename: "half/model.onnx"\n')
    assert not any(repository_diagnostics([tmp_path]).values())
    with LLM(model_repository=tmp_path) as llm:
        assert llm.generate("Tea", max_tokens=3).usage.completion_tokens == 3


@pytest.mark.usefixtures("exported")
def test_an_additional_graph_is_only_replaced_on_demand(tiny_checkpoint: Path, tmp_path: Path) -> None:
    export(tiny_checkpoint, tmp_path, precision="fp16", beside="other")
    with pytest.raises(ExportError, match="tiny_logits/1/other"):
        export(tiny_checkpoint, tmp_path, precision="int8", beside="other")
    export(tiny_checkpoint, tmp_path, precision="int8", beside="other", overwrite=True)
    written = tmp_path / "tiny_logits" / "1" / "other" / "parity.json"
    assert json.loads(written.read_text())["precision"] == "int8"


def test_an_additional_graph_needs_its_model_and_a_valid_name(
    tiny_checkpoint: Path, tiny_repository: Path, tmp_path: Path
) -> None:
    with pytest.raises(ExportError, match="tiny"):
        export(tiny_checkpoint, tmp_path, beside="other")
    shutil.copytree(tiny_repository, tmp_path, dirs_exist_ok=True)
    with pytest.raises(ExportError, match=r"\.\./up"):
        export(tiny_checkpoint, tmp_path, beside="../up")
    wider = tiny_llama_checkpoint(tmp_path.parent / "wider", vocab_size=400)
    with pytest.raises(ExportError, match="wider") as caught:
        export(wider, tmp_path, beside="other", overwrite=True)
    assert "--overwrite" not in caught.value.remedy  # the config belongs to another graph
    assert not (tmp_path / "tiny_logits" / "1" / "other").exists()


def test_only_leftovers_of_this_models_killed_exports_are_removed(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    mine, others = tmp_path / ".tiny.ab12cd_8.tmp", tmp_path / ".tiny.v2.ab12cd_8.tmp"
    for folder in (mine, others):
        (folder / "tiny_logits").mkdir(parents=True)
    export(tiny_checkpoint, tmp_path)
    assert not mine.exists()
    assert others.exists()


@pytest.mark.parametrize("name", ["", ".hidden", "a/b", "../up", "a b", "x" * 129, "ünï"])
def test_an_invalid_folder_name_is_rejected(tiny_checkpoint: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(ExportError, match=re.escape(repr(name))):
        export(tiny_checkpoint, tmp_path / "repository", name=name)
    assert not (tmp_path / "repository").exists()


def test_a_missing_onnx_runtime_is_an_error_that_says_how_to_install_it(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(MissingDependency, match="ONNX Runtime") as caught:
        export(tiny_checkpoint, tmp_path / "repository")
    assert "onnxruntime" in caught.value.remedy
    assert not (tmp_path / "repository").exists()


def test_the_error_for_an_unknown_precision_lists_the_known_ones(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    with pytest.raises(ExportError, match="int2") as caught:
        export(tiny_checkpoint, tmp_path, precision="int2")  # type: ignore[arg-type]
    assert "int8, int4, fp16, fp32" in caught.value.remedy


def test_tensors_unknown_to_the_family_are_rejected_by_name(tmp_path: Path) -> None:
    source = tiny_llama_checkpoint(tmp_path / "odd")
    extra = {"model.layers.0.self_attn.q_norm.weight": np.ones(16, np.float32)}
    save_file(load_file(source / "model.safetensors") | extra, source / "model.safetensors")
    with pytest.raises(ExportError, match=r"layers\.0\.self_attn\.q_norm"):
        export(source, tmp_path / "repository")


def test_tensors_with_other_shapes_than_in_the_config_are_rejected(tmp_path: Path) -> None:
    source = tiny_llama_checkpoint(tmp_path / "odd")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"intermediate_size": 160}))
    with pytest.raises(ExportError, match="other shapes"):
        export(source, tmp_path / "repository")


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("tokenizer.json", "{}", r"cannot be used: tokenizer\.json cannot be read"),
        ("chat_template.jinja", "{% for %}", r"cannot be used: chat_template\.jinja: line 1"),
        ("chat_template.jinja", "{{ raise_exception('no chats') }}", "no chats"),
        ("chat_template.jinja", "{{ 1 / 0 }}", "the chat template failed"),
    ],
)
def test_a_tokenizer_that_cannot_serve_is_rejected(
    tmp_path: Path, file: str, content: str, reason: str
) -> None:
    source = tiny_llama_checkpoint(tmp_path / "checkpoint")
    (source / file).write_text(content)
    with pytest.raises(ExportError, match=f"the tokenizer of checkpoint .*{reason}"):
        export(source, tmp_path / "repository")


def test_a_tokenizer_with_a_larger_vocabulary_is_rejected(tmp_path: Path) -> None:
    source = tiny_llama_checkpoint(tmp_path / "checkpoint", vocab_size=290)
    tiny_tokenizer(vocab_size=320).save(str(source / "tokenizer.json"))
    with pytest.raises(ExportError, match="289"):
        export(source, tmp_path / "repository")


@pytest.mark.parametrize(
    ("model", "changed"), [("gpt2", {"n_embd": 100, "n_head": 12}), ("llama", {"pad_token_id": 400})]
)
def test_a_config_that_transformers_cannot_build_is_rejected_with_its_message(
    tmp_path: Path, model: str, changed: dict[str, int]
) -> None:
    source = tiny_models.tiny_checkpoint(tmp_path / "odd", **tiny_models.TINY_MODELS[model])
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | changed))
    with pytest.raises(ExportError, match=r"cannot build odd from its config: .*(divisible|Padding_idx)"):
        export(source, tmp_path / "repository")


def test_broken_weights_and_a_bad_export_are_different_errors(tmp_path: Path) -> None:
    source = tiny_llama_checkpoint(tmp_path / "broken")
    weights = load_file(source / "model.safetensors")
    weights["model.norm.weight"][3] = np.nan
    save_file(weights, source / "model.safetensors")
    with pytest.raises(ExportError, match=r"broken.*not finite"):
        export(source, tmp_path / "repository")


def test_a_copy_of_the_tied_head_is_ignored(tmp_path: Path) -> None:
    source = tiny_llama_checkpoint(tmp_path / "copied")
    weights = load_file(source / "model.safetensors")
    extra = {"lm_head.weight": weights["model.embed_tokens.weight"]}
    save_file(weights | extra, source / "model.safetensors")
    assert export(source, tmp_path / "repository").top1_agreement == 1.0
