"""Text model: text in, text out, by a tokenizer, an engine and the plug-ins of a decoder stage."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from copy import copy
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from genserve.completion import join_deltas
from genserve.engine.delta_streams import DeltaStream
from genserve.engine.disk_cache import DiskCache
from genserve.engine.generation_request import GenerationRequest
from genserve.engine.text_engine import TextEngine
from genserve.errors import Closed, InvalidRequest, ModelFailed
from genserve.prompt import Chat, Prompt, Reasoning
from genserve.sampling.sampling_params import SamplingParams
from genserve.text.tokenizer import Tokenizer
from genserve.textmodel.adapters import AdapterInfo, Adapters
from genserve.textmodel.calibration import Calibration, calibrated_model
from genserve.textmodel.decoder_stage import Decoding
from genserve.textmodel.input_processor import InputProcessor
from genserve.textmodel.logits_runtime import LogitsFigures
from genserve.textmodel.receipts import described
from genserve.textmodel.request_rules import check_token_ids
from genserve.textmodel.sequence_builder import SequenceBuilder

logger = logging.getLogger(__name__)

T = TypeVar("T")

# As many threads prepare requests with structured outputs, which may compile a grammar for seconds, and as
# many threads prepare all other requests.
_MAX_THREADS = 4


def needs_grammar(prompt: Prompt, params: SamplingParams) -> bool:
    """Whether a grammar has to be compiled for a request, which may take seconds."""
    return params.structured_outputs is not None or (isinstance(prompt, Chat) and bool(prompt.tools))


class TextModel:
    """A loaded model that answers text with text. Its methods are safe from any thread.

    Attributes:
        name: the name of the ensemble in the repository.
        tokenizer: its tokenizer stage.
        engine: runs its logits and decoder stages.
        plugins: the plug-ins of its decoder stage.
        builder: makes the token sequences of requests, and the parsers of their answers.
        inputs: makes the requests to the engine.
        logits: figures of the model that the engine runs.
        precision: how the weights are stored, from the file's metadata.
        vocab_size: length of a row of logits.
        default_sampling_params: the values of parameters that a request does not state.
        loaded_s: wall-clock time of the load, seconds since 1970.
        weights_bytes: size of the files of the logits stage.
        adapters: its adapters, which requests choose by name; None: the model runs in other processes.
        disk_cache: its prefix cache on disk, or the prefixes that came with it; None: neither.
        base: the model whose engine this adapter of it shares; None: this is no adapter.
        adapter: the adapter that answers; None: the model itself, unless a request names an adapter.
    """

    def __init__(
        self,
        *,
        name: str,
        tokenizer: Tokenizer,
        engine: TextEngine,
        decoding: Decoding,
        builder: SequenceBuilder,
        logits: LogitsFigures,
        default_sampling_params: Mapping[str, Any],
        weights_bytes: int,
        disk_cache: DiskCache | None = None,
        calibration: Calibration | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        self.name = name
        self.tokenizer = tokenizer
        self.engine = engine
        self.plugins = decoding.plugins
        self.builder = builder
        self.logits = logits
        self.vocab_size = logits.vocab_size
        self.precision = logits.metadata.get("genserve.precision", "unknown")
        self.default_sampling_params = default_sampling_params
        self.loaded_s = time.time()
        self.weights_bytes = weights_bytes
        self.disk_cache = disk_cache
        self._calibration = calibration
        self.adapters = adapters
        self.base: TextModel | None = None
        self.adapter: AdapterInfo | None = None
        self.inputs = InputProcessor(
            name=name,
            tokenizer=tokenizer,
            engine=engine,
            builder=builder,
            vocab_size=logits.vocab_size,
            default_sampling_params=default_sampling_params,
            adapters=adapters,
        )
        self._workers = ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix=f"prepare-{name}")
        self._compilers = ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix=f"compile-{name}")

    def with_adapter(self, name: str, folder: Path) -> TextModel:
        """Load an adapter; return it as a model of its own, which shares all but the adapter with this one.

        Args:
            name: the name of the adapter.
            folder: the folder with its files.

        Raises:
            RepositoryError: see `Adapters.load`.
        """
        assert self.adapters is not None  # the model runs in this process
        model = copy(self)
        model.base, model.adapter = self, self.adapters.load(name, folder)
        model.name, model.loaded_s, model.weights_bytes = name, time.time(), model.adapter.num_bytes
        model._calibration = None  # it was fitted to the answers of this model
        model.__dict__.pop("temperatures", None)
        return model

    @property
    def max_length(self) -> int:
        """Maximum tokens of prompt and answer together."""
        return self.logits.max_length

    @property
    def context(self) -> str:
        """The context length, and what limits it, for the log and the command line."""
        own, limit = self.logits.context_length, self.logits.length_limit
        if self.max_length == own:
            return f"{own}"
        return f"{self.max_length} of the model's {own} ({limit})"

    @property
    def max_num_seqs(self) -> int:
        """Sequences that run concurrently; more wait."""
        return self.logits.max_num_seqs

    @property
    def kv_cache_bytes(self) -> int:
        """Largest size of the KV cache."""
        return self.logits.kv_cache_bytes

    @property
    def num_waiting(self) -> int:
        """Requests whose prompts are being prepared, and sequences that wait to be scheduled."""
        return self.engine.num_preparing + max(0, self.engine.num_accepted - self.engine.num_running)

    def run_soon(self, work: Callable[[], T], *, compiles: bool) -> Future[T]:
        """Prepare a request on a thread of this model, in the order of the calls of this method.

        So requests that are expensive to prepare delay no other model.

        Args:
            work: a function that runs in the context of this call, and calls `Reservation.check` first.
            compiles: whether the request has structured outputs or tools, which delay no other requests.

        Raises:
            Closed: after `close`.
        """
        workers = self._compilers if compiles else self._workers
        try:
            return workers.submit(copy_context().run, work)
        except RuntimeError as error:
            if "shutdown" not in str(error):  # a thread cannot be started
                raise
            raise Closed(f"model '{self.name}' is being unloaded") from None

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        num_choices: int = 1,
        adapter: str | None = None,
        arrived_s: float | None = None,
        return_progress: bool = False,
    ) -> GenerationRequest:
        """Return the request for the answers to a prompt, ready to submit to `engine`.

        Takes time in proportion to the prompt: keep it off an event loop. With a seed, choice i has the
        seed plus i.

        Args:
            prompt: text, token ids or a chat.
            params: the sampling parameters; where one is not stated, the model's default holds.
            num_choices: how many answers the prompt gets; at least `params.best_of`.
            adapter: the name of the adapter that answers; None: that of this model, or the model itself.
            arrived_s: the time at which `max_time_ms` begins, by the clock of `engine`; None: now.
            return_progress: see `GenerationRequest`.

        Raises:
            InvalidRequest: an empty prompt, bad text or messages, ids outside the vocabulary; `field` is
                `prompt`, `messages` or the parameter's name. An error in a grammar or a plug-in is raised by
                the engine's `submit`.
            ContextLengthExceeded: prompt and `max_tokens` do not fit; the error has both numbers.
            ModelFailed: the chat template or the tokenizer failed.
            ModelNotFound: there is no such adapter.
        """
        if params.best_of > num_choices:
            raise InvalidRequest("best_of cannot be streamed", field="best_of")
        return self.inputs.process(
            prompt,
            params,
            num_choices=num_choices,
            adapter=adapter or (None if self.adapter is None else self.adapter.name),
            arrived_s=arrived_s,
            return_progress=return_progress,
        )

    def facts(self) -> dict[str, Any]:
        """Return the fields of receipts that describe this model; see `ModelReceipts.facts`."""
        assert self.builder.receipts is not None  # the model runs in this process
        facts = self.builder.receipts.facts(self.logits)
        if self.adapter is not None:
            facts["adapter"] = {"name": self.adapter.name, "sha256": self.adapter.sha256}
        return facts

    @cached_property
    def temperatures(self) -> Mapping[str, float]:
        """The fitted temperatures of decisions, by type of question; empty: none were fitted for these files.

        The first access hashes the files, for about a second per gigabyte.
        """
        if self._calibration is None:
            return {}
        try:
            is_same = self._calibration.model == calibrated_model(described(self.facts()))
        except ModelFailed:  # the files have changed since the load
            is_same = False
        if not is_same:
            logger.warning(
                "the calibration of model %s is of other files, and is not used; run `genserve calibrate`",
                self.name,
            )
        return self._calibration.temperatures if is_same else {}

    def repeat(self, request: GenerationRequest) -> Mapping[str, Any]:
        """Answer the request of a receipt, and return the receipt of the answer.

        Raises:
            InvalidRequest: a token or a parameter does not fit the model.
            GenserveError: the model failed.
        """
        self.encode(request.prompt_token_ids)
        self.builder.param_tokens.check(request.params)
        with DeltaStream(self.engine, request) as stream:
            usage = join_deltas(stream).usage
        assert usage.receipt is not None
        return usage.receipt

    def encode(self, prompt: Prompt, *, add_special_tokens: bool | None = None) -> Sequence[int]:
        """Return the token ids of a prompt; takes time as `prepare` does, and raises its errors.

        `add_special_tokens`: see `SamplingParams`.
        """
        return self.inputs.encode(prompt, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of token ids.

        Raises:
            InvalidRequest: an id is not in the vocabulary; `field` is its place.
        """
        check_token_ids(token_ids, vocab_size=self.vocab_size, field="tokens")
        return self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    @property
    def reasons(self) -> bool:
        """Whether the model marks the reasoning in its answers."""
        return self.builder.reasoning.has_marks

    def reads_reasoning(self, reasoning: Reasoning) -> bool:
        """Whether the chat template reads a part of how the model is to reason."""
        template = self.tokenizer.chat_template
        return template is not None and bool(template.reasoning.values(reasoning))

    def drain(self, *, timeout_s: float) -> None:
        """Wait until every accepted request has ended, at most `timeout_s`; an adapter is unloaded before.

        The requests that still run after that time end as they began, if this is an adapter.
        """
        if self.adapter is None or self.adapters is None:
            self.engine.drain(timeout_s=timeout_s)
        else:
            self.adapters.unload(self.adapter, timeout_s=timeout_s)

    def close(self) -> None:
        """End all requests, the engine's thread, and the process of the chat template; not of an adapter.

        Requests that are still being prepared find the engine closed.
        """
        if self.adapter is not None:
            return
        self.engine.close()
        self._workers.shutdown(wait=False)
        self._compilers.shutdown(wait=False)
        self.tokenizer.close()
