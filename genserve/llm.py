"""LLM: a model of a repository, used in this process without a server."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Self, Unpack

from genserve.generation.streams import ThreadStream
from genserve.generation.token_sequence import TokenSequence
from genserve.repository.repository import Repository
from genserve.request import Completion, Messages, Prompt, likeliest, read_chat
from genserve.sampling_params import SamplingOptions, SamplingParams, sampling_params
from genserve.stream import Stream

__all__ = ["LLM"]


class LLM:
    """One generation model in this process; the methods are those of `genserve.Client`.

        with LLM("model_repository", "smollm2") as llm:
            print(llm.chat("What is a triton?", max_tokens=64).text)

    Safe to use from several threads at once: their requests share the steps of one engine.
    """

    def __init__(self, model_repository: str | Path, model: str | None = None) -> None:
        """Load a model.

        Args:
            model_repository: the folder.
            model: its name; None where the repository holds one generation model.

        Raises:
            RepositoryError: the folder, or the model in it, cannot be used.
            ModelNotFound: there is no such model.
        """
        self._repository = Repository([Path(model_repository)])
        name = model or self._repository.only_name()
        self._repository.start([name])
        for error in self._repository.errors.values():
            raise error
        self._model = self._repository.get(name)

    @property
    def model(self) -> str:
        """The model's name."""
        return self._model.name

    @property
    def max_length(self) -> int:
        """Tokens that prompt and answer may have together."""
        return self._model.max_length

    def generate(self, prompt: str, **options: Unpack[SamplingOptions]) -> Completion:
        """Complete a prompt. Options are those of `SamplingParams`.

        Raises:
            InvalidRequest: the prompt is empty or too long, or an option is wrong.
            Overloaded: too many requests wait.
            ModelFailed: the model could not go on.
        """
        return self._complete(prompt, sampling_params(options))

    def stream(self, prompt: str, **options: Unpack[SamplingOptions]) -> Stream:
        """Complete a prompt, delta by delta. Raises what `generate` raises."""
        return self._stream(self._model.prepare(prompt, sampling_params(options)))

    def chat(
        self, messages: Messages, **options: Unpack[SamplingOptions]
    ) -> Completion:
        """Answer a chat; a text alone is one turn of the user. Raises what `generate` raises."""
        return self._complete(read_chat(messages), sampling_params(options))

    def chat_stream(
        self, messages: Messages, **options: Unpack[SamplingOptions]
    ) -> Stream:
        """Answer a chat, delta by delta. Raises what `generate` raises."""
        return self._stream(self._model.prepare(read_chat(messages), sampling_params(options)))

    def close(self) -> None:
        """Unload the model; a second call does nothing."""
        self._repository.close()

    def _complete(self, prompt: Prompt, params: SamplingParams) -> Completion:
        if params.best_of > 1:
            params = replace(params, logprobs=True)
        with ExitStack() as stack:
            sequences = self._model.prepare_choices(prompt, params, num_choices=params.best_of)
            streams = [stack.enter_context(self._stream(sequence)) for sequence in sequences]
            completions = [stream.final() for stream in streams]
        return completions[likeliest(completions)[0]]

    def _stream(self, sequence: TokenSequence) -> Stream:
        return Stream(ThreadStream(self._model.loop, sequence))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.close()
