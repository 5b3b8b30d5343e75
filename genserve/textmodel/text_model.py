"""Text model: text in, text out, by a tokenizer, an engine and the plug-ins of a decoder stage."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from typing import Any, TypeVar

from genserve.errors import Closed, InvalidRequest
from genserve.generation.engine_request import TokenSequence
from genserve.generation.text_engine import TextEngine
from genserve.prompt import Chat, Prompt
from genserve.sampling.sampling_params import SamplingParams
from genserve.text.message_parser import MessageParser
from genserve.text.reasoning import THINKING_TAGS
from genserve.text.tokenizer import Tokenizer
from genserve.textmodel.decoder_stage import Decoding
from genserve.textmodel.input_processor import InputProcessor
from genserve.textmodel.logits_runtime import LogitsFigures

T = TypeVar("T")

# Of each of two kinds: those for requests with structured outputs may compile a grammar for seconds.
_MAX_THREADS = 4


def needs_grammar(prompt: Prompt, params: SamplingParams) -> bool:
    """Whether a grammar has to be compiled for a request, which may take seconds."""
    return params.structured_outputs is not None or (isinstance(prompt, Chat) and bool(prompt.tools))


class TextModel:
    """A loaded model that answers text with text. Its methods are safe from any thread.

    Attributes:
        name: of the ensemble in the repository.
        tokenizer: its tokenizer stage.
        engine: runs its logits and decoder stages.
        plugins: of its decoder stage.
        inputs: turns requests into token sequences.
        logits: figures of the model that the engine runs.
        max_length: maximum tokens of prompt and answer together.
        max_num_seqs: sequences that run concurrently; more wait.
        kv_cache_bytes: largest size of the KV cache.
        precision: of the weights, from the file's metadata.
        vocab_size: length of a row of logits.
        default_sampling_params: of the model, for parameters that a request does not state.
        loaded_s: wall-clock time of the load, seconds since 1970.
        weights_bytes: size of the files of the logits stage.
    """

    def __init__(
        self,
        *,
        name: str,
        tokenizer: Tokenizer,
        engine: TextEngine,
        decoding: Decoding,
        logits: LogitsFigures,
        default_sampling_params: Mapping[str, Any],
        weights_bytes: int,
    ) -> None:
        self.name = name
        self.tokenizer = tokenizer
        self.engine = engine
        self.plugins = decoding.plugins
        self.logits = logits
        self.max_length = logits.max_length
        self.max_num_seqs = logits.max_num_seqs
        self.vocab_size = logits.vocab_size
        self.kv_cache_bytes = logits.kv_cache_bytes
        self.precision = logits.metadata.get("genserve.precision", "unknown")
        self.default_sampling_params = default_sampling_params
        self.loaded_s = time.time()
        self.weights_bytes = weights_bytes
        self.inputs = InputProcessor(
            name=name,
            tokenizer=tokenizer,
            engine=engine,
            decoding=decoding,
            logits=logits,
            default_sampling_params=default_sampling_params,
        )
        self._workers = ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix=f"prepare-{name}")
        self._compilers = ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix=f"compile-{name}")

    @property
    def num_waiting(self) -> int:
        """Requests whose prompts are being prepared, and sequences that wait to be scheduled."""
        return self.engine.num_preparing + max(0, self.engine.num_accepted - self.engine.num_running)

    def run_soon(self, work: Callable[[], T], *, compiles: bool) -> Future[T]:
        """Prepare a request on a thread of this model, in the order of these calls.

        So requests that are expensive to prepare delay no other model.

        Args:
            work: runs in the context of this call; calls `Reservation.check` first.
            compiles: whether the request has structured outputs or tools; these do not delay other requests.

        Raises:
            Closed: after `close`.
        """
        workers = self._compilers if compiles else self._workers
        try:
            return workers.submit(copy_context().run, work)
        except RuntimeError as error:
            if "shutdown" not in str(error):    # a thread cannot be started
                raise
            raise Closed(f"model '{self.name}' is being unloaded") from None

    def prepare(
        self, prompt: Prompt, params: SamplingParams, *, arrived_s: float | None = None
    ) -> TokenSequence:
        """Turn a prompt into a token sequence; see `prepare_choices`."""
        if params.best_of > 1:
            raise InvalidRequest("best_of cannot be streamed", field="best_of")
        [sequence] = self.prepare_choices(prompt, params, num_choices=1, arrived_s=arrived_s)
        return sequence

    def prepare_choices(
        self, prompt: Prompt, params: SamplingParams, *, num_choices: int, arrived_s: float | None = None
    ) -> list[TokenSequence]:
        """Turn a prompt into token sequences, one for each choice, ready to submit to `engine`.

        Takes time in proportion to the prompt: keep it off an event loop. With a seed, choice i has the
        seed plus i.

        Args:
            prompt: text, token ids or a chat.
            params: of the request.
            num_choices: how many answers it gets.
            arrived_s: when `max_time_ms` begins, by the clock of `engine`; None: now.

        Raises:
            InvalidRequest: an empty prompt, bad text or messages, ids outside the vocabulary; `field` is
                `prompt`, `messages` or the parameter's name. Or the model has no plug-in of this name with
                these arguments.
            ContextLengthExceeded: prompt and `max_tokens` do not fit; has both numbers.
            ModelFailed: the chat template, the tokenizer or a plug-in failed.
        """
        return self.inputs.process(prompt, params, num_choices=num_choices, arrived_s=arrived_s)

    def message_parser(self, prompt: Prompt, params: SamplingParams, *, begun: bool) -> MessageParser | None:
        """Return a parser of one answer to a request; None: all of the text is content.

        Args:
            prompt: of the request; a chat may have tools.
            params: of the request.
            begun: whether the prompt begins the reasoning, see `TokenSequence.begins_reasoning`.
        """
        return self.inputs.message_parser(prompt, params, begun=begun)

    def encode(self, prompt: Prompt) -> Sequence[int]:
        """Return the token ids of a prompt; takes time as `prepare_choices` does, and raises its errors."""
        return self.inputs.encode(prompt)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of token ids.

        Raises:
            InvalidRequest: an id is not in the vocabulary; `field` is its place.
        """
        for index, token_id in enumerate(token_ids):
            if not 0 <= token_id < self.vocab_size:
                field = f"tokens[{index}]"
                problem = f"is {token_id}; the vocabulary has the ids 0 to {self.vocab_size - 1}"
                raise InvalidRequest(f"{field} {problem}", field=field)
        return self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    @property
    def reasons(self) -> bool:
        """Whether the model marks the reasoning in its answers."""
        return all(self.tokenizer.token_id(tag) is not None for tag in THINKING_TAGS)

    @property
    def template_variables(self) -> frozenset[str]:
        """The variables of its chat template that a request may set."""
        template = self.tokenizer.chat_template
        return frozenset() if template is None else template.variables

    def close(self) -> None:
        """End all requests, the engine's thread, and the process of the chat template.

        Requests that are still being prepared find the engine closed.
        """
        self.engine.close()
        self._workers.shutdown(wait=False)
        self._compilers.shutdown(wait=False)
        self.tokenizer.close()
