"""LLM: a model of a repository, used in this process without a server."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Self, Unpack, cast

from genserve.completion import Completion, Delta, Stream, likeliest
from genserve.errors import Closed, InvalidRequest
from genserve.generation.delta_streams import DeltaStream
from genserve.generation.engine_request import TokenSequence
from genserve.prompt import (
    COMPLETION_TOKENS,
    Messages,
    Prompt,
    Prompts,
    ToolChoice,
    Tools,
    read_chat,
    read_prompts,
)
from genserve.repository.repository import Repository
from genserve.sampling.sampling_options import SamplingOptions
from genserve.sampling.sampling_params import SamplingParams, sampling_params
from genserve.store import default_repository
from genserve.text.message_parser import MessageParser


class LLM:
    """One text model in this process; the methods are those of `genserve.Client`.

        with LLM("smollm2") as llm:
            print(llm.chat("What is a triton?", max_tokens=64).text)

    Thread-safe: the requests of several threads share the steps of one engine. After `close` every call
    raises Closed, and so does a call that runs while another thread closes.
    """

    def __init__(self, model: str | None = None, *, model_repository: str | Path | None = None) -> None:
        """Load a model; without a name, the only text model of the repository.

        `model_repository` is a folder; None: GENSERVE_MODEL_REPOSITORY, or else the store of `genserve pull`.

        Raises:
            RepositoryError: the folder, or the model in it, is invalid.
            ModelNotFound: no such model.
        """
        self._closed = False
        folder = model_repository or os.environ.get("GENSERVE_MODEL_REPOSITORY") or default_repository()
        self._repository = Repository([Path(folder)])
        with ExitStack() as undo:
            undo.callback(self._repository.close)   # unload the stages that were loaded before an error
            name = model or self._repository.only_text_model_name()
            self._repository.start([name])
            for error in self._repository.errors.values():
                raise error
            self._model = self._repository.text_model(name)
            undo.pop_all()

    @property
    def model(self) -> str:
        """The model's name."""
        return self._model.name

    @property
    def max_length(self) -> int:
        """The context length: the greatest number of tokens of prompt and answer together."""
        return self._model.max_length

    @property
    def default_sampling_params(self) -> SamplingOptions:
        """The options that the model recommends, as in `llm.chat(..., **llm.default_sampling_params)`."""
        return cast("SamplingOptions", dict(self._model.default_sampling_params))

    def generate(self, prompt: str, **options: Unpack[SamplingOptions]) -> Completion:
        """Complete a prompt. Options are those of `SamplingParams`.

        Raises:
            InvalidRequest: the prompt is empty or too long, or an option is invalid.
            Overloaded: too many requests wait.
            ModelFailed: the model failed.
        """
        return self._complete_one(prompt, self._params(options))

    def stream(self, prompt: str, **options: Unpack[SamplingOptions]) -> Stream:
        """Complete a prompt, delta by delta. Raises the errors of `generate`."""
        params = self._params(options)
        return self._stream(self._model.prepare(prompt, params), prompt, params)

    def chat(
        self,
        messages: Messages,
        *,
        tools: Tools | None = None,
        tool_choice: ToolChoice | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Completion:
        """Answer a chat; a plain text is one turn of the user.

        With tools, the `tool_calls` of the answer are no part of its text. Tools and the choice among them
        are written as OpenAI's JSON.

        Raises the errors of `generate`.
        """
        params = self._params(options)
        return self._complete_one(read_chat(messages, tools=tools, tool_choice=tool_choice), params)

    def chat_stream(
        self,
        messages: Messages,
        *,
        tools: Tools | None = None,
        tool_choice: ToolChoice | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Stream:
        """Answer a chat, delta by delta, see `chat`. Raises the errors of `generate`."""
        params = self._params(options)
        chat = read_chat(messages, tools=tools, tool_choice=tool_choice)
        return self._stream(self._model.prepare(chat, params), chat, params)

    def complete(
        self, prompts: Prompts, *, n: int = 1, **options: Unpack[SamplingOptions]
    ) -> tuple[Completion, ...]:
        """Complete prompts `n` times each; the default of `max_tokens` is 16.

        The answers are in the order of the prompts, the `n` answers to a prompt next to each other. With
        `prompt_logprobs` each scores the tokens of its prompt, which are in `prompt_token_ids`.

        Raises the errors of `generate`.
        """
        params = self._params(options)
        if n < 1 or 1 < params.best_of < n:
            raise InvalidRequest("n must be at least 1, and at most best_of", field="n")
        params = params if params.max_tokens else replace(params, max_tokens=COMPLETION_TOKENS)
        return tuple(
            replace(completion, prompt_token_ids=prompt_ids)
            for prompt_ids, completions in self._complete(read_prompts(prompts), params, n=n)
            for completion in completions
        )

    def tokenize(self, prompt: Messages, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Return the token ids of a text, or of a chat as the model's template renders it.

        Args:
            prompt: a text, or the messages of a chat.
            add_special_tokens: begin a text with the token that begins every text, if there is one.

        Raises:
            InvalidRequest: a message is invalid, or the model has no chat template.
            ModelFailed: the chat template or the tokenizer failed.
        """
        self._reject_if_closed()
        if isinstance(prompt, str):
            return tuple(self._model.tokenizer.encode(prompt, add_special_tokens=add_special_tokens))
        return tuple(self._model.encode(read_chat(prompt)))

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of token ids; bytes that are no UTF-8 become U+FFFD.

        Raises:
            InvalidRequest: an id is not in the vocabulary.
        """
        self._reject_if_closed()
        return self._model.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def close(self) -> None:
        """Abort the running requests and unload the model; a second call does nothing."""
        self._closed = True
        self._repository.close()

    def _params(self, options: SamplingOptions) -> SamplingParams:
        """Return the parameters of a call. Raises Closed before any other error."""
        self._reject_if_closed()
        # Greedy by default, whatever the model recommends: a program's answers are reproducible.
        return sampling_params({"temperature": 0.0, **options})

    def _reject_if_closed(self) -> None:
        if self._closed:
            raise _closed()

    def _complete(
        self, prompts: Sequence[Prompt], params: SamplingParams, *, n: int
    ) -> list[tuple[tuple[int, ...], list[Completion]]]:
        """Return the token ids of each prompt with its `n` answers: the likeliest of `best_of`."""
        num_choices, wants_logprobs = max(n, params.best_of), params.logprobs
        params = replace(params, logprobs=True) if num_choices > n else params
        # Every prompt is validated before the first one runs.
        choices = [self._model.prepare_choices(prompt, params, num_choices=num_choices) for prompt in prompts]
        prompt_ids = [tuple(sequences[0].token_ids) for sequences in choices]
        with ExitStack() as stack:
            streams = [
                [stack.enter_context(self._stream(sequence, prompt, params)) for sequence in sequences]
                for prompt, sequences in zip(prompts, choices, strict=True)
            ]
            answers = [[stream.final() for stream in one] for one in streams]
        if num_choices > n:
            answers = [[completions[i] for i in likeliest(completions)[:n]] for completions in answers]
        if num_choices > n and not wants_logprobs:
            answers = [[replace(completion, logprobs=()) for completion in one] for one in answers]
        return list(zip(prompt_ids, answers, strict=True))

    def _complete_one(self, prompt: Prompt, params: SamplingParams) -> Completion:
        [(_, [completion])] = self._complete([prompt], params, n=1)
        return completion

    def _stream(self, sequence: TokenSequence, prompt: Prompt, params: SamplingParams) -> Stream:
        parser = self._model.message_parser(prompt, params, begun=sequence.begins_reasoning)
        tools = None if parser is None else parser.without_reasoning()
        try:
            return Stream(_EngineDeltas(DeltaStream(self._model.engine, sequence), tools))
        except Closed:  # by another thread, since the call began
            raise _closed() from None

    def __enter__(self) -> Self:
        self._reject_if_closed()
        return self

    def __exit__(self, *_raised: object) -> None:
        self.close()


class _EngineDeltas:
    """The deltas of an engine's stream. The engine's Closed becomes that of the LLM.

    Args:
        stream: of one answer.
        parser: takes the tool calls out of its text; None: it has none.
    """

    def __init__(self, stream: DeltaStream, parser: MessageParser | None) -> None:
        self._stream = stream
        self._parser = parser

    def __next__(self) -> Delta:
        try:
            delta = next(self._stream)
        except Closed:
            raise _closed(" before the answer was complete") from None
        if self._parser is None:
            return delta
        read = self._parser.read(delta)
        return replace(delta, text=read.content, tool_calls=read.tool_calls)

    def close(self) -> None:
        self._stream.close()


def _closed(when: str = "") -> Closed:
    return Closed(f"this LLM was closed{when}", remedy="create another one: `LLM(model)`")
