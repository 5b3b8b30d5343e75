"""The tokenizer stage as a model of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

import pytest

from genserve.inference import Inference, InferenceRequest
from genserve.repository.options import ControlMode, RepositoryOptions
from genserve.repository.repository import Repository
from genserve.tensor import string_tensor
from genserve.text import chat_template
from tests.support.live_server import children


def test_no_chat_template_process_is_left(tiny_repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "_TRAITS", {})  # or the load would start none
    before = children()
    repository = Repository([tiny_repository], options=RepositoryOptions(control_mode=ControlMode.EXPLICIT))
    repository.start(["tiny_tokenizer"])
    assert children() - before
    repository.close()
    assert not children() - before


def test_only_short_texts_are_encoded_on_the_thread_that_submits_them(tiny_repository: Path) -> None:
    repository = Repository([tiny_repository], options=RepositoryOptions(control_mode=ControlMode.EXPLICIT))
    repository.start(["tiny_tokenizer"])
    short, long = _encoding_threads(repository, "sea"), _encoding_threads(repository, "sea " * 1000)
    deadline = time.monotonic() + 30
    while next(short) is not threading.current_thread():  # its instance may not sleep yet
        assert time.monotonic() < deadline
    assert all(next(long) is not threading.current_thread() for _ in range(5))
    repository.close()


def _encoding_threads(repository: Repository, text: str) -> Iterator[threading.Thread]:
    """Encode a text again and again; yield the thread that did it."""
    while True:
        answered: SimpleQueue[threading.Thread] = SimpleQueue()
        texts = string_tensor("text_input", [text], shape=(1, 1))
        request = InferenceRequest(model_name="tiny_tokenizer", inputs={"text_input": texts})

        def on_response(response, final, answered=answered):
            assert response.error is None
            answered.put(threading.current_thread())

        repository.submit(Inference(request=request, on_response=on_response))
        yield answered.get(timeout=30)
