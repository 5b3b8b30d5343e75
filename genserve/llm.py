"""LLM: runs a text model of a repository in this process, without a server."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Self, Unpack, cast

from genserve.completion import Completion, Delta, Stream, join_choices, likeliest, require_tokens
from genserve.engine.delta_streams import DeltaStream
from genserve.engine.generation_request import GenerationRequest
from genserve.errors import Closed, InvalidRequest
from genserve.prompt import (
    COMPLETION_TOKENS,
    Messages,
    Prompt,
    Prompts,
    ToolChoice,
    Tools,
    read_chat,
    read_prompt,
    read_prompts,
)
from genserve.repository.options import RepositoryOptions
from genserve.repository.repository import Repository
from genserve.sampling.sampling_options import SamplingOptions
from genserve.sampling.sampling_params import SamplingParams, sampling_params
from genserve.settings import read_max_model_len
from genserve.store import default_repository
from genserve.text.message_parser import MessageParser


class LLM:
    """One text model in this process; the methods are those of `genserve.Client`.

        with LLM("smollm2") as llm:
            print(llm.chat("What is a triton?", max_tokens=64).text)

    Thread-safe: the requests of several threads share the steps of one engine. After `close` every call
    raises Closed, and so does a call that runs while another thread closes.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        model_repository: str | Path | None = None,
        max_model_len: str | int | None = None,
    ) -> None:
        """Load a model.

        Args:
            model: its name; None: the repository must have exactly one text model.
            model_repository: a folder; None: GENSERVE_MODEL_REPOSITORY, or else the store of `genserve pull`.
            max_model_len: the context length, as `--max-model-len` has it: 32768, "32k"; None or "auto": the
                model's own, as far as its config and the memory of the KV cache allow.

        Raises:
            InvalidRequest: `max_model_len` is not a number of tokens.
            RepositoryError: the folder, or the model in it, is invalid, or cannot have that context.
            ModelNotFound: there is no such model.
        """
        self._closed = False
        folder = model_repository or os.environ.get("GENSERVE_MODEL_REPOSITORY") or default_repository()
        try:
            length = read_max_model_len("auto" if max_model_len is None else max_model_len)
        except ValueError as problem:
            raise InvalidRequest(f"max_model_len: {problem}", field="max_model_len") from None
        self._repository = Repository([Path(folder)], options=RepositoryOptions(max_model_len=length))
        with ExitStack() as undo:
            undo.callback(self._repository.close)   # unload the stages that were loaded before an error
            name = model or self._repository.only_text_model_name()
            self._model = self._repository.start_text_model(name)
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
        """Complete a prompt. The options are the fields of `SamplingParams`.

        Raises:
            InvalidRequest: the prompt is empty or too long, or an option is invalid.
            Overloaded: too many requests wait.
            DeadlineExceeded: `max_time_ms` passed before the first token.
            ModelFailed: the model failed.
        """
        params = self._params(options)
        return self._complete_one(read_prompt(prompt), params)

    def stream(self, prompt: str, **options: Unpack[SamplingOptions]) -> Stream:
        """Complete a prompt, delta by delta. Raises the errors of `generate`."""
        params = self._params(options)
        return self._stream(self._model.prepare(read_prompt(prompt), params), is_alone=True)

    def chat(
        self,
        messages: Messages,
        *,
        tools: Tools | None = None,
        tool_choice: ToolChoice | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Completion:
        """Answer a chat; a plain text is one turn of the user.

        With tools, the answer has `tool_calls`, which are no part of its text. Tools and tool choice are
        written as OpenAI's JSON.

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
        return_progress: bool = False,
        **options: Unpack[SamplingOptions],
    ) -> Stream:
        """Answer a chat, delta by delta, see `chat`. Raises the errors of `generate`.

        With `return_progress` the first deltas are `PromptProgress`, while the prompt is read.
        """
        params = self._params(options)
        chat = read_chat(messages, tools=tools, tool_choice=tool_choice)
        request = self._model.prepare(chat, params, return_progress=return_progress)
        return self._stream(request, is_alone=True)

    def complete(
        self, prompts: Prompts, *, n: int = 1, **options: Unpack[SamplingOptions]
    ) -> tuple[Completion, ...]:
        """Complete prompts `n` times each; the default of `max_tokens` is 16.

        The answers are in the order of the prompts, and the `n` answers to a prompt follow each other. With
        `prompt_logprobs` each answer has log-probabilities of its prompt's tokens, `prompt_token_ids`.

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
        """Return the sampling parameters of a call. Raises Closed before any other error."""
        self._reject_if_closed()
        # The default is greedy, whatever the model recommends, so that a program's answers are reproducible.
        return sampling_params({"temperature": 0.0, **options})

    def _reject_if_closed(self) -> None:
        if self._closed:
            raise _closed()

    def _complete(
        self, prompts: Sequence[Prompt], params: SamplingParams, *, n: int
    ) -> list[tuple[tuple[int, ...], list[Completion]]]:
        """Return the token ids of each prompt with its `n` answers, the likeliest of `best_of`."""
        num_choices, wants_logprobs = max(n, params.best_of), params.logprobs
        params = replace(params, logprobs=True) if num_choices > n else params
        # Every prompt is validated before the first one runs.
        requests = [self._model.prepare(prompt, params, num_choices=num_choices) for prompt in prompts]
        with ExitStack() as stack:
            streams = [
                stack.enter_context(self._stream(request, is_alone=False)) for request in requests
            ]
            answers = [list(join_choices(stream)) for stream in streams]
        require_tokens(completion for one in answers for completion in one)
        if num_choices > n:
            answers = [[completions[i] for i in likeliest(completions)[:n]] for completions in answers]
        if num_choices > n and not wants_logprobs:
            answers = [[replace(completion, logprobs=()) for completion in one] for one in answers]
        return [
            (request.prompt_token_ids, completions)
            for request, completions in zip(requests, answers, strict=True)
        ]

    def _complete_one(self, prompt: Prompt, params: SamplingParams) -> Completion:
        [(_, [completion])] = self._complete([prompt], params, n=1)
        return completion

    def _stream(self, request: GenerationRequest, *, is_alone: bool) -> Stream:
        parsers = [self._tool_parser(request) for _ in request.seeds]
        try:
            deltas = DeltaStream(self._model.engine, request)
            return Stream(_EngineDeltas(deltas, parsers, is_alone=is_alone))
        except Closed:  # another thread has closed the model since the call began
            raise _closed() from None

    def _tool_parser(self, request: GenerationRequest) -> MessageParser | None:
        builder, begun = self._model.builder, request.begins_reasoning
        parser = builder.message_parser(request.prompt, request.params, begun=begun)
        return None if parser is None else parser.without_reasoning()

    def __enter__(self) -> Self:
        self._reject_if_closed()
        return self

    def __exit__(self, *_raised: object) -> None:
        self.close()


class _EngineDeltas:
    """The deltas of an engine's stream; turns the engine's Closed into the LLM's.

    Args:
        stream: the deltas of one request.
        parsers: the parsers that take tool calls out of the text, one for each choice; None: there are none.
        is_alone: whether the call has one answer.
    """

    def __init__(
        self, stream: DeltaStream, parsers: Sequence[MessageParser | None], *, is_alone: bool
    ) -> None:
        self._stream = stream
        self._parsers = parsers
        self._is_alone = is_alone

    def __next__(self) -> Delta:
        try:
            delta = next(self._stream)
        except Closed:
            raise _closed(" before the answer was complete") from None
        if self._is_alone and delta.finish_reason is not None:
            require_tokens([delta])
        parser = self._parsers[delta.choice]
        if parser is None:
            return delta
        read = parser.read(delta)
        return replace(delta, text=read.content, tool_calls=read.tool_calls)

    def close(self) -> None:
        self._stream.close()


def _closed(when: str = "") -> Closed:
    return Closed(f"this LLM was closed{when}", remedy="create another one: `LLM(model)`")
