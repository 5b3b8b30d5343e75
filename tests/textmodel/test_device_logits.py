"""A text model whose logits are torch tensors of a device, here the CPU; the code is that for a GPU."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from genserve.repository.repository import Repository
from genserve.textmodel import logits_runtime
from genserve.textmodel.runtimes.kv_cache_memory import DeviceMemory
from tests.textmodel.test_text_inference import BLS_LOOP, LOOP_CONFIG, asked, of, text

OWN_LOOP = """
class TritonPythonModel:
    async def decode(self, sequence):
        while not sequence.finished:
            logits = await sequence.logits()
            logits[: logits.shape[0] // 2] = -float("inf")
            sequence.append(int(logits.argmax()))
"""


@pytest.fixture(scope="module")
def models(tiny_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("device") / "models"
    shutil.copytree(tiny_repository, root)
    (root / "loop" / "1").mkdir(parents=True)
    (root / "loop" / "config.pbtxt").write_text(LOOP_CONFIG)
    (root / "loop" / "1" / "model.py").write_text(BLS_LOOP)
    return root


def started(root: Path) -> Iterator[Repository]:
    repository = Repository([root])
    repository.start()
    assert repository.errors == {}
    yield repository
    repository.close()


@pytest.fixture(scope="module")
def on_host(models: Path) -> Iterator[Repository]:
    yield from started(models)


@pytest.fixture(scope="module")
def on_device(models: Path) -> Iterator[Repository]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logits_runtime, "_memory", lambda _: DeviceMemory("cpu"))
        yield from started(models)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": np.array([[1.3]], np.float32)},
        {"temperature": np.array([[0.8]], np.float32), "top_p": np.array([[0.9]], np.float32)},
        {"temperature": np.array([[2.0]], np.float32), "top_k": np.array([[5]], np.int32)},
        {
            "repetition_penalty": np.array([[1.3]], np.float32),
            "presence_penalty": np.array([[0.5]], np.float32),
            "bad_words": np.array([[b"ep", b"a"]], dtype=object),
        },
    ],
)
def test_the_text_is_that_of_the_host(on_host: Repository, on_device: Repository, options: dict) -> None:
    request = {
        "text_input": text("hello"),
        "max_tokens": np.array([[24]], np.int32),
        "random_seed": np.array([[7]], np.uint64),
    }
    [expected] = asked(on_host, "tiny", **request, **options)
    [answer] = asked(on_device, "tiny", **request, **options)
    assert of(answer, "text_output").tolist() == of(expected, "text_output").tolist()


def test_the_logits_stage_answers_with_tensors_of_the_device(
    on_host: Repository, on_device: Repository
) -> None:
    for ids in ([[5, 6, 7]], [[5, 6, 7, 8], [9, 8, 7, 6]]):
        rows = np.array(ids, dtype=np.int64)
        [expected] = asked(on_host, "tiny_logits", input_ids=rows)
        [answer] = asked(on_device, "tiny_logits", input_ids=rows)
        output = answer.output("logits")
        assert output is not None
        assert isinstance(output.data, torch.Tensor)
        np.testing.assert_allclose(output.array, of(expected, "logits"), atol=1e-5)


def test_a_plain_loop_gets_the_same_logits(on_host: Repository, on_device: Repository) -> None:
    prompt = np.array([[3, 4, 5]], dtype=np.int64)
    [expected] = asked(on_host, "loop", input_ids=prompt)
    [answer] = asked(on_device, "loop", input_ids=prompt)
    assert of(answer, "output_ids").tolist() == of(expected, "output_ids").tolist()


def test_a_custom_decoding_loop_reads_arrays_and_tensors(tiny_repository: Path, tmp_path: Path) -> None:
    answers = []
    for name, memory in (("host", logits_runtime.HostMemory), ("device", lambda: DeviceMemory("cpu"))):
        shutil.copytree(tiny_repository, tmp_path / name)
        (tmp_path / name / "tiny_decoder" / "1" / "model.py").write_text(OWN_LOOP)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(logits_runtime, "_memory", lambda _, memory=memory: memory())
            for repository in started(tmp_path / name):
                request = {"text_input": text("hello"), "max_tokens": np.array([[8]], np.int32)}
                [answer] = asked(repository, "tiny", **request)
                answers.append(of(answer, "text_output").tolist())
    assert answers[0] == answers[1]
