"""ONNX logits: a graph of `genserve export` over a paged KV cache, or a stage of a pipeline of such graphs.

The graph reads and writes its KV cache in place: past and present of a layer are bound to the same memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, Unpack, cast

import numpy as np
from numpy.typing import NDArray

from genserve.backends.onnx_session import (
    CPU_PROVIDER,
    Provider,
    create_session,
    register_kernels,
    session_options,
)
from genserve.engine.logits_model import ForwardBatch, IndexArray, LogitsAdapter
from genserve.errors import RepositoryError
from genserve.kernels.low_rank import LayerNames, PackedAdapter
from genserve.sampling.logits_array import LogitsArray
from genserve.textmodel.runtimes.adapter_targets import AdapterTarget, read_targets
from genserve.textmodel.runtimes.cached_logits import (
    EXPORT_AGAIN,
    CachedLogits,
    CachePart,
    CacheSizes,
)
from genserve.textmodel.runtimes.kv_cache_memory import (
    HostMemory,
    KVCache,
    LogitsMemory,
    StateShapes,
    TokenShapes,
)

_PAST, _PRESENT = "past_key_values", "present"
_PAST_STATES, _PRESENT_STATES = "past_states", "present_states"
_INPUTS = frozenset({"cumulative_sequence_length", "past_seqlens", "block_table", "attention_metadata"})
_FIRST_INPUTS = frozenset({"input_ids", "position_ids"})
_LATER_INPUTS = frozenset({"hidden_states"})    # only later stages of a pipeline have these inputs
_LAST_INPUTS = frozenset({"logits_indices"})
_OPERATORS = {"1", "2", "3", "4", "5", "6", "7", "8"}    # supported versions of the kernels' operators
_EXPORT = "export it with `genserve export`"
_ON_THE_CPU = "write `instance_group [ { kind: KIND_CPU } ]` into the logits stage's config.pbtxt"
_MARK = 3   # no key or value has this in all its numbers
_ELEMENT_TYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16}
_CACHE_TYPES = _ELEMENT_TYPES | {"tensor(int8)": np.int8}


class GraphAdapter(LogitsAdapter, Protocol):
    """An adapter for graphs of genserve's operators."""

    @property
    def graphs(self) -> Sequence[PackedAdapter]:
        """Its weights for each graph of a pipeline."""


class LogitsGraph:
    """The session of a graph, and what is bound to it. One thread runs it at a time.

    Attributes:
        memory: the memory of the device that runs it.
        metadata: the metadata that the exporter has written into the graph.
        token_shapes: the shapes of one token in its layers' part of the KV cache.
        state_shapes: the shapes of the recurrent states of one sequence in its layers.
        width: the length of a row of its output, which has logits, or hidden states before the last stage.
        dtype: the dtype of its output.
    """

    def __init__(
        self,
        path: Path,
        *,
        num_threads: int | None,
        memory: LogitsMemory,
        stage: int = 1,
        num_stages: int = 1,
    ) -> None:
        """Load the graph.

        Args:
            path: the graph, with its weights in the same folder.
            num_threads: None or 0: one per core that this process may use.
            memory: the memory of the device that runs it.
            stage: the number of the stage in the pipeline, from 1.
            num_stages: how many stages the pipeline has.

        Raises:
            MissingDependency: ONNX Runtime is not installed.
            GenserveError: there are no kernels for this machine.
            RepositoryError: the file cannot be loaded, or is not such a graph.
        """
        self.memory = memory
        self._session = _open(path, num_threads=num_threads, providers=memory.providers)
        check_logits_graph(self._session, path, stage=stage, num_stages=num_stages)
        self.metadata: dict[str, str] = dict(self._session.get_modelmeta().custom_metadata_map)
        self.token_shapes = _token_shapes(self._session, path)
        self.state_shapes = _state_shapes(self._session)
        kept = (f"{_PRESENT}.", f"{_PRESENT_STATES}.")
        [output] = [out for out in self._session.get_outputs() if not out.name.startswith(kept)]
        self._output = output.name
        self.width = int(output.shape[-1])
        self.dtype = np.dtype(_ELEMENT_TYPES[output.type])
        self._is_first, self._is_last = stage == 1, stage == num_stages
        self._reads_positions = any(each.name == "position_ids" for each in self._session.get_inputs())
        self._binding = self._session.io_binding()
        self._path, self._stage = path, stage
        self._unknown = np.zeros(2, np.int32)   # bounds that only a GPU reads
        self._bind("attention_metadata", self._unknown)

    def bind_cache(self, cache: KVCache) -> None:
        """Bind the buffers of its layers, which it keeps."""
        self._cache = cache
        for name in self.token_shapes:
            place = self._place(cache.buffers[name])
            self._binding.bind_input(name, *place)
            self._binding.bind_output(name.replace(_PAST, _PRESENT, 1), *place)
        for name in self.state_shapes:
            place = self._place(cache.states[name])
            self._binding.bind_input(name, *place)
            self._binding.bind_output(name.replace(_PAST_STATES, _PRESENT_STATES, 1), *place)

    @cached_property
    def adapter_targets(self) -> Mapping[str, AdapterTarget]:
        """The parts of its layers that adapters may change, by role."""
        return read_targets(self._path)

    @cached_property
    def adapter_layers(self) -> LayerNames:
        """The layers that have these parts."""
        return LayerNames([*{target.weight: None for target in self.adapter_targets.values()}])

    def run(self, batch: ForwardBatch, output: Any, *, hidden_states: Any = None) -> None:
        """Run the tokens of a batch.

        Args:
            batch: the tokens.
            output: buffer of this memory for the result. The last stage writes a row for each of the batch's
                `logits_indices`, and one row if there are none; another stage writes a row for each token.
            hidden_states: the output of the stage before, in any memory; None: this stage is the first one.
        """
        inputs: dict[str, NDArray[Any]] = {
            "cumulative_sequence_length": batch.query_start_loc,
            "past_seqlens": batch.num_computed_tokens,
            "block_table": batch.block_table,
        }
        if self._is_first:
            inputs["input_ids"] = batch.token_ids
        if self._reads_positions:
            inputs["position_ids"] = batch.positions
        if self._is_last:
            # Some operators reject arrays without rows, so without wanted rows the first is computed.
            has_rows = len(batch.logits_indices) > 0
            inputs["logits_indices"] = batch.logits_indices if has_rows else np.zeros(1, np.int64)
        if self.state_shapes:
            assert batch.state_source is not None
            assert batch.state_target is not None
            inputs |= {"state_source": batch.state_source, "state_target": batch.state_target}
        if not self.memory.is_host:
            inputs["attention_metadata"] = _attention_metadata(batch)
        for name, array in inputs.items():
            self._bind(name, array)
        if not self._is_first:
            hidden_states = self.memory.moved(hidden_states)
            self._binding.bind_input("hidden_states", *self._place(hidden_states))
        self._binding.bind_output(self._output, *self._place(output))
        self.memory.settle()
        with nullcontext() if batch.adapters is None else self._using(batch.adapters, batch):
            self._session.run_with_iobinding(self._binding)

    def _using(
        self, adapters: Sequence[LogitsAdapter | None], batch: ForwardBatch
    ) -> AbstractContextManager[None]:
        """Have the run apply the adapters of a batch."""
        packed = [
            None if each is None else cast("GraphAdapter", each).graphs[self._stage - 1] for each in adapters
        ]
        numbers = {each: number for number, each in enumerate(dict.fromkeys(filter(None, packed)))}
        own = [-1 if each is None else numbers[each] for each in packed]
        rows = np.repeat(np.array(own, np.int32), np.diff(batch.query_start_loc))
        wanted = batch.logits_indices if len(batch.logits_indices) else np.zeros(1, np.int64)
        return self.adapter_layers.using([*numbers], rows, wanted)

    def _bind(self, name: str, array: NDArray[Any]) -> None:
        """Bind an input in place; for a graph on a device, this copies its current content."""
        self._binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)

    def _place(self, buffer: Any) -> tuple[Any, ...]:
        """Return the place of a buffer, as arguments of ONNX Runtime's bindings."""
        dtype = np.dtype(str(buffer.dtype).removeprefix("torch."))
        memory = self.memory
        return memory.device, memory.device_id, dtype.type, tuple(buffer.shape), memory.address(buffer)


def check_written_cache(
    run: Callable[[ForwardBatch], object], cache: KVCache, *, path: Path, device: str
) -> None:
    """Run one token, and check that it is written into every buffer of the cache.

    An operator without a kernel on the device would silently write to a copy.

    Raises:
        RepositoryError: the graph does not run on the device, or does not write a buffer.
    """
    for buffer in cache.buffers.values():
        buffer[0] = _MARK
    one = ForwardBatch.of([[0]], num_computed_tokens=[0], block_table=[[0]], **cache.first_states())
    try:
        run(one)
    except Exception as error:  # onnxruntime's exceptions share no base class
        raise RepositoryError(f"{path} does not run on {device}: {error}", remedy=_ON_THE_CPU) from error
    for name, buffer in cache.buffers.items():
        if (buffer[0] == _MARK).all():
            raise RepositoryError(
                f"{path} does not write its cache on {device}: {name} is unchanged", remedy=_ON_THE_CPU
            )


def exported_context_length(metadata: Mapping[str, str], path: Path) -> int:
    """Return the context of a graph, in tokens, by its metadata; raises RepositoryError if it is missing."""
    text = metadata.get("genserve.context_length", "")
    if not text.isdecimal():
        raise RepositoryError(f"{path} does not contain its context length", remedy=_EXPORT)
    return int(text)


def check_logits_graph(session: Any, path: Path, *, stage: int = 1, num_stages: int = 1) -> None:
    """Check that a graph was exported by `genserve export`, as the wanted stage of its pipeline.

    Args:
        session: ONNX Runtime's session of the graph.
        path: the graph's file, for errors.
        stage: the number of the stage in the pipeline, from 1.
        num_stages: how many stages the pipeline has; 1: the graph has all layers.

    Raises:
        RepositoryError: the graph is another one, or of another version.
    """
    names = {argument.name for argument in session.get_inputs()}
    if not any(name.startswith((f"{_PAST}.", f"{_PAST_STATES}.")) for name in names):
        raise RepositoryError(
            f"{path} has no KV cache: its inputs are {', '.join(sorted(names))}", remedy=_EXPORT
        )
    metadata = session.get_modelmeta().custom_metadata_map
    found, wanted = metadata.get("genserve.pipeline_stage", "1/1"), f"{stage}/{num_stages}"
    if found != wanted:
        raise RepositoryError(
            f"{path} is {_described(found)}; by `pipeline_stages` of its config it should be "
            f"{_described(wanted)}",
            remedy="write the number of stages that it was exported with, or export it again with "
            "`genserve export --pipeline-stages`",
            field="parameters",
        )
    inputs = _INPUTS | (_FIRST_INPUTS if stage == 1 else _LATER_INPUTS)
    missing = (inputs | _LAST_INPUTS if stage == num_stages else inputs) - names
    if missing:
        raise RepositoryError(
            f"{path} has no KV cache in blocks: it lacks the inputs {', '.join(sorted(missing))}; it was "
            "exported by an older version of genserve, or by another program",
            remedy=EXPORT_AGAIN,
        )
    if metadata.get("genserve.operators") not in _OPERATORS:
        raise RepositoryError(f"{path} is for another version of genserve's operators", remedy=EXPORT_AGAIN)


def _described(stage: str) -> str:
    number, _, num_stages = stage.partition("/")
    return "a graph of all layers" if stage == "1/1" else f"stage {number} of a pipeline of {num_stages}"


def _token_shapes(session: Any, path: Path) -> TokenShapes:
    """Return the shapes and types of one token in the cache of a graph."""
    outputs = {output.name for output in session.get_outputs()}
    shapes = {}
    for past in session.get_inputs():
        if past.name.startswith(f"{_PAST}."):
            _, _, *shape = past.shape
            in_place = past.name.replace(_PAST, _PRESENT, 1) in outputs
            if not in_place or not all(isinstance(size, int) for size in shape):
                raise RepositoryError(
                    f"{path} has a KV cache that cannot be written in place: {past.name} is {past.shape}",
                    remedy=EXPORT_AGAIN,
                )
            shapes[past.name] = (tuple(shape), cache_dtype(past, path))
    return shapes


def _state_shapes(session: Any) -> StateShapes:
    """Return the shapes of one sequence's recurrent states."""
    return {
        past.name: tuple(past.shape[1:])
        for past in session.get_inputs()
        if past.name.startswith(f"{_PAST_STATES}.")
    }


def cache_dtype(past: Any, path: Path) -> np.dtype[Any]:
    """Return the element type of a graph's input that holds keys or values.

    Raises:
        RepositoryError: caches of this type are not supported.
    """
    if past.type not in _CACHE_TYPES:
        raise RepositoryError(
            f"{path} has a KV cache of {past.type}; supported are {', '.join(_CACHE_TYPES)}", remedy=_EXPORT
        )
    return np.dtype(_CACHE_TYPES[past.type])


def _attention_metadata(batch: ForwardBatch) -> IndexArray:
    """Return [2]: the maximum of new tokens and of all tokens of a sequence, for launches on a GPU."""
    num_tokens = np.diff(batch.query_start_loc)
    longest = (num_tokens + batch.num_computed_tokens).max()
    return np.array([num_tokens.max(), longest], dtype=np.int32)


def _open(path: Path, *, num_threads: int | None, providers: Sequence[Provider]) -> Any:
    options = session_options(num_threads=num_threads)
    if providers[0] == CPU_PROVIDER:
        register_kernels(options)
    try:
        session = create_session(path, options, providers)
    except RepositoryError as error:
        raise _rejection(path, providers[0], error.message) or RepositoryError(
            f"{path} cannot be loaded: {error.message}", remedy=EXPORT_AGAIN
        ) from error
    if session.get_providers()[0] != providers[0].name:  # ONNX Runtime has fallen back to the CPU
        raise _not_started(path, providers[0])
    return session


def _rejection(path: Path, provider: Provider, message: str) -> RepositoryError | None:
    """Return the error for a known reason why a graph cannot be loaded on a GPU; None: unknown."""
    if provider == CPU_PROVIDER:
        return None
    if "genserve:" in message:  # the domain of an operator that is not registered
        return RepositoryError(
            f"{path} runs on the CPU alone: {provider.name} does not have its operators",
            remedy=f"{_ON_THE_CPU}; or export it with `genserve export --precision fp16`, which does not "
            "support ALiBi and unusual head sizes on a GPU",
        )
    # Without CUDA the graph goes to the CPU, which has no attention in float16 and inserts casts.
    return _not_started(path, provider) if "InsertedPrecisionFreeCast" in message else None


def _not_started(path: Path, provider: Provider) -> RepositoryError:
    return RepositoryError(
        f"{path}: {provider.name} does not start: libraries are missing or incompatible with the driver",
        remedy="ONNX Runtime names them on stderr; `pip install 'onnxruntime-gpu[cuda,cudnn]'` brings them",
    )


class OnnxLogits(CachedLogits):
    """A logits graph over a KV cache; implements `engine.LogitsModel`. Used by one thread.

    Attributes:
        graphs: the graph, as `PipelineLogits` has several.
        metadata: the metadata that the exporter has written into the graph.
        vocab_size: see `LogitsModel.vocab_size`.
    """

    def __init__(
        self,
        path: Path,
        *,
        num_threads: int | None = None,
        memory: LogitsMemory | None = None,
        **sizes: Unpack[CacheSizes],
    ) -> None:
        """Load the graph.

        Args:
            path: the model.onnx, with its weights in the same folder.
            num_threads: None or 0: one per core that this process may use.
            memory: the memory of the device that runs it, which has the logits too; None: the host's.
            sizes: the bounds of the KV cache.

        Raises:
            MissingDependency: ONNX Runtime is not installed.
            GenserveError: there are no kernels for this machine.
            RepositoryError: the file cannot be loaded, is not such a graph, or has no room.
        """
        self._memory = memory or HostMemory()
        self._graph = LogitsGraph(path, num_threads=num_threads, memory=self._memory)
        self.graphs = [self._graph]
        self.metadata = self._graph.metadata
        super().__init__(
            [
                CachePart(
                    memory=self._memory, shapes=self._graph.token_shapes, states=self._graph.state_shapes
                )
            ],
            path=path,
            context_length=exported_context_length(self.metadata, path),
            **sizes,
        )
        self._graph.bind_cache(self.cache)
        self.vocab_size = self._graph.width
        self._logits = self._memory.rows(self.max_num_seqs, self.vocab_size, self._graph.dtype)
        if not self._memory.is_host:
            check_written_cache(self.forward, self.cache, path=path, device=self._memory.device)

    def forward(self, batch: ForwardBatch) -> LogitsArray:
        """See `LogitsModel.forward`."""
        num_rows = len(batch.logits_indices)
        if num_rows > len(self._logits):
            self._logits = self._memory.rows(num_rows, self.vocab_size, self._graph.dtype)
        logits: LogitsArray = self._logits[: max(1, num_rows)]
        self._graph.run(batch, logits)
        return logits[:num_rows]
