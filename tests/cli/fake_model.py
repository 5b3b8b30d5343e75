"""Fake model: says the last message again in capitals, word by word."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Unpack

from genserve.cli.chat_session import ChatSession, Conversation
from genserve.cli.model_access import OpenedModel
from genserve.completion import Delta, FinishReason, Stream, Usage
from genserve.errors import InvalidRequest
from genserve.prompt import Message
from genserve.sampling.sampling_options import SamplingOptions
from genserve.sampling.sampling_params import sampling_params


class FakeDeltas:
    """One answer; after `forever` in it comes nothing more, and after `gated` the rest once GATE exists."""

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

    def stream(self, prompt: str, **options: Unpack[SamplingOptions]) -> Stream:
        return self.chat_stream([Message(role="user", content=prompt)], **options)

    def chat_stream(self, messages: Sequence[Message], **options: Unpack[SamplingOptions]) -> Stream:
        sampling_params(options)
        if "reject" in messages[-1].content:
            raise InvalidRequest("that is rejected", remedy="ask something else")
        self.asked.append(list(messages))
        self.options.append(options)
        self.streams.append(FakeDeltas(messages[-1].content))
        return Stream(self.streams[-1])


def chat_with(model: FakeModel, *, system: str | None = None) -> ChatSession:
    recommended = SamplingOptions(top_p=0.9)
    opened = OpenedModel(
        name="fake", max_length=2048, text_model=model, default_sampling_params=recommended
    )
    return ChatSession(
        opened, conversation=Conversation(system=system), options=SamplingOptions(temperature=0.5)
    )
