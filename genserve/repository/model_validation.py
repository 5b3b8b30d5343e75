"""Model validation: all diagnostics of a model in a repository: config, sizes, files and steps."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from genserve.config.diagnostics import Diagnostic, Severity, first_error
from genserve.config.model_config import ModelConfig, OldestStrategy, SpecificVersions
from genserve.config.normalise import num_gpus
from genserve.config.parameter_rules import byte_size
from genserve.config.supported_fields import Role
from genserve.errors import RepositoryError, Status
from genserve.repository.ensemble_rules import ensemble_diagnostics
from genserve.repository.index import ModelEntry, links_out, scan, served_versions
from genserve.repository.model_file_rules import content_diagnostics, placeholder_diagnostics
from genserve.repository.source_rules import decodes, plugin_diagnostics, source_diagnostics
from genserve.repository.text_stages import role_of, stage_owners, text_models
from genserve.tensor import DataType
from genserve.textmodel.logits_config import CacheKind, cache_kind, context_length
from genserve.textmodel.runtimes.kv_cache_memory import total_memory_bytes
from genserve.textmodel.stage_rules import DRAFT_PARAMETERS, draft_diagnostics, stage_diagnostics

logger = logging.getLogger(__name__)

# More than anyone needs, and still quickly allocated.
_MAX_INSTANCES = 4096           # each is a thread or a process
_MAX_SEQUENCES = 2**20          # concurrent, of all instances
_STRING_BYTES = 64              # of an empty string in an array, roughly
# Names that look like a version.
_VERSION_LIKE = re.compile(r"(v|ver|version)?[-_. ]?(?P<number>\d+)([._]\d+)*", re.IGNORECASE)
# The backends whose models are files, and their further files.
_WITH_FILES = ("onnxruntime", "python", "pytorch", "tensorflow", "tokenizer")
_MORE_FILES = {"tokenizer": ("tokenizer_config.json",)}
_BRINGS_FILES = "add the file; `genserve pull` and `genserve export` make those of exported models"


def size_diagnostics(entry: ModelEntry, config: ModelConfig, role: Role | None) -> Iterator[Diagnostic]:
    """Yield the sizes that this machine has no memory for, before they are allocated.

    Args:
        entry: the model.
        config: its config.
        role: in a text model; None: none.
    """
    is_logits = role in (Role.LOGITS, Role.LOGITS_WITHOUT_CACHE)    # an engine runs its sequences
    yield from _instances(entry, config)
    yield from _sequences(entry, config, is_logits=is_logits)
    available = total_memory_bytes()
    if available is None:
        return
    for path, name, num_bytes in _needs(config, is_logits=is_logits):
        if num_bytes > available:
            message = f"{name} would take {num_bytes} bytes; this machine has {available}"
            yield _diagnostic(entry, path, message, remedy="write smaller sizes")
    if role is Role.LOGITS:
        yield from _kv_cache(entry, config, available=available)


def _instances(entry: ModelEntry, config: ModelConfig) -> Iterator[Diagnostic]:
    total = 0
    for index, group in enumerate(config.instance_groups):
        total += max(1, group.count) * max(1, len(group.gpus))
        if total > _MAX_INSTANCES:
            message = (
                f"{total} instances are configured, each with its own thread; the limit is {_MAX_INSTANCES}"
            )
            remedy = "write at most the number of cores, or of GPUs"
            yield _diagnostic(entry, f"instance_group[{index}].count", message, remedy=remedy)
            return


def _sequences(entry: ModelEntry, config: ModelConfig, *, is_logits: bool) -> Iterator[Diagnostic]:
    batching = config.sequence_batching
    count, path = max(1, config.max_batch_size), "max_batch_size"
    if not is_logits:
        if batching is None:
            return
        if isinstance(batching.strategy, OldestStrategy) and batching.strategy.max_candidate_sequences:
            count = batching.strategy.max_candidate_sequences
            path = "sequence_batching.oldest.max_candidate_sequences"
        count *= sum(max(1, group.count) for group in config.instance_groups) or 1
    if count > _MAX_SEQUENCES:
        message = f"{count} concurrent sequences are configured; the limit is {_MAX_SEQUENCES}"
        yield _diagnostic(entry, path, message, remedy="set it to the number of concurrent sequences")


def _kv_cache(entry: ModelEntry, config: ModelConfig, *, available: int) -> Iterator[Diagnostic]:
    """Yield a warning if the limit of a KV cache exceeds the memory of the host."""
    asked = byte_size(config.parameters.get("kv_cache_bytes", "")) or 0
    if asked > available and not num_gpus():
        yield entry.parsed.diagnostic(
            Severity.WARNING,
            "parameters",
            f"kv_cache_bytes is {asked}; this machine has {available} bytes, and a server whose cache grows "
            "beyond them is killed",
            remedy="write less, or leave it out: the default is half of the free memory",
            key="kv_cache_bytes",
        )


def _needs(config: ModelConfig, *, is_logits: bool) -> Iterator[tuple[str, str, int]]:
    """Yield the path of a field, the name of what is allocated for it, and its bytes."""
    for index, sample in enumerate(config.warmups):
        num_bytes = sum(_num_bytes(spec.data_type, spec.dims) for spec in sample.inputs) * sample.batch_size
        yield f"model_warmup[{index}]", f"warmup sample '{sample.name}'", num_bytes
    if not is_logits:   # the states of a logits stage are its KV cache
        states = config.sequence_batching.states if config.sequence_batching else ()
        for index, state in enumerate(states):
            dims = state.dims if state.initial_state is None else state.initial_state.dims
            path, name = f"sequence_batching.state[{index}]", f"the state '{state.input_name}' of a sequence"
            yield path, name, _num_bytes(state.data_type, dims)
        return
    max_num_seqs = max(1, config.max_batch_size)
    for index, spec in enumerate(config.outputs):
        vocab_size = max(1, *spec.dims[-1:])
        name = f"a row of '{spec.name}' for each of {max_num_seqs} sequences"
        path = "max_batch_size" if vocab_size < max_num_seqs else f"output[{index}].dims"
        yield path, name, max_num_seqs * vocab_size * 4
    if cache_kind(config) is CacheKind.NONE:
        try:
            longest = context_length(config)
        except RepositoryError:
            return      # the rules of parameters report it
        name = f"the token ids of {max_num_seqs} sequences of {longest} tokens"
        yield "parameters", name, max_num_seqs * longest * 8


def _num_bytes(data_type: str, dims: Sequence[int]) -> int:
    try:
        itemsize = DataType.from_config_name(data_type).itemsize or _STRING_BYTES
    except KeyError:    # the rules of tensors report it
        itemsize = 1
    return math.prod(max(1, dim) for dim in dims) * itemsize


def _diagnostic(entry: ModelEntry, path: str, message: str, *, remedy: str) -> Diagnostic:
    return entry.parsed.diagnostic(Severity.ERROR, path, message, remedy=remedy)


def repository_diagnostics(
    roots: Iterable[Path], *, config_name: str = "", backend_folders: Iterable[Path] = ()
) -> dict[str, tuple[Diagnostic, ...]]:
    """Return the diagnostics of each model of one or more repositories, by name; empty: none.

    Args:
        roots: see `scan`, also for the other arguments.
        config_name: of the configs of models with more than one.
        backend_folders: of backends written in Python.

    Raises:
        RepositoryError: a root is not a folder.
    """
    roots = list(roots)
    entries = scan(roots, config_name=config_name, backend_folders=backend_folders)
    real_roots = [root.resolve() for root in roots]
    found: dict[str, tuple[Diagnostic, ...]] = {}
    for name, entry in entries.items():
        diagnostics = model_diagnostics(entry, entries)
        # A missing file or a wrong config would be reported twice.
        opened = () if first_error(diagnostics) else _content_diagnostics(entry)
        links = _link_diagnostics(entry, real_roots)
        found[name] = (*diagnostics, *_source_diagnostics(entry), *opened, *links)
    return found


def accept(diagnostics: Iterable[Diagnostic]) -> None:
    """Raise the first error among the diagnostics; without errors, log the warnings.

    Raises:
        RepositoryError: the first error.
    """
    known = list(diagnostics)
    error = first_error(known)
    if error is not None:
        raise error
    for diagnostic in known:
        logger.warning("%s: %s (%s)", diagnostic.where, diagnostic.message, diagnostic.remedy)


def model_diagnostics(entry: ModelEntry, entries: Mapping[str, ModelEntry]) -> tuple[Diagnostic, ...]:
    """Return all diagnostics of a model, those of its config first.

    Args:
        entry: the model.
        entries: all models of the repository, by name.
    """
    diagnostics = list(entry.parsed.diagnostics)
    if entry.config is None:
        return tuple(diagnostics)
    diagnostics += _version_diagnostics(entry, entry.config)
    if entry.is_ensemble:
        diagnostics += ensemble_diagnostics(entry, entries)
    else:
        diagnostics += _file_diagnostics(entry, entry.config)
        diagnostics += _draft_diagnostics(entry, entry.config, entries)
    role = role_of(entry, entry.config, entries)
    served = _served(entry, entry.config)
    diagnostics += stage_diagnostics(entry.parsed, entry.config, role, served=served)
    diagnostics += size_diagnostics(entry, entry.config, role)
    return tuple(diagnostics)


def _draft_diagnostics(
    entry: ModelEntry, config: ModelConfig, entries: Mapping[str, ModelEntry]
) -> Iterator[Diagnostic]:
    if DRAFT_PARAMETERS & config.parameters.keys():
        models = text_models(entries)
        is_stage = entry.name in stage_owners(models)
        yield from draft_diagnostics(entry.parsed, config, text_models=models, is_stage=is_stage)


def _version_diagnostics(entry: ModelEntry, config: ModelConfig) -> Iterator[Diagnostic]:
    versions = entry.versions
    for name in sorted(path.name for path in entry.path.iterdir() if path.is_dir()):
        like = _VERSION_LIKE.fullmatch(name)
        if like and name not in map(str, versions):
            yield Diagnostic(
                severity=Severity.WARNING,
                path=entry.path / name,
                message=f"the folder {name!r} is not a version, and is ignored",
                remedy=f"rename it to {like['number'].lstrip('0') or '1'!r}: a number without leading zeros",
            )
    if isinstance(config.version_policy, SpecificVersions):
        for version in sorted(set(config.version_policy.versions) - set(versions)):
            yield _policy_diagnostic(
                entry,
                Severity.WARNING,
                f"version {version} is specified for model '{entry.name}', but the version directory is not "
                "present",
                remedy=f"add the folder {str(version)!r}, or leave the version out",
            )
    try:
        served_versions(config, versions)
    except RepositoryError as error:
        yield _policy_diagnostic(entry, Severity.ERROR, error.message, remedy=error.remedy)


def _policy_diagnostic(entry: ModelEntry, severity: Severity, message: str, *, remedy: str) -> Diagnostic:
    """Make a diagnostic of the version policy, or of the folder if it has no version at all."""
    if not entry.versions:
        return Diagnostic(severity=severity, path=entry.path, message=message, remedy=remedy)
    return entry.parsed.diagnostic(severity, "version_policy", message, remedy=remedy)


def _served(entry: ModelEntry, config: ModelConfig) -> Sequence[int]:
    """Return the versions whose files are checked; none where the version policy is wrong."""
    try:
        versions = served_versions(config, entry.versions)
    except RepositoryError:
        return ()
    return versions if entry.wanted_version == -1 else [v for v in versions if v == entry.wanted_version]


def _content_diagnostics(entry: ModelEntry) -> Iterator[Diagnostic]:
    """Yield the errors in the content of the files that a load opens."""
    if entry.config is None or entry.config.backend not in _WITH_FILES:
        return
    for version in _served(entry, entry.config):
        yield from content_diagnostics(entry, entry.config, entry.path / str(version))


def _source_diagnostics(entry: ModelEntry) -> Iterator[Diagnostic]:
    """Yield the errors of each model.py, without decoder stages, see `_file_diagnostics`."""
    if entry.config is None or entry.config.backend != "python":
        return
    for version in _served(entry, entry.config):
        file = entry.path / str(version) / entry.config.default_model_filename
        if file.is_file() and file.suffix == ".py" and not decodes(file):
            yield from source_diagnostics(file)


def _link_diagnostics(entry: ModelEntry, real_roots: Iterable[Path]) -> Iterator[Diagnostic]:
    """Yield one warning if links lead out of the repository."""
    links = links_out(entry.path, real_roots)
    if links:
        more = f", and {len(links) - 1} more do" if links[1:] else ""
        yield Diagnostic(
            severity=Severity.WARNING,
            path=links[0],
            message=f"the link leads out of the model repository{more}",
            remedy="the server follows it, unless started with --strict-repository-paths",
        )


def _file_diagnostics(entry: ModelEntry, config: ModelConfig) -> Iterator[Diagnostic]:
    if config.backend not in _WITH_FILES:
        return
    for version in _served(entry, config):
        folder = entry.path / str(version)
        file = folder / config.default_model_filename
        yield from placeholder_diagnostics(
            folder, backend=config.backend, filename=config.default_model_filename
        )
        if config.backend == "python" and file.is_file() and decodes(file):
            yield from plugin_diagnostics(file)
        for name in (config.default_model_filename, *_MORE_FILES.get(config.backend, ())):
            if not (folder / name).exists():
                yield Diagnostic(
                    severity=Severity.ERROR,
                    path=folder,
                    message=f"{name} is missing",
                    remedy=_BRINGS_FILES,
                    status=Status.UNAVAILABLE,
                    at_load=True,
                )
