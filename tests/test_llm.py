from __future__ import annotations

import shutil
import threading

import pytest

from genserve import LLM
from genserve.errors import Closed, InvalidRequest, ModelNotFound, RepositoryError
from genserve.request import FinishReason


@pytest.fixture(scope="module")
def llm(tiny_repository):
    with LLM(tiny_repository) as llm:
        yield llm


def test_a_stream_joins_to_the_whole_answer(llm):
    whole = llm.generate("hello there", max_tokens=12, ignore_eos=True)
    with llm.stream("hello there", max_tokens=12, ignore_eos=True) as stream:
        assert "".join(stream.text_stream) == whole.text
        assert stream.final() == whole
    assert whole.finish_reason is FinishReason.LENGTH
    assert whole.usage.completion_tokens == 12


def test_a_text_alone_is_one_turn_of_the_user(llm):
    turn = [{"role": "user", "content": "hi"}]
    assert llm.chat("hi", max_tokens=8) == llm.chat(turn, max_tokens=8)


def test_a_stream_left_early_frees_its_slot(llm):
    with llm.chat_stream("hi", max_tokens=200, ignore_eos=True) as stream:
        next(stream)
    while llm._model.loop.num_accepted:
        pass


def test_a_misspelt_option_is_refused_with_the_nearest(llm):
    with pytest.raises(InvalidRequest, match="max_tokens"):
        llm.generate("hi", max_tokns=3)


def test_a_model_that_does_not_generate_text_is_not_left_loaded(tiny_repository):
    before = threading.active_count()
    with pytest.raises(ModelNotFound, match="does not generate text"):
        LLM(tiny_repository, "tiny_logits")
    assert threading.active_count() == before


def test_what_is_not_there_is_named(tiny_repository, tmp_path):
    with pytest.raises(ModelNotFound, match="tiny"):
        LLM(tiny_repository, "nobody")
    with pytest.raises(RepositoryError, match="genserve pull"):
        LLM(tmp_path / "none")


def test_after_close_it_says_so(tiny_repository):
    llm = LLM(tiny_repository)
    llm.close()
    llm.close()
    with pytest.raises(Closed):
        llm.generate("hi")


def test_of_several_models_one_must_be_named_and_nothing_is_loaded(tiny_repository, tmp_path):
    repository = shutil.copytree(tiny_repository, tmp_path / "repository")
    shutil.copytree(repository / "tiny", repository / "other")
    config = repository / "other" / "config.pbtxt"
    config.write_text(config.read_text().replace('name: "tiny"', 'name: "other"'))
    before = threading.active_count()
    with pytest.raises(ModelNotFound, match="other, tiny"):
        LLM(repository)
    assert threading.active_count() == before
