"""ONNX logits: an exported graph over a paged KV cache, in one session."""

from __future__ import annotations

from pathlib import Path

from genserve.generation.logits_model import ForwardBatch
from genserve.sampling.logits_array import LogitsArray
from genserve.textmodel.runtimes.cached_logits import CachedLogits, CachePart
from genserve.textmodel.runtimes.kv_cache_memory import HostMemory, LogitsMemory
from genserve.textmodel.runtimes.logits_graph import LogitsGraph, check_written_cache, max_length_of


class OnnxLogits(CachedLogits):
    """A logits graph over a KV cache; implements `generation.LogitsModel`. Used by one thread.

    Attributes:
        metadata: of the graph, by its exporter.
        vocab_size: see `LogitsModel.vocab_size`.
    """

    def __init__(
        self,
        path: Path,
        *,
        max_num_seqs: int,
        max_length: int | None = None,
        kv_cache_bytes: int | None = None,
        num_threads: int | None = None,
        memory: LogitsMemory | None = None,
    ) -> None:
        """Load the graph.

        Args:
            path: of the model.onnx, with its weights in the same folder.
            max_num_seqs: maximum sequences of a forward.
            max_length: maximum tokens of a sequence, reduced to what the cache holds; None or 0: the graph's
                context.
            kv_cache_bytes: what the cache may take; None: half of the memory that is free.
            num_threads: None or 0: one per core that this process may use.
            memory: of the device that runs it; None: of the host. The logits are of its kind.

        Raises:
            MissingDependency: ONNX Runtime is not installed.
            GenserveError: there are no kernels for this machine.
            RepositoryError: the file cannot be loaded, is not such a graph, or has no room.
        """
        self._memory = memory or HostMemory()
        self._graph = LogitsGraph(path, num_threads=num_threads, memory=self._memory)
        self.metadata = self._graph.metadata
        super().__init__(
            [CachePart(memory=self._memory, shapes=self._graph.token_shapes)],
            path=path,
            max_num_seqs=max_num_seqs,
            max_length=max_length_of(self.metadata, path, max_length=max_length),
            kv_cache_bytes=kv_cache_bytes,
        )
        self._graph.bind_cache(self.cache)
        self.vocab_size = self._graph.width
        self._logits = self._memory.rows(max_num_seqs, self.vocab_size, self._graph.dtype)
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
