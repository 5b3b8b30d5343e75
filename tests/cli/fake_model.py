"""Fake model: says the last message again in capitals, word by word."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Unpack

from genserve.cli.chat_session import ChatSession
from genserve.cli.conversation import Conversation
from genserve.cli.model_access import ModelSwitch, OpenedModel
from genserve.completion import Delta, FinishReason, Stream, Usage
from genserve.errors import ContextLengthExceeded, InvalidRequest, ModelNotFound
from genserve.prompt import Message
from genserve.sampling.sampling_options import SamplingOptions
from genserve.sampling.sampling_params import sampling_params


class FakeDeltas:
    """One answer. `silent` is never said, and `forever` the last word; after `gated` it waits for GATE."""

    gate = Path(os.environ.get("GATE", "/nowhere"))

    def __init__(self, question: str) -> None:
        self.is_closed = False
        self._deltas = self._answer(question.upper().split())

    def __next__(self) -> Delta:
        return next(self._deltas)

    def close(self) -> None:
        self.is_closed = True

    def _answer(self, words: list[str]) -> Iterator[Delta]:
        for index, word in enumerate(words):
            if word == "SILENT":
                threading.Event().wait()
            yield Delta(text=word if index == 0 else f" {word}", token_ids=(index,))
            if word == "FOREVER":
                threading.Event().wait()
            while word == "GATED" and not self.gate.exists():
                time.sleep(0.01)
        yield Delta(
            text="",
            token_ids=(99,),
            finish_reason=FinishReason.END_OF_SEQUENCE,
            usage=Usage(prompt_tokens=10, completion_tokens=len(words) + 1),
        )


class FakeModel:
    """Remembers what it was asked; rejects a question with the word `reject`."""

    def __init__(self) -> None:
        self.asked: list[list[Message]] = []
        self.options: list[SamplingOptions] = []
        self.streams: list[FakeDeltas] = []
        self.room = 2048    # tokens that the context has left

    def stream(self, prompt: str, **options: Unpack[SamplingOptions]) -> Stream:
        return self.chat_stream([Message(role="user", content=prompt)], **options)

    def chat_stream(self, messages: Sequence[Message], **options: Unpack[SamplingOptions]) -> Stream:
        sampling_params(options)
        if "reject" in messages[-1].content:
            raise InvalidRequest("that is rejected", remedy="ask something else")
        if self.room < max(1, options.get("max_tokens") or 0):
            field = "max_tokens" if self.room else "messages"
            raise ContextLengthExceeded(f"there is room for {self.room} tokens", field=field)
        self.asked.append(list(messages))
        self.options.append(options)
        self.streams.append(FakeDeltas(messages[-1].content))
        return Stream(self.streams[-1])


def chat_with(model: FakeModel, *, system: str | None = None) -> ChatSession:
    recommended = SamplingOptions(top_p=0.9)

    @contextmanager
    def open_fake(name: str | None) -> Iterator[OpenedModel]:
        if name not in (None, "fake", "other"):
            raise ModelNotFound(f"there is no model {name!r}", remedy="models: fake, other")
        yield OpenedModel(
            name=name or "fake", max_length=2048, text_model=model, default_sampling_params=recommended
        )

    return ChatSession(
        ModelSwitch(open_fake, names=lambda: ["fake", "other"]),
        model=None,
        conversation=Conversation(system=system),
        initial_options=lambda opened: SamplingOptions(temperature=0.5 if opened.name == "fake" else 0.8),
    )
