"""LLM: a model of a repository, used in this process without a server."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Self, Unpack

from genserve.completion import Completion, Delta, Stream, likeliest
from genserve.errors import Closed, InvalidRequest
from genserve.generation.delta_streams import DeltaStream
from genserve.generation.engine_request import TokenSequence
from genserve.prompt import COMPLETION_TOKENS, Messages, Prompt, Prompts, read_chat, read_prompts
from genserve.repository.repository import Repository
from genserve.sampling.sampling_params import SamplingOptions, SamplingParams, sampling_params

__all__ = ["LLM"]


class LLM:
    """One generation model in this process; the methods are those of `genserve.Client`.

        with LLM("model_repository", "smollm2") as llm:
            print(llm.chat("What is a triton?", max_tokens=64).text)

    Safe to use from several threads at once: their requests share the steps of one engine. After `close`,
    every call raises Closed; so does one that still runs while another thread closes.
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
        self._closed = False
        self._repository = Repository([Path(model_repository)])
        with ExitStack() as undo:
            undo.callback(self._repository.close)   # what was loaded on the way to an error
            name = model or self._repository.only_name()
            self._repository.start([name])
            for error in self._repository.errors.values():
                raise error
            self._model = self._repository.get(name)
            undo.pop_all()

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
        return self._complete_one(prompt, self._params(options))

    def stream(self, prompt: str, **options: Unpack[SamplingOptions]) -> Stream:
        """Complete a prompt, delta by delta. Raises what `generate` raises."""
        params = self._params(options)
        return self._stream(self._model.prepare(prompt, params))

    def chat(
        self, messages: Messages, **options: Unpack[SamplingOptions]
    ) -> Completion:
        """Answer a chat; a text alone is one turn of the user. Raises what `generate` raises."""
        params = self._params(options)
        return self._complete_one(read_chat(messages), params)

    def chat_stream(
        self, messages: Messages, **options: Unpack[SamplingOptions]
    ) -> Stream:
        """Answer a chat, delta by delta. Raises what `generate` raises."""
        params = self._params(options)
        return self._stream(self._model.prepare(read_chat(messages), params))

    def complete(
        self, prompts: Prompts, *, n: int = 1, **options: Unpack[SamplingOptions]
    ) -> tuple[Completion, ...]:
        """Complete prompts as they are, `n` times each, with 16 tokens if `max_tokens` says nothing else.

        The answers are in the order of the prompts, those to one prompt beside each other. With
        `prompt_logprobs` they score their prompts; which tokens these are, `prompt_token_ids` says.

        Raises what `generate` raises.
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

    def close(self) -> None:
        """Unload the model, and end what still runs; a second call does nothing."""
        self._closed = True
        self._repository.close()

    def _params(self, options: SamplingOptions) -> SamplingParams:
        """Return the parameters of a call; raises Closed before whatever else is wrong with it."""
        self._refuse_if_closed()
        return sampling_params(options)

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise _closed()

    def _complete(
        self, prompts: Sequence[Prompt], params: SamplingParams, *, n: int
    ) -> list[tuple[tuple[int, ...], list[Completion]]]:
        """Return the token ids of each prompt, and the `n` answers to it; of more, the likeliest."""
        drawn, told = max(n, params.best_of), params.logprobs
        params = replace(params, logprobs=True) if drawn > n else params
        # All are checked before the first one runs.
        choices = [self._model.prepare_choices(prompt, params, num_choices=drawn) for prompt in prompts]
        prompt_ids = [tuple(sequences[0].token_ids) for sequences in choices]
        with ExitStack() as stack:
            streams = [[stack.enter_context(self._stream(s)) for s in sequences] for sequences in choices]
            answers = [[stream.final() for stream in one] for one in streams]
        if drawn > n:
            answers = [[completions[i] for i in likeliest(completions)[:n]] for completions in answers]
        if drawn > n and not told:
            answers = [[replace(completion, logprobs=()) for completion in one] for one in answers]
        return list(zip(prompt_ids, answers, strict=True))

    def _complete_one(self, prompt: Prompt, params: SamplingParams) -> Completion:
        [(_, [completion])] = self._complete([prompt], params, n=1)
        return completion

    def _stream(self, sequence: TokenSequence) -> Stream:
        try:
            return Stream(_Deltas(DeltaStream(self._model.engine, sequence)))
        except Closed:  # by another thread, since the call began
            raise _closed() from None

    def __enter__(self) -> Self:
        self._refuse_if_closed()
        return self

    def __exit__(self, *_raised: object) -> None:
        self.close()


class _Deltas:
    """The deltas of an engine's stream; that the engine has closed says that the LLM has."""

    def __init__(self, stream: DeltaStream) -> None:
        self._stream = stream

    def __next__(self) -> Delta:
        try:
            return next(self._stream)
        except Closed:
            raise _closed(" before the answer was complete") from None

    def close(self) -> None:
        self._stream.close()


def _closed(when: str = "") -> Closed:
    return Closed(f"this LLM was closed{when}", remedy="make another: `LLM(model_repository)`")
