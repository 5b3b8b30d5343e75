"""Fake model: says the last message again in capitals, word by word."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Unpack

from genserve.cli.chat_session import ChatSession
from genserve.cli.conversation import Conversation
from genserve.cli.model_access import OpenedModel
from genserve.errors import InvalidRequest
from genserve.request import (
    Completion,
    Delta,
    FinishReason,
    Message,
    SamplingOptions,
    Usage,
    join_deltas,
    sampling_params,
)


class FakeStream:
    """One answer; a question with the word `forever` gets its first word and then nothing."""

    def __init__(self, question: str) -> None:
        self.is_closed = False
        self._words = question.upper().split()

    def final(self) -> Completion:
        return join_deltas(self)

    def __iter__(self) -> Iterator[Delta]:
        for index, word in enumerate(self._words):
            yield Delta(text=word if index == 0 else f" {word}", token_ids=(index,))
            if "FOREVER" in self._words:
                threading.Event().wait()
        yield Delta(
            text="",
            token_ids=(99,),
            finish_reason=FinishReason.END_OF_SEQUENCE,
            usage=Usage(prompt_tokens=10, completion_tokens=len(self._words) + 1),
        )

    def __enter__(self) -> FakeStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.is_closed = True


class FakeModel:
    """Remembers what it was asked; refuses a question with the word `refuse`."""

    def __init__(self) -> None:
        self.asked: list[list[Message]] = []
        self.options: list[SamplingOptions] = []
        self.streams: list[FakeStream] = []

    def stream(self, prompt: str, **options: Unpack[SamplingOptions]) -> FakeStream:
        return self.chat_stream([Message(role="user", content=prompt)], **options)

    def chat_stream(self, messages: Sequence[Message], **options: Unpack[SamplingOptions]) -> FakeStream:
        sampling_params(options)
        if "refuse" in messages[-1].content:
            raise InvalidRequest("that is refused", remedy="ask something else")
        self.asked.append(list(messages))
        self.options.append(options)
        self.streams.append(FakeStream(messages[-1].content))
        return self.streams[-1]


def chat_with(model: FakeModel, *, system: str | None = None) -> ChatSession:
    opened = OpenedModel(name="fake", max_length=2048, text_model=model)
    return ChatSession(
        opened, conversation=Conversation(system=system), options=SamplingOptions(temperature=0.5)
    )
