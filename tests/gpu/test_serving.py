"""A text model on a GPU, from its config to its text."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from genserve.completion import Completion
from genserve.export.checkpoint_reader import read_checkpoint
from genserve.export.pulling import cache_folder, fetch_gguf
from genserve.export.source_model import source_model
from genserve.llm import LLM
from genserve.repository import config_resolution
from genserve.repository.options import RepositoryOptions
from genserve.repository.repository import Repository
from genserve.textmodel import logits_runtime
from genserve.textmodel.runtimes.kv_cache_memory import DeviceMemory
from tests.textmodel.test_text_inference import BLS_LOOP, LOOP_CONFIG, asked, greedy_ids, of, text

ON_GPU = "instance_group [ { kind: KIND_GPU gpus: [ 0 ] } ]\n"
NEAR = 0.1  # a difference of the default model's logits that may be a tie in float16


@pytest.fixture(autouse=True, scope="module")
def on_device(device: str) -> Iterator[None]:
    """Pretend that there is a GPU, where the tests are tried on the CPU."""
    with pytest.MonkeyPatch.context() as patch:
        if device == "cpu":
            patch.setattr(config_resolution, "num_gpus", lambda: 1)
            patch.setattr(config_resolution, "gpu_obstacle", lambda *_: None)
            patch.setattr(logits_runtime, "_memory", lambda _: DeviceMemory("cpu"))
        yield


def placed(repository: Path, root: Path, *, extra: str = "") -> Path:
    """Copy a repository, its logits stage to be on the first GPU."""
    shutil.copytree(repository, root)
    for config in root.glob("*_logits/config.pbtxt"):
        config.write_text(config.read_text() + ON_GPU + extra)
    return root


@pytest.fixture(scope="module")
def repository(half_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Repository]:
    root = placed(half_repository, tmp_path_factory.mktemp("gpu") / "models")
    (root / "loop" / "1").mkdir(parents=True)
    (root / "loop" / "config.pbtxt").write_text(LOOP_CONFIG)
    (root / "loop" / "1" / "model.py").write_text(BLS_LOOP)
    repository = Repository([root], options=RepositoryOptions(strict_placement=True))
    repository.start()
    assert repository.errors == {}
    yield repository
    repository.close()


def test_the_logits_stage_answers_on_the_gpu_that_its_config_names(repository, device):
    [answer] = asked(repository, "tiny_logits", input_ids=np.array([[5, 6, 7]], dtype=np.int64))
    assert answer.output("logits").data.device == torch.device(device)
    assert of(answer, "logits").shape == (1, 1, 320)


def test_a_loop_of_logits_requests_gets_the_text_of_the_engine(repository):
    [answer] = asked(repository, "loop", input_ids=np.array([[3, 4, 5, 6]], dtype=np.int64))
    assert of(answer, "output_ids").tolist() == greedy_ids(repository, [3, 4, 5, 6], count=12)


def test_sampled_tokens_do_not_depend_on_the_batch(repository):
    request = {
        "max_tokens": np.array([[16]], np.int32),
        "temperature": np.array([[0.9]], np.float32),
        "top_p": np.array([[0.9]], np.float32),
        "random_seed": np.array([[7]], np.uint64),
    }
    [first] = asked(repository, "tiny", text_input=text("hello"), **request)
    [again] = asked(repository, "tiny", text_input=text("hello"), **request)
    assert of(first, "text_output").tolist() == of(again, "text_output").tolist()


def test_the_cache_has_the_blocks_that_fit_into_its_budget(half_repository, tmp_path):
    extra = 'parameters [ { key: "kv_cache_bytes" value: { string_value: "1MiB" } } ]\n'
    repository = Repository([placed(half_repository, tmp_path / "models", extra=extra)])
    repository.start()
    ensemble = repository.text_model("tiny")
    assert 0 < ensemble.kv_cache_bytes <= 2**20
    repository.close()


@pytest.fixture(scope="module")
def smollm2(half_smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    models = placed(half_smollm2, tmp_path_factory.mktemp("gpu_smollm2") / "models")
    with LLM("smollm2", model_repository=models) as llm:
        yield llm


@pytest.fixture(scope="module")
def source(device: str) -> PreTrainedModel:
    return source_model(read_checkpoint(fetch_gguf(cache_folder()), source="smollm2")).half().to(device)


PROMPTS = ["The capital of France is", "def fibonacci(n):", "Once upon a time, in a village by the sea,"]


@pytest.mark.timeout(900)  # the first of them exports the model
def test_the_default_model_chooses_the_best_tokens_of_transformers(smollm2, source):
    texts: dict[str, Completion] = {}

    def ask(prompt: str) -> None:
        texts[prompt] = smollm2.generate(prompt, max_tokens=48, temperature=0.0, ignore_eos=True)

    threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in PROMPTS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for prompt, answer in texts.items():
        ids = [*smollm2._model.tokenizer.encode(prompt), *answer.token_ids]
        with torch.inference_mode():
            logits = source(torch.tensor([ids], device=source.device)).logits[0, -49:-1].float()
        picked = logits.gather(1, torch.tensor(answer.token_ids, device=source.device)[:, None])[:, 0]
        assert (logits.amax(1) - picked).max() < NEAR


@pytest.mark.timeout(900)
def test_a_cached_prompt_is_not_computed_again_and_gets_the_same_answer(smollm2):
    prompt = "The river runs through the valley, past the mill and the old church. " * 20
    first, second = (smollm2.generate(prompt, max_tokens=16, temperature=0.0) for _ in range(2))
    assert second.usage.cached_tokens > 200
    assert second.text == first.text
