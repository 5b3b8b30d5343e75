"""A real model whose prefix cache is on disk."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from genserve.completion import join_deltas
from genserve.deploy.replica.description import describe, identity_of
from genserve.engine.delta_streams import DeltaStream
from genserve.engine.disk_cache import PrefixCacheFolder
from genserve.errors import GenserveError
from genserve.generation_metrics import Metrics
from genserve.repository.options import RepositoryOptions
from genserve.repository.repository import Repository
from genserve.sampling.sampling_params import SamplingParams
from genserve.textmodel.logits_config import version_files
from genserve.textmodel.logits_runtime import load_logits

PROMPT = [3 + 7 * index % 250 for index in range(100)]


class Model:
    def __init__(self, repository: Repository) -> None:
        self.repository = repository
        self.text_model = repository.text_model("tiny")

    def answer(self, *, num_tokens: int = 8) -> tuple[list[int], list[float]]:
        """The answer to a prompt, and its log-probabilities to the bit."""
        params = SamplingParams(max_tokens=num_tokens, temperature=0.0, logprobs=True, ignore_eos=True)
        with DeltaStream(self.text_model.engine, self.text_model.prepare(PROMPT, params)) as stream:
            joined = join_deltas(stream)
        self.num_cached = joined.usage.cached_tokens
        return list(joined.token_ids), list(joined.logprobs)


@contextmanager
def served(repository: Path, folder: Path | None) -> Iterator[Model]:
    options = RepositoryOptions(
        prefix_cache_folder=None if folder is None else PrefixCacheFolder(path=folder, max_bytes=64 << 20)
    )
    served = Repository([repository], options=options, metrics=Metrics())
    served.start(["tiny"])
    try:
        yield Model(served)
    finally:
        served.close()


@pytest.fixture
def repository(tiny_repository, tmp_path) -> Path:
    """A copy that a test may change."""
    return shutil.copytree(tiny_repository, tmp_path / "repository")


@pytest.fixture(scope="module")
def expected(tiny_repository) -> tuple[list[int], list[float]]:
    with served(tiny_repository, None) as model:
        return model.answer()


def fingerprints(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def test_an_answer_after_a_restart_has_the_same_bits(tiny_repository, tmp_path, expected):
    for num_cached in (0, 96):
        with served(tiny_repository, tmp_path) as model:
            assert model.answer() == expected
            assert model.num_cached == num_cached
    assert len(fingerprints(tmp_path)) == 1


def test_a_model_with_states_continues_after_a_restart_with_the_same_bits(hybrid_repository, tmp_path):
    with served(hybrid_repository, None) as model:
        expected = model.answer()
    for num_cached in (0, 96):
        with served(hybrid_repository, tmp_path) as model:
            assert model.answer() == expected
            assert model.num_cached == num_cached


def test_other_kernels_of_the_same_build_read_the_blocks(tiny_repository, tmp_path, expected, monkeypatch):
    with served(tiny_repository, tmp_path) as model:
        model.answer()
    monkeypatch.setenv("GENSERVE_KERNELS", "portable")
    with served(tiny_repository, tmp_path) as model:
        assert model.answer() == expected
        assert model.num_cached == 96


def test_a_changed_model_has_a_folder_of_its_own(repository, tmp_path, expected):
    folder = tmp_path / "blocks"
    with served(repository, folder) as model:
        assert model.answer() == expected
    [weights] = (repository / "tiny_logits" / "1").glob("*.data")
    changed = bytearray(weights.read_bytes())
    changed[-2] ^= 1  # of the last float
    weights.write_bytes(changed)
    with served(repository, folder) as model:
        model.answer()
        assert model.num_cached == 0
    assert len(fingerprints(folder)) == 2


def test_a_model_whose_files_change_while_it_loads_writes_nothing(repository, tmp_path, monkeypatch, caplog):
    """Its blocks would be taken for those of the new files."""
    [weights] = (repository / "tiny_logits" / "1").glob("*.data")

    def load_and_change(*args: Any, **options: Any) -> Any:
        loaded = load_logits(*args, **options)
        content = weights.read_bytes()
        weights.unlink()  # the old ones are mapped
        weights.write_bytes(content[64:] + content[:64])
        return loaded

    with monkeypatch.context() as copying:
        copying.setattr("genserve.textmodel.text_model_loader.load_logits", load_and_change)
        with served(repository, tmp_path / "blocks") as model:
            model.answer()
    assert "its files changed while it was loaded" in caplog.text
    with served(repository, tmp_path / "blocks") as model:
        model.answer()
        assert model.num_cached == 0


def test_another_graph_in_the_same_folder_has_a_folder_of_its_own(repository, tmp_path, expected):
    version, folder = repository / "tiny_logits" / "1", tmp_path / "blocks"
    for file in [*version.glob("model.onnx*")]:
        content = file.read_bytes().replace(b"model.onnx.data", b"other.onnx.data")
        if file.suffix == ".data":
            content = content[64:] + content[:64]
        (version / file.name.replace("model", "other")).write_bytes(content)
    with served(repository, folder) as model:
        assert model.answer() == expected
    config = repository / "tiny_logits" / "config.pbtxt"
    config.write_text(config.read_text() + '\ndefault_model_filename: "other.onnx"\n')
    with served(repository, folder) as model:
        assert model.answer() != expected
        assert model.num_cached == 0
    assert len(fingerprints(folder)) == 2


@pytest.mark.extended
def test_a_model_that_needs_no_kernels_loads_without_them(traced_repository, tmp_path, monkeypatch):
    def not_built() -> str:
        raise GenserveError("genserve's kernels are not built")

    monkeypatch.setattr("genserve.textmodel.disk_prefixes.build_sha256", not_built)
    options = RepositoryOptions(prefix_cache_folder=PrefixCacheFolder(path=tmp_path, max_bytes=64 << 20))
    served = Repository([traced_repository], options=options, metrics=Metrics())
    try:
        served.start(["traced"])
        assert not served.errors
    finally:
        served.close()


def test_a_model_without_a_prefix_cache_writes_nothing(repository, tmp_path):
    config = repository / "tiny_logits" / "config.pbtxt"
    config.write_text(
        config.read_text() + '\nparameters { key: "prefix_cache" value { string_value: "false" } }\n'
    )
    with served(repository, tmp_path / "blocks") as model:
        model.answer()
    assert not (tmp_path / "blocks").exists()


def test_prefixes_in_the_repository_are_read(repository, tmp_path, expected, caplog):
    prefixes = repository / "tiny_logits" / "1" / "prefixes"
    with served(repository, prefixes) as model:
        model.answer()
    caplog.clear()
    with served(repository, None) as model:
        assert model.answer() == expected
        assert model.num_cached == 96
    assert "is ignored" not in caplog.text
    with served(repository, tmp_path / "blocks") as model:
        assert model.answer() == expected
        assert model.num_cached == 96


def test_prefixes_change_neither_the_size_nor_the_identity_of_a_model(tiny_repository, tmp_path):
    def facts(*, with_prefixes: bool) -> tuple[object, ...]:
        repository = shutil.copytree(tiny_repository, tmp_path / "prefixes" / str(with_prefixes))
        if with_prefixes:
            (repository / "tiny_logits" / "1" / "prefixes" / ("0" * 32)).mkdir(parents=True)
            (repository / "tiny_logits" / "1" / "prefixes" / ("0" * 32) / f"{'1' * 64}.kv").write_text("x")
        with served(repository, None) as model:
            [size] = (p.stat().st_size for p in repository.rglob("tiny_logits/1/*.data"))
            assert model.text_model.weights_bytes > size
            return model.text_model.weights_bytes, identity_of(describe(model.repository))

    assert facts(with_prefixes=False) == facts(with_prefixes=True)


def test_all_but_hidden_files_bytecode_and_blocks_are_files_of_a_version(tmp_path):
    names = ["a.py", "prefixes/__init__.py", "sub/prefixes/a.kv", "prefixes/a/b.kv", ".a", "__pycache__/a"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    assert [path.relative_to(tmp_path).as_posix() for path in version_files(tmp_path)] == names[:3]


def test_prefixes_of_another_graph_are_ignored_with_a_warning(repository, expected, caplog):
    (repository / "tiny_logits" / "1" / "prefixes" / ("0" * 32)).mkdir(parents=True)
    with served(repository, None) as model:
        assert model.answer() == expected
    assert "run `genserve cache build tiny` again" in caplog.text
