"""Disk prefixes: the folders in which the blocks of a text model's prefix cache are files."""

from __future__ import annotations

import hashlib
import logging
import platform
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from genserve.backends.backend import ModelSource, boolean_parameter
from genserve.backends.libraries import import_onnxruntime, import_torch
from genserve.engine.disk_cache import DiskCache, PrefixCacheFolder
from genserve.errors import GenserveError
from genserve.generation_metrics import GenerationMetrics
from genserve.kernels import build_sha256, instruction_set
from genserve.machine import default_threads
from genserve.textmodel.logits_config import (
    PREFIXES_FOLDER,
    FileStates,
    file_states,
    logits_files,
    version_files,
)
from genserve.textmodel.logits_runtime import LoadedLogits, engine_placements
from genserve.textmodel.runtimes.cached_logits import CachedLogits
from genserve.textmodel.runtimes.onnx_logits import OnnxLogits
from genserve.textmodel.runtimes.pipeline_logits import PipelineLogits

logger = logging.getLogger(__name__)

_FORMAT = 3  # of the files; another one gives all blocks other fingerprints
_PIECE_BYTES = 4 << 20  # of a file, hashed by one thread


def open_disk_cache(
    logits: LoadedLogits,
    stages: Mapping[str, ModelSource],
    *,
    name: str,
    files: FileStates,
    folder: PrefixCacheFolder | None,
    metrics: GenerationMetrics,
) -> DiskCache | None:
    """Open the prefix cache on disk of a loaded model, and the prefixes that came with it.

    Args:
        logits: the logits.
        stages: the stages of the text model, by role.
        name: the name of the text model.
        files: the `file_states` of the stages before they were loaded.
        folder: where blocks are written; None: only the prefixes that came with the model are read.
        metrics: the metrics of the text model.

    Returns:
        None: there is neither a folder nor a prefix, or the model's blocks cannot be in files.
    """
    stage = stages["logits"]
    shipped = stage.folder / PREFIXES_FOLDER
    has_shipped = shipped.is_dir() and (folder is None or folder.path != shipped)
    if folder is None and not has_shipped:
        return None
    if not boolean_parameter(stage.config.parameters, "prefix_cache", default=True):
        return None
    if not isinstance(logits, CachedLogits):
        logger.warning("model %s has no prefix cache on disk: it has no KV cache", name)
        return None
    fingerprint = cache_fingerprint(logits, stage)
    if file_states(stages) != files:  # the fingerprint may be that of the new files
        logger.warning(
            "model %s has no prefix cache on disk: its files changed while it was loaded (load it again)",
            name,
        )
        return None
    if has_shipped and not (shipped / fingerprint).is_dir():
        logger.warning(
            "%s is ignored: its prefixes were computed by another graph, or by other kernels (run "
            "`genserve cache build %s` again, with the files of the prompts)",
            shipped,
            name,
        )
    return DiskCache(
        logits.cache,
        name=name,
        block_size=logits.block_size,
        fingerprint=fingerprint,
        metrics=metrics,
        folder=None if folder is None else folder.path,
        max_bytes=0 if folder is None else folder.max_bytes,
        shipped=[shipped] if has_shipped else [],
    )


def cache_fingerprint(logits: CachedLogits, stage: ModelSource) -> str:
    """Return what the contents of blocks depend on besides the tokens, as 32 hexadecimal digits.

    These are the graph with its weights, what computes it, and the layout of the cache. A folder may have
    several graphs, of which the config names one. The kernels of all instruction sets compute the same bits,
    the operators of ONNX Runtime and torch do not.
    The tokenizer is not among them, since the keys of blocks are digests of token ids.
    """
    placement = engine_placements(stage.config)[0]
    runs_kernels = isinstance(logits, OnnxLogits | PipelineLogits) and placement.kind != "GPU"
    facts = [
        _FORMAT,
        type(logits).__name__,
        files_sha256(stage.folder),
        [path.name for path in logits_files(stage.config, stage.folder)],
        [
            (name, str(buffer.dtype), tuple(buffer.shape[1:]))
            for name, buffer in (*logits.cache.buffers.items(), *logits.cache.states.items())
        ],
        import_onnxruntime().__version__ if stage.config.backend == "onnxruntime" else "",
        build_sha256() if runs_kernels else _processor(),
        placement.kind,
    ]
    if placement.kind == "GPU" or stage.config.backend == "pytorch":
        torch = import_torch()
        facts.append(torch.__version__)
        if placement.kind == "GPU":
            facts.append(torch.cuda.get_device_name(placement.device_id))
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:32]


def _processor() -> str:
    """Return what the choice of instructions depends on."""
    with suppress(GenserveError):  # of kernels that are not built here
        return instruction_set()
    return platform.machine()


def files_sha256(folder: Path) -> str:
    """Return a digest of the names and contents of the files of a version, hashed on all cores."""
    pieces = [
        (path, start)
        for path in version_files(folder)
        for start in range(0, max(1, path.stat().st_size), _PIECE_BYTES)
    ]
    with ThreadPoolExecutor(default_threads()) as threads:
        digests = threads.map(_piece_sha256, pieces)
        names = [(path.relative_to(folder).as_posix(), start) for path, start in pieces]
        return hashlib.sha256(repr(list(zip(names, digests, strict=True))).encode()).hexdigest()


def _piece_sha256(piece: tuple[Path, int]) -> str:
    path, start = piece
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        return hashlib.sha256(file.read(_PIECE_BYTES)).hexdigest()
