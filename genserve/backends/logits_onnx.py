"""ONNX logits: a logits graph with its KV cache, one session, buffers bound in place.

The graph (`genserve.export` makes it) reads and writes the cache in place: past and present of a
layer are bound to the same memory, of which every call sees the slots that it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genserve.backends.cached_logits import CachedLogits, padded, slot_length
from genserve.backends.logits_memory import HostMemory, LogitsMemory
from genserve.backends.onnx_session import (
    SPIN_US,
    Provider,
    exact_products,
    num_cores,
    onnxruntime_module,
    preload_cuda,
    runtime_message,
)
from genserve.errors import RepositoryError
from genserve.generation.logits_model import LogitsArray, TokenArray

__all__ = ["GraphCall", "OnnxLogits", "cache_layer", "check_logits_graph", "open_logits_session"]

_PAST = "past_key_values."
_GRAPH_INPUTS = ("input_ids", "seqlens_k", "total_len", "rows")
_ON_THE_CPU = "write `instance_group [ { kind: KIND_CPU } ]` into the logits stage's config.pbtxt"
_MARK = 3   # no key or value is this in all of its numbers
_CACHE_TYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(int8)": np.int8}


class OnnxLogits(CachedLogits):
    """A logits graph over a KV cache; implements `generation.LogitsModel`. One thread uses it.

    Attributes:
        metadata: what the exporter wrote into the graph.
    """

    def __init__(
        self,
        path: Path,
        *,
        num_slots: int,
        max_length: int | None = None,
        cache_bytes: int | None = None,
        num_threads: int | None = None,
        memory: LogitsMemory | None = None,
    ) -> None:
        """Load the graph.

        Args:
            path: the model.onnx; its weights lie beside it.
            num_slots: how many token sequences may run together; fewer, if the memory has no room for them.
            max_length: tokens per slot; None: the graph's whole context. Less, if the cache holds less.
            cache_bytes: what the cache may hold of all slots together; None: all of it.
            num_threads: None: one per core that this process may use.
            memory: of the device that runs it; None: of the host. The logits are of its kind.

        Raises:
            MissingDependency: ONNX Runtime is not installed.
            RepositoryError: the file cannot be loaded, or is not such a graph.
        """
        self._memory = memory or HostMemory()
        self._session = open_logits_session(path, num_threads=num_threads, providers=self._memory.providers)
        self.metadata: dict[str, str] = dict(self._session.get_modelmeta().custom_metadata_map)
        max_length = check_logits_graph(self._session, path, max_length=max_length)
        inputs = {i.name: i for i in self._session.get_inputs()}
        outputs = {o.name: o for o in self._session.get_outputs()}
        self.vocab_size = int(outputs["logits"].shape[-1])
        layers = {name: cache_layer(inputs[name], path) for name in inputs if name.startswith(_PAST)}
        super().__init__(
            self._memory,
            layers,
            path=path,
            num_slots=num_slots,
            max_length=max_length,
            cache_bytes=cache_bytes,
        )
        self._logits = self._memory.logits(self.num_slots, self.vocab_size)
        self._decode_bindings: dict[int, GraphCall] = {}
        if not self._memory.is_host:
            self._check_cache(path)

    def _check_cache(self, path: Path) -> None:
        """Run one token, and see that it is written into every buffer of the cache where that lies.

        An operator that has no kernel on the device would be given a copy, and nobody would notice.
        """
        for _, slot in self.cache.slots(0, num_slots=1):
            slot[0, :, 0] = _MARK
        try:
            self.prefill([[0]], first_slot=0, past=0)
        except Exception as error:  # onnxruntime's exceptions share no base class
            raise RepositoryError(
                f"{path} does not run on {self._memory.device}: {error}", remedy=_ON_THE_CPU
            ) from error
        for name, slot in self.cache.slots(0, num_slots=1):
            if (slot[0, :, 0] == _MARK).all():
                raise RepositoryError(
                    f"{path} does not keep its cache on {self._memory.device}: {name} is not written",
                    remedy=_ON_THE_CPU,
                )

    def prefill(self, chunks: Sequence[Sequence[int]], *, first_slot: int, past: int) -> LogitsArray:
        """See `LogitsModel.prefill`. Shorter chunks are padded on the right.

        The padding's keys and values are written behind the chunk, where the next tokens overwrite
        them before anything attends to them. A single token is padded too, if there is room: a row of one
        goes another way through attention, whose last bits differ, and 8-bit activations make 0.9 of a
        logit of that (SmolLM2-135M). All wider prefills are equal to the bit, whatever the chunks.
        """
        width = max(len(chunk) for chunk in chunks)
        if width == 1 and past + 2 <= self.max_length:
            width = 2
        call = self._bind(num_rows=len(chunks), width=width, first_slot=first_slot)
        call.input_ids[:], call.rows[:] = padded(chunks, width=width)
        call.seqlens_k[:] = past + width - 1
        call.total_len[()] = past + width
        return self._run(call)

    def decode(self, token_ids: TokenArray, past: TokenArray) -> LogitsArray:
        """See `LogitsModel.decode`."""
        call = self._decode_bindings.get(len(token_ids))
        if call is None:
            call = self._bind(num_rows=len(token_ids), width=1, first_slot=0)
            call.rows[:] = np.arange(len(token_ids))
            self._decode_bindings[len(token_ids)] = call
        call.input_ids[:, 0] = token_ids
        call.seqlens_k[:] = past
        call.total_len[()] = past.max() + 1
        return self._run(call)

    def _bind(self, *, num_rows: int, width: int, first_slot: int) -> GraphCall:
        """Bind a call over `num_rows` slots; to bind some hundred buffers takes a quarter millisecond."""
        call = GraphCall(self._session, num_rows=num_rows, width=width, num_logits=num_rows)
        for name, slots in self.cache.slots(first_slot, num_slots=num_rows):
            place = self._place(slots)
            call.binding.bind_input(name, *place)
            call.binding.bind_output(name.replace("past_key_values", "present"), *place)
        call.binding.bind_output("logits", *self._place(self._logits[:num_rows]))
        return call

    def _place(self, buffer: Any) -> tuple[Any, ...]:
        """Return where a buffer lies, in the words of ONNX Runtime's bindings."""
        dtype = np.dtype(str(buffer.dtype).removeprefix("torch."))
        memory = self._memory
        return memory.device, memory.device_id, dtype.type, tuple(buffer.shape), memory.address(buffer)

    def _run(self, call: GraphCall) -> LogitsArray:
        if not self._memory.is_host:
            call.bind_inputs()
        self._memory.settle()
        self._session.run_with_iobinding(call.binding)
        return self._logits[: len(call.rows)]


def check_logits_graph(session: Any, path: Path, *, max_length: int | None) -> int:
    """Check that a graph is one of `genserve export`, and return how many tokens a slot of it holds.

    Args:
        session: of ONNX Runtime.
        path: of the graph, for errors.
        max_length: what the config says of it; None or 0: the graph's whole context.

    Raises:
        RepositoryError: it is no such graph, or cannot take so many.
    """
    inputs = [argument.name for argument in session.get_inputs()]
    if not any(name.startswith(_PAST) for name in inputs) or not set(_GRAPH_INPUTS) <= set(inputs):
        raise RepositoryError(
            f"{path} has no KV cache in place: its inputs are {', '.join(inputs)}",
            remedy="make it with `genserve export`",
        )
    text = session.get_modelmeta().custom_metadata_map.get("genserve.context_length", "")
    if not text.isdecimal():
        raise RepositoryError(
            f"{path} does not say its context length", remedy="make it with `genserve export`"
        )
    return slot_length(max_length, context_length=int(text), path=path)


class GraphCall:
    """The bound arrays of one shape of call. Shapes: R rows of S tokens."""

    def __init__(self, session: Any, *, num_rows: int, width: int, num_logits: int) -> None:
        self.binding = session.io_binding()
        self.input_ids = np.zeros((num_rows, width), dtype=np.int64)
        self.seqlens_k = np.zeros(num_rows, dtype=np.int32)     # past + S - 1, per row
        self.total_len = np.zeros((), dtype=np.int32)           # the largest past + S
        self.rows = np.zeros(num_logits, dtype=np.int64)        # of the R*S hidden states, which get logits
        self.bind_inputs()

    def bind_inputs(self) -> None:
        """Bind the arrays where they lie; for a graph on a device, this copies what they hold now."""
        for name in _GRAPH_INPUTS:
            array: NDArray[Any] = getattr(self, name)
            self.binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)


def cache_layer(past: Any, path: Path) -> tuple[int, int, np.dtype[Any]]:
    """Return kv_heads, head_dim and element type of a graph's input for the past of a layer."""
    _, kv_heads, _, head_dim = past.shape
    if past.type not in _CACHE_TYPES:
        raise RepositoryError(
            f"{path} has a KV cache of {past.type}; known are {', '.join(_CACHE_TYPES)}",
            remedy="make it with `genserve export`",
        )
    return kv_heads, head_dim, np.dtype(_CACHE_TYPES[past.type])


def open_logits_session(path: Path, *, num_threads: int | None, providers: Sequence[Provider]) -> Any:
    """Open a session of a logits graph; `num_threads` None or 0: one per core that this process may use.

    Raises:
        MissingDependency: ONNX Runtime is not installed.
        RepositoryError: the graph cannot be loaded.
    """
    onnxruntime = onnxruntime_module()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = num_threads or num_cores()
    options.add_session_config_entry("session.intra_op.spin_duration_us", str(SPIN_US))
    for key, value in exact_products().items():
        options.add_session_config_entry(key, value)
    preload_cuda(providers)
    try:
        session = onnxruntime.InferenceSession(
            str(path), options, providers=[(provider.name, dict(provider.options)) for provider in providers]
        )
    except Exception as error:  # onnxruntime's exceptions share no base class
        raise RepositoryError(
            f"{path} cannot be loaded: {runtime_message(error)}",
            remedy="export it again with `genserve export --overwrite`",
        ) from error
    if session.get_providers()[0] != providers[0].name:  # it falls back to the CPU by itself
        raise RepositoryError(
            f"{path}: {providers[0].name} does not start: libraries are missing or do not fit the driver",
            remedy="ONNX Runtime says which on stderr; `pip install 'genserve[gpu]'` brings the libraries",
        )
    return session
