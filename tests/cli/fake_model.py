"""Fake model: says the last message again in capitals, word by word."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Unpack

from genserve.cli.chat.chat_session import ChatSession
from genserve.cli.chat.conversation import Conversation
from genserve.cli.opened_models import ModelSwitch, OpenedModel
from genserve.completion import Completion, Delta, FinishReason, Stream, TokenLogprob, Usage
from genserve.errors import ContextLengthExceeded, InvalidRequest, ModelNotFound
from genserve.prompt import Message, Messages, Prompts, read_chat
from genserve.sampling.sampling_options import SamplingOptions
from genserve.sampling.sampling_params import sampling_params

_WORDS = ["<end>"]


def word_id(word: str) -> int:
    """Return the token id of a word; 0 is the end of an answer."""
    if word not in _WORDS:
        _WORDS.append(word)
    return _WORDS.index(word)


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
            while word == "SILENT":
                time.sleep(0.05)
            yield Delta(text=word if index == 0 else f" {word}", token_ids=(word_id(word),))
            while word == "FOREVER":
                time.sleep(0.05)    # a signal just before a sleep does not end it
            while word == "GATED" and not self.gate.exists():
                time.sleep(0.01)
        yield Delta(
            text="",
            token_ids=(0,),
            finish_reason=FinishReason.STOP,
            usage=Usage(prompt_tokens=10, completion_tokens=len(words) + 1),
        )


class FakeModel:
    """Records the questions; rejects a question with the word `reject`."""

    def __init__(self) -> None:
        self.asked: list[list[Message]] = []
        self.options: list[SamplingOptions] = []
        self.streams: list[FakeDeltas] = []

    def stream(self, prompt: str, **options: Unpack[SamplingOptions]) -> Stream:
        return self.chat_stream([Message(role="user", content=prompt)], **options)

    def complete(self, prompts: Prompts, **options: Unpack[SamplingOptions]) -> tuple[Completion, ...]:
        """Score a prompt: instead of each token, the word OTHER has a probability of a tenth."""
        other = (word_id("OTHER"), math.log(0.1))
        likely = math.log(0.9)
        scores = (TokenLogprob(logprob=likely, top=((i, likely), other)) for i in prompts[0][1:])
        usage = Usage(prompt_tokens=len(prompts[0]), completion_tokens=1)
        reason = FinishReason.LENGTH
        return (
            Completion(
                text="", token_ids=(0,), finish_reason=reason, usage=usage, prompt_logprobs=tuple(scores)
            ),
        )

    def tokenize(self, prompt: Messages, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """A token for each word, and three around each message of a chat."""
        if isinstance(prompt, str):
            return tuple(map(word_id, prompt.split()))
        turns = (f"<of> {message.role} {message.content} <end>" for message in read_chat(prompt).messages)
        return self.tokenize(" ".join(turns))

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return " ".join(_WORDS[i] for i in token_ids if i or not skip_special_tokens)

    def chat_stream(
        self, messages: Messages, *, return_progress: bool = False, **options: Unpack[SamplingOptions]
    ) -> Stream:
        sampling_params(options)
        chat = read_chat(messages)
        messages = chat.messages
        if "reject" in messages[-1].content:
            raise InvalidRequest("that is rejected", remedy="ask something else")
        if messages[-1].content == "full":
            raise ContextLengthExceeded("there is no room", field="messages")
        self.asked.append(list(messages))
        self.options.append(options)
        self.streams.append(FakeDeltas(" and on" if chat.continue_final_message else messages[-1].content))
        return Stream(self.streams[-1])


def chat_with(model: FakeModel, *, system: str | None = None) -> ChatSession:
    recommended = SamplingOptions(top_p=0.9)

    @contextmanager
    def open_fake(name: str | None) -> Iterator[OpenedModel]:
        if name == "slow":
            print("loading slow", flush=True)
            time.sleep(3600)
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
