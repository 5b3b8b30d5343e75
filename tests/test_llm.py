from __future__ import annotations

import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from genserve import LLM
from genserve.completion import FinishReason
from genserve.errors import (
    Closed,
    ContextLengthExceeded,
    GenserveError,
    InvalidRequest,
    ModelNotFound,
    RepositoryError,
)
from genserve.text import chat_template
from tests.support.live_server import children


@pytest.fixture(scope="module")
def llm(tiny_repository):
    with LLM(model_repository=tiny_repository) as llm:
        yield llm


@pytest.fixture(scope="module")
def closed_llm(tiny_repository):
    llm = LLM(model_repository=tiny_repository)
    llm.close()
    return llm


def test_a_stream_joins_to_the_whole_answer(llm):
    whole = llm.generate("hello there", max_tokens=12, ignore_eos=True)
    with llm.stream("hello there", max_tokens=12, ignore_eos=True) as stream:
        assert "".join(stream.text_stream) == whole.text
        assert stream.final() == whole
    assert whole.finish_reason is FinishReason.LENGTH
    assert whole.usage.completion_tokens == 12


def test_the_context_is_as_long_as_asked_for(tiny_repository, caplog):
    with LLM(model_repository=tiny_repository, max_model_len="64") as llm:
        assert llm.max_length == 64
        assert llm.generate("!" * 60, max_tokens=100, ignore_eos=True).usage.completion_tokens == 4
        with pytest.raises(ContextLengthExceeded) as raised:
            llm.generate("!" * 64)
        assert "--max-model-len" in raised.value.remedy
        [line] = [record.message for record in caplog.records if record.levelname == "WARNING"]
        assert all(part in line for part in ("64", "--max-model-len", "256"))
        with pytest.raises(ContextLengthExceeded):  # the model itself could not take it either
            llm.generate("!" * 300)
        assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1
    with pytest.raises(InvalidRequest) as invalid:
        LLM(model_repository=tiny_repository, max_model_len="much")
    assert invalid.value.field == "max_model_len"
    with pytest.raises(GenserveError, match="257"):
        LLM(model_repository=tiny_repository, max_model_len=257)


def test_a_text_alone_is_one_turn_of_the_user(llm):
    turn = [{"role": "user", "content": "hi"}]
    assert llm.chat("hi", max_tokens=8) == llm.chat(turn, max_tokens=8)


def test_a_stream_left_early_frees_its_blocks(llm):
    with llm.chat_stream("hi", max_tokens=200, ignore_eos=True) as stream:
        next(stream)
    while llm._model.engine.num_accepted:
        pass


def test_a_misspelt_option_is_rejected_with_the_nearest(llm):
    with pytest.raises(InvalidRequest) as caught:
        llm.generate("hi", max_tokns=3)
    assert (caught.value.field, caught.value.remedy) == ("max_tokns", "did you mean max_tokens?")


def test_a_list_of_prompts_is_not_one_prompt(llm):
    with pytest.raises(InvalidRequest) as caught:
        llm.generate(["hi", "there"])
    assert (caught.value.field, "complete" in caught.value.remedy) == ("prompt", True)


def test_a_model_that_does_not_generate_text_is_not_left_loaded(tiny_repository):
    before = threading.active_count()
    with pytest.raises(ModelNotFound, match="does not generate text"):
        LLM("tiny_logits", model_repository=tiny_repository)
    assert threading.active_count() == before


def test_a_missing_model_or_repository_is_named(tiny_repository, tmp_path):
    with pytest.raises(ModelNotFound, match="tiny"):
        LLM("nobody", model_repository=tiny_repository)
    with pytest.raises(RepositoryError, match="genserve pull"):
        LLM(model_repository=tmp_path / "none")


@pytest.mark.parametrize("method", ["generate", "stream", "chat", "chat_stream", "complete"])
def test_after_close_every_call_raises_closed(closed_llm, method):
    with pytest.raises(Closed, match=r"LLM\(model\)"):
        getattr(closed_llm, method)("hi")


def test_a_closed_llm_can_be_closed_again_and_not_entered(closed_llm):
    closed_llm.close()
    with pytest.raises(Closed), closed_llm:
        pass


@pytest.mark.parametrize("method", ["generate", "stream", "chat", "chat_stream", "complete"])
def test_an_invalid_request_to_a_closed_llm_raises_closed(closed_llm, method):
    for prompt, options in (("", {}), ([], {}), ("hi", {"max_tokens": -1}), ("hi", {"max_tokns": 1})):
        with pytest.raises(Closed):
            getattr(closed_llm, method)(prompt, **options)


SLOW_LOOP = """
import time

class TritonPythonModel:
    async def decode(self, sequence):
        while not sequence.finished:
            sequence.append(await sequence.sample())
            time.sleep(0.02)    # so that an answer takes longer than what a test does meanwhile
"""


def test_a_stream_raises_closed_after_its_last_delta_when_the_llm_closes(tiny_repository, tmp_path):
    repository = shutil.copytree(tiny_repository, tmp_path / "repository")
    (repository / "tiny_decoder" / "1" / "model.py").write_text(SLOW_LOOP)
    llm = LLM(model_repository=repository)
    stream = llm.stream("hi", max_tokens=200, ignore_eos=True)
    next(stream)
    llm.close()
    with pytest.raises(Closed, match="this LLM was closed before the answer was complete"):
        for _ in stream:
            pass
    stream.close()


def test_a_call_of_another_thread_raises_closed_when_the_llm_closes(tiny_repository):
    llm = LLM(model_repository=tiny_repository)
    with ThreadPoolExecutor() as pool:
        # More tokens than the tiny model makes before `close` comes; then Closed is all that can end it.
        running = pool.submit(llm.complete, ["hi"] * 8, n=8, max_tokens=200, ignore_eos=True)
        while not llm._model.engine.num_accepted:
            pass
        llm.close()
        with pytest.raises(Closed, match=r"LLM\(model\)"):
            running.result(timeout=60)


def test_close_leaves_no_process(tiny_repository):
    before = children()
    llm = LLM(model_repository=tiny_repository)
    llm.chat("hi", max_tokens=1)
    assert children() - before, "one renders the chats"
    llm.close()
    assert not children() - before
    with pytest.raises(Closed):
        llm.chat("hi", max_tokens=1)
    assert not children() - before


def test_a_failed_load_leaves_no_process(tiny_repository, tmp_path, monkeypatch):
    monkeypatch.setattr(chat_template, "_TRAITS", {})  # or it would start none
    repository = shutil.copytree(tiny_repository, tmp_path / "repository")
    (repository / "tiny_logits" / "1" / "model.onnx").write_bytes(b"nothing")
    before = children()
    with pytest.raises(GenserveError) as raised:
        LLM(model_repository=repository)
    assert not children() - before, raised


def test_with_several_models_a_name_is_required_before_loading(tiny_repository, tmp_path):
    repository = shutil.copytree(tiny_repository, tmp_path / "repository")
    shutil.copytree(repository / "tiny", repository / "other")
    config = repository / "other" / "config.pbtxt"
    config.write_text(config.read_text().replace('name: "tiny"', 'name: "other"'))
    before = threading.active_count()
    with pytest.raises(ModelNotFound, match="other, tiny"):
        LLM(model_repository=repository)
    assert threading.active_count() == before
