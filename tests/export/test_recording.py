"""The recorded run of the default model, from which it is exported without torch and transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from genserve.errors import ExportError
from genserve.export import CacheType, Precision, SilentProgress, export_model, exporter
from genserve.export.checkpoint_reader import read_checkpoint
from genserve.export.families import family_of
from genserve.export.known_models import SMOLLM2_FILE
from genserve.export.pulling import cache_folder, fetch_gguf
from genserve.export.reference import Recording, find_recording, text_ids
from genserve.files import file_sha256
from tests.support.slim_environment import slim_environment

SHIPPED = Path(exporter.__file__).parent / "recordings" / "smollm2.npz"

EXPORT = """
import sys
from pathlib import Path
from genserve.export import SilentProgress, export_model

source, repository, precision, kv_cache = sys.argv[1:]
export_model(
    source,
    repository=Path(repository),
    name="m",
    precision=precision,
    kv_cache=kv_cache,
    progress=SilentProgress(),
)
"""


@pytest.fixture(scope="module")
def gguf() -> Path:
    return fetch_gguf(cache_folder())


@pytest.fixture(scope="module")
def slim(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return slim_environment(tmp_path_factory.mktemp("slim"))


@pytest.mark.extended
def test_the_default_model_is_compared_with_its_recorded_source(smollm2_repository: Path) -> None:
    parity = json.loads((smollm2_repository / "smollm2_logits" / "1" / "parity.json").read_text())
    assert (parity["precision"], parity["tokens"]) == ("int8", 4 * (256 + 128))
    assert parity["top1_agreement"] == pytest.approx(0.955, abs=0.005)
    assert parity["divergence"] == pytest.approx(0.0075, abs=0.0005)


def test_the_recording_is_of_the_file_and_of_the_present_texts(gguf: Path) -> None:
    recording = find_recording(gguf)
    assert recording is not None
    ids = text_ids(read_checkpoint(gguf, source=SMOLLM2_FILE.name), context_length=8192)
    np.testing.assert_array_equal(recording.ids, ids.held_out)


def test_another_file_of_the_same_size_has_no_recording(tmp_path: Path) -> None:
    path = tmp_path / SMOLLM2_FILE.name
    with path.open("wb") as file:
        file.truncate(Recording.load(SHIPPED).size_bytes)
    assert find_recording(path) is None


def test_a_recording_keeps_20_bits_of_the_largest_number_of_a_channel(tmp_path: Path) -> None:
    hidden = np.random.default_rng(0).normal(size=(2, 5, 3)).astype(np.float32) * [1e-3, 1, 50]
    made = Recording(
        size_bytes=1,
        sha256="2",
        config={"hidden_act": "silu"},
        head="head",
        ids=np.arange(10).reshape(2, 5),
        hidden=hidden.astype(np.float32),
        activations={"norm": np.array([1.5, 2, 3], np.float32)},
    )
    made.save(tmp_path / "made.npz")
    found = Recording.load(tmp_path / "made.npz")
    steps = np.abs(hidden).max(axis=(0, 1)) / 2**20
    assert (np.abs(found.hidden - made.hidden) <= steps).all()
    assert (found.ids == made.ids).all()
    assert found.activations["norm"].tolist() == [1.5, 2, 3]
    assert found.completed_config().hidden_act == "silu"


@pytest.mark.parametrize("path", sorted(SHIPPED.parent.glob("*.npz")), ids=lambda path: path.stem)
def test_a_recorded_config_describes_its_model(path: Path) -> None:
    recording = Recording.load(path)
    family = family_of(recording.config)
    assert family is not None
    decoder = family.described(recording.completed_config())
    assert {attention.window for attention in decoder.attentions} >= {recording.config.get("sliding_window")}


@pytest.mark.parametrize(
    "source",
    [
        "Some-Org/Tiny-Llama",
        *(pytest.param(name, marks=pytest.mark.extended) for name in ("folder", "other.gguf")),
    ],
)
def test_other_sources_need_the_extra_and_say_so_before_anything_is_read(
    slim: dict[str, str], tmp_path: Path, source: str
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "config.json").touch()
    (tmp_path / "other.gguf").touch()
    command = [sys.executable, "-m", "genserve", "export", source, "--name", "m"]
    done = subprocess.run(command, env=slim, cwd=tmp_path, capture_output=True, text=True, check=False)
    name = Path(source).name if source != "Some-Org/Tiny-Llama" else source
    assert f"exporting {name} needs onnxscript, safetensors, torch, transformers" in done.stderr
    assert "pip install 'genserve[export]'" in done.stderr
    assert done.returncode == 1


@pytest.mark.slow
def test_the_recording_is_what_transformers_computes(gguf: Path) -> None:
    from scripts.record_source import record

    shipped, made = Recording.load(SHIPPED), record(gguf)
    assert (shipped.sha256, shipped.size_bytes) == (file_sha256(gguf), gguf.stat().st_size)
    assert (shipped.ids == made.ids).all()
    np.testing.assert_allclose(shipped.hidden, made.hidden, atol=1e-3)
    assert shipped.activations.keys() == made.activations.keys()
    for role, activation in made.activations.items():
        np.testing.assert_allclose(shipped.activations[role], activation, rtol=1e-3)
    unversioned = [json.loads(json.dumps(config)) for config in (shipped.config, made.config)]
    for config in unversioned:
        del config["transformers_version"]
    assert unversioned[0] == unversioned[1]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("precision", "kv_cache"), [("int8", "int8"), ("int4", "float"), ("fp16", "float"), ("fp32", "float")]
)
def test_the_files_and_the_parity_are_those_of_an_export_with_transformers(
    gguf: Path,
    slim: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    precision: Precision,
    kv_cache: CacheType,
) -> None:
    recorded, run = tmp_path / "recorded", tmp_path / "run"
    arguments = [str(gguf), str(recorded), precision, kv_cache]
    subprocess.run([sys.executable, "-c", EXPORT, *arguments], env=slim, check=True)
    none: Callable[[Path], None] = lambda _path: None  # noqa: E731
    monkeypatch.setattr("genserve.export.reference.find_recording", none)
    export_model(
        str(gguf), repository=run, name="m", precision=precision, kv_cache=kv_cache, progress=SilentProgress()
    )
    for name in ("model.onnx", "model.onnx.data"):
        assert file_sha256(recorded / "m_logits/1" / name) == file_sha256(run / "m_logits/1" / name), name
    found, expected = (
        json.loads((folder / "m_logits/1/parity.json").read_text()) for folder in (recorded, run)
    )
    for name in ("largest_logit_difference", "top1_agreement", "perplexity_ratio", "divergence"):
        assert found[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-4), name


@pytest.mark.parametrize("keeps", [0, 1000, 1_000_000])
def test_a_damaged_recording_is_an_error_with_a_remedy(tmp_path: Path, keeps: int) -> None:
    damaged = tmp_path / "smollm2.npz"
    damaged.write_bytes(SHIPPED.read_bytes()[:keeps])
    with pytest.raises(ExportError, match=r"smollm2\.npz is damaged"):
        Recording.load(damaged)


def test_a_changed_recording_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    content = bytearray(SHIPPED.read_bytes())
    content[len(content) // 2] ^= 0xFF
    (damaged := tmp_path / "smollm2.npz").write_bytes(content)
    with pytest.raises(ExportError, match=r"smollm2\.npz is damaged"):
        Recording.load(damaged)
