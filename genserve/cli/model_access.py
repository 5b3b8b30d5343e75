"""Model access: opens the text models of a repository folder or of a server through one interface."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self, Unpack

from genserve.completion import Completion, Stream
from genserve.errors import GenserveError, ModelNotFound, RepositoryError, closest, suggestion
from genserve.export import (
    DEFAULT_MODEL,
    known_encoder,
    known_model,
    packaged_file,
    pull,
    pull_encoder,
    pull_remedy,
    pulled_name,
)
from genserve.log import at_level
from genserve.machine import total_memory_bytes
from genserve.prompt import Messages, Prompts
from genserve.sampling.sampling_options import SamplingOptions
from genserve.store import default_repository, described, repository_flag

if TYPE_CHECKING:
    from rich.console import Console

    from genserve.cli.flags import RemoteServer
    from genserve.client import Client
    from genserve.export import KnownModel
    from genserve.repository.index import ModelEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """How closely a model's graph agrees with its source, as the export measured it."""

    precision: str
    kv_cache: str  # "float" or "int8"
    top1_agreement: float  # share of positions with the same likeliest token
    perplexity_ratio: float
    divergence: float  # Kullback-Leibler divergence, nats per token


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalModel:
    """One text model of a repository."""

    name: str
    size_bytes: int  # size of the newest version of each stage, in total
    quality: Quality | None  # None: the graph was not exported by genserve
    missing: tuple[str, ...]  # the stages whose folder or file is missing
    base: str | None = None  # the model whose adapter it is; None: it is no adapter


def local_models(repository: Path) -> list[LocalModel]:
    """Return the text models of a repository and their adapters, sorted by name, without loading them.

    Raises:
        RepositoryError: the folder does not exist. A missing store has no models.
    """
    from genserve.repository.index import scan

    if repository == default_repository() and not repository.exists():
        return []
    entries = scan([repository])
    return [
        _describe(entry, entries) if entry.base_model is None else _describe_adapter(entry, entries)
        for entry in entries.values()
        if entry.base_model is not None or _may_generate(entry, entries)
    ]


def choose_model(
    name: str | None, *, repository: Path, models: Mapping[str, LocalModel] | None = None
) -> str:
    """Return the name of the model to load: `name`, or the only model, or the default model.

    `models` has the models of the repository by name; None: the repository is read.

    Raises:
        RepositoryError: the model does not exist, or has no weights.
    """
    models = models or _models_by_name(repository)
    if name is None:
        whole = [model.name for model in models.values() if model.base is None]
        name = whole[0] if len(whole) == 1 else DEFAULT_MODEL
    where, flag = described(repository), repository_flag(repository)
    pull = f"`genserve pull {DEFAULT_MODEL}{flag}`"
    if name not in models and (repository / name).exists():
        raise RepositoryError(
            f"{name!r} in {where} is no text model, or its config is broken", remedy=f"`genserve check{flag}`"
        )
    if name not in models:
        remedy = pull if name == DEFAULT_MODEL else _remedy(name, known=models)
        raise RepositoryError(f"there is no model {name!r} in {where}", remedy=remedy)
    if models[name].missing:
        export = f"`genserve export SOURCE --name {name}{flag}`"
        raise RepositoryError(
            f"model {name!r} in {where} has no weights yet: {', '.join(models[name].missing)}",
            remedy=pull if name == DEFAULT_MODEL else export,
        )
    return name


def bring_models(names: Iterable[str], *, roots: Sequence[Path]) -> list[str]:
    """Return the names of models in repositories, after pulling models that are missing and can be pulled.

    Args:
        names: the models to find; short names and ORG/NAME can be pulled, and * means all models.
        roots: the folders of the repository; pulled models go to the first folder.

    Raises:
        RepositoryError: a model is in no folder, and cannot be pulled.
    """
    found = []
    for name in names:
        local_name = pulled_name(name)
        if local_name is not None:
            root = next((root for root in roots if (root / local_name).exists()), roots[0])
            # A folder of this name that is no text model is served as it is.
            if not (root / local_name).exists() and known_encoder(name):
                _pull(name, repository=root)
            elif not (root / local_name).exists() or local_name in _models_by_name(root):
                bring_model(name, repository=root)
        elif name != "*" and not any((root / name).exists() for root in roots):
            folders = (path for root in roots if root.is_dir() for path in root.iterdir() if path.is_dir())
            known = sorted(path.name for path in folders)
            raise RepositoryError(
                f"there is no model {name!r} in {', '.join(map(described, roots))}",
                remedy=_remedy(name, known=known),
            )
        found.append(local_name or name)
    return found


def bring_model(name: str | None, *, repository: Path | None) -> tuple[Path, str]:
    """Return the repository of a model to load, and the model's name in it; pull the model if it is missing.

    Args:
        name: a model of the repository, or a model that can be pulled: a short name, or ORG/NAME on the
            Hugging Face hub. None: the only model of the repository, or the default model.
        repository: the model repository; None: the store. Only a named model is pulled into another
            repository, which may be a user's own.

    Raises:
        RepositoryError: there is no such model, and it cannot be pulled.
        ExportError: the pull failed.
        MissingDependency: pulling a model from the hub needs packages that are not installed.
        SystemExit: the user does not want the download.
    """
    where = default_repository() if repository is None else repository
    if repository is None:
        remark_on_old_default()
    models = _models_by_name(where) if where.exists() else {}
    if name is None:
        if repository is not None or any(not model.missing for model in models.values()):
            return where, choose_model(None, repository=where, models=models)
        name = DEFAULT_MODEL
    if known_encoder(name):
        raise RepositoryError(
            f"{name} makes vectors of texts, and generates none", remedy="`genserve serve` serves it"
        )
    local_name = pulled_name(name)
    # A folder with this name that is no text model belongs to the user.
    if local_name is None or (local_name not in models and (where / local_name).exists()):
        return where, choose_model(name, repository=where, models=models)
    if local_name not in models or models[local_name].missing:
        _pull(name, repository=where)
    return where, local_name


def _remedy(name: str, *, known: Collection[str]) -> str:
    """Return the remedy for a model that is neither among the known ones nor can be pulled."""
    if known and closest(name, known=known):
        return suggestion(name, known=known)
    here = f"{suggestion(name, known=known)}; " if known else ""
    return here + pull_remedy(name)


def _models_by_name(repository: Path) -> dict[str, LocalModel]:
    return {model.name: model for model in local_models(repository)}


def _pull(name: str, *, repository: Path) -> None:
    from genserve.backends.libraries import require_export_packages
    from genserve.cli.console import ConsoleProgress, make_console

    console = make_console(stderr=True)
    if packaged_file(name) is None:
        require_export_packages(f"pulling {name}")
    if known := known_model(name):
        console.print(_about(known))
        if known.name != DEFAULT_MODEL and not _is_wanted(console):
            raise SystemExit(1)
    console.print(f"pulling {name} into {described(repository)}, once")
    try:
        if encoder := known_encoder(name):
            pull_encoder(encoder, repository=repository, progress=ConsoleProgress())
        else:
            pull(name, repository=repository, progress=ConsoleProgress())
    except KeyboardInterrupt:
        console.print(f"stopped: `genserve pull {name}{repository_flag(repository)}` goes on with it")
        raise


def _about(model: KnownModel) -> str:
    """Return what a download takes, and what it gives."""
    from genserve.cli.console import sized

    total = total_memory_bytes()
    text = (
        f"{model.name}: {sized(model.download_bytes)} to download from {model.source} ({model.licence}), "
        f"then {sized(model.graph_bytes)} on disk and about {sized(model.memory_bytes)} in memory"
    )
    if total is not None and total < model.memory_bytes:
        text += f"; this machine has {sized(total)}"
    return text


def _is_wanted(console: Console) -> bool:
    """Ask whether to download, on a terminal; a program that runs without one has decided."""
    if sys.stdin is None or not (sys.stdin.isatty() and sys.stderr.isatty()):
        return True
    from genserve.cli.chat.keyboard import released_keys

    console.print("download it? [Y/n] ", end="")
    with released_keys():
        return input().strip().lower() in ("", "y", "yes")


def remark_on_old_default() -> None:
    """Print a hint if the current folder has a repository that versions before the store would have used."""
    from genserve.cli.console import make_console

    old = Path("model_repository")
    try:
        names = [model.name for model in local_models(old) if not model.missing] if old.is_dir() else []
    except GenserveError:
        return
    if names:
        make_console(stderr=True).print(
            f"note: ./{old} ({', '.join(names)}) is not used unless --model-repository {old} names it"
        )


def _may_generate(entry: ModelEntry, entries: Mapping[str, ModelEntry]) -> bool:
    """Whether a model is an ensemble with a tokenizer stage, or with a missing stage that may be one.

    An ensemble with an encoder makes vectors or scores.
    """
    if not entry.is_ensemble or entry.config is None:
        return False
    stages = [entries.get(step.model_name) for step in entry.config.ensemble_steps]
    if any(stage and stage.config and stage.config.is_encoder for stage in stages):
        return False
    return any(stage is None or _is_tokenizer(stage) for stage in stages)


def _is_tokenizer(stage: ModelEntry) -> bool:
    return stage.config is not None and stage.config.backend == "tokenizer"


def _describe(ensemble: ModelEntry, entries: Mapping[str, ModelEntry]) -> LocalModel:
    assert ensemble.config is not None
    names = [step.model_name for step in ensemble.config.ensemble_steps]
    stages = [entries[name] for name in names if name in entries and _has_files(entries[name])]
    present = {stage.name for stage in stages}
    return LocalModel(
        name=ensemble.name,
        size_bytes=sum(size_bytes(stage.latest_version()) for stage in stages),
        quality=next(filter(None, map(_quality, stages)), None),
        missing=tuple(name for name in names if name not in present),
    )


def _describe_adapter(adapter: ModelEntry, entries: Mapping[str, ModelEntry]) -> LocalModel:
    base = adapter.base_model or ""
    needed = {base: base in entries, adapter.name: _has_files(adapter)}
    return LocalModel(
        name=adapter.name,
        size_bytes=size_bytes(adapter.latest_version()) if _has_files(adapter) else 0,
        quality=None,
        missing=tuple(name for name, is_there in needed.items() if not is_there),
        base=adapter.base_model,
    )


def _quality(stage: ModelEntry) -> Quality | None:
    """Return the parity of a stage's graph; None: the stage is not an exported graph."""
    from genserve.textmodel.logits_config import read_parity

    # Read the folder of the configured graph; other graphs of the stage have folders of their own.
    folder = Path(stage.config.default_model_filename).parent if stage.config else Path()
    parity = read_parity(stage.latest_version() / folder)
    try:
        return Quality(
            precision=str(parity["precision"]),
            kv_cache=str(parity.get("kv_cache", "float")),
            top1_agreement=float(parity["top1_agreement"]),
            perplexity_ratio=float(parity["perplexity_ratio"]),
            divergence=float(parity["divergence"]),
        )
    except (KeyError, TypeError, ValueError):  # another tool or an older version wrote the file
        return None


def _has_files(stage: ModelEntry) -> bool:
    # In a fresh clone the version folders have nothing but a .gitkeep.
    try:
        return any(stage.latest_version().glob("[!.]*"))
    except RepositoryError:
        return False


def size_bytes(folder: Path) -> int:
    """Return the size of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


class TextGenerator(Protocol):
    """The interface by which commands use a model; `genserve.LLM` implements it."""

    def stream(self, prompt: str, **options: Unpack[SamplingOptions]) -> Stream:
        """Complete a prompt."""

    def chat_stream(
        self, messages: Messages, *, return_progress: bool = False, **options: Unpack[SamplingOptions]
    ) -> Stream:
        """Answer a chat."""

    def complete(self, prompts: Prompts, **options: Unpack[SamplingOptions]) -> tuple[Completion, ...]:
        """Complete prompts."""

    def tokenize(self, prompt: Messages, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Return the token ids of a text or of a chat."""

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of token ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedModel:
    """A loaded model, in this process or on a server."""

    name: str
    max_length: int | None  # the context length in tokens; None: unknown
    text_model: TextGenerator
    default_sampling_params: SamplingOptions  # the options that the model recommends


def open_model(
    name: str | None,
    *,
    repository: Path | None,
    server: RemoteServer | None,
    max_model_len: str | None = None,
) -> AbstractContextManager[OpenedModel]:
    """Load a model, or find it on a server, for a `with`; without a name, the only or the default model.

    A missing local model is pulled, see `bring_model`.

    Args:
        name: the name of the model.
        repository: the folder of local models; None: the store.
        server: the server that has the model; None: it is local.
        max_model_len: the context length of a local model, see `LLM`.

    Raises:
        GenserveError: the model does not exist or cannot be loaded, or the server does not answer.
    """
    if server:
        return _remote_model(name, server=server)
    return _local_model(name, repository=repository, max_model_len=max_model_len)


class ModelSwitch:
    """Holds the open model of a chat, and replaces it by another model."""

    def __init__(
        self,
        open_model: Callable[[str | None], AbstractContextManager[OpenedModel]],
        *,
        names: Callable[[], Collection[str]],
    ) -> None:
        """Store the functions; opens no model yet.

        Args:
            open_model: opens a model; None: the default model.
            names: returns the names of the models that can be opened.
        """
        self.open = open_model
        self.names = names
        self._held = ExitStack()

    def switch(self, name: str | None) -> OpenedModel:
        """Open a model, and close the previous one; raises the errors of `open_model`."""
        with ExitStack() as opening:
            model = opening.enter_context(self.open(name))
            self.adopt(opening.pop_all())
        return model

    def adopt(self, opened: ExitStack) -> None:
        """Hold a model that was opened elsewhere, and close the previous one."""
        before, self._held = self._held, opened
        before.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        self._held.close()


def known_models(repository: Path | None, *, server: RemoteServer | None) -> Collection[str]:
    """Return the names of the models that `open_model` opens, except models of the Hugging Face hub.

    Raises:
        RepositoryError: the repository does not exist.
        Unreachable: the server does not answer.
    """
    if server:
        with server.client() as client:
            return client.models()
    models = local_models(repository or default_repository())
    return sorted({DEFAULT_MODEL, *(model.name for model in models)})


@contextmanager
def loading(name: str) -> Iterator[None]:
    """Show that a model is being loaded into this process. A failure is raised, so it is not logged too."""
    from genserve.cli.console import make_console

    with (
        at_level("genserve.repository.load_errors", logging.CRITICAL),
        at_level("genserve.repository.model_lifecycle", logging.CRITICAL),
        make_console(stderr=True).status(f"loading {name}"),
    ):
        yield


@contextmanager
def _local_model(
    name: str | None, *, repository: Path | None, max_model_len: str | None
) -> Iterator[OpenedModel]:
    folder, name = bring_model(name, repository=repository)
    with loading(name):
        from genserve.llm import LLM

        llm = LLM(name, model_repository=folder, max_model_len=max_model_len)
    with llm:
        yield OpenedModel(
            name=name,
            max_length=llm.max_length,
            text_model=llm,
            default_sampling_params=llm.default_sampling_params,
        )


@contextmanager
def _remote_model(name: str | None, *, server: RemoteServer) -> Iterator[OpenedModel]:
    with server.client() as client:
        known = client.model_cards()
        name = choose_remote(name, list(known))
        yield OpenedModel(
            name=name,
            max_length=known[name].max_length,
            text_model=_RemoteModel(client=client, name=name),
            default_sampling_params=known[name].default_sampling_params,
        )


def choose_remote(name: str | None, known: Sequence[str]) -> str:
    """Return the name of a server's model: `name`, or the server's only model.

    Raises:
        ModelNotFound: the server has no such model, or not exactly one if `name` is None.
    """
    if name is None and len(known) == 1:
        return known[0]
    if not known:
        raise ModelNotFound("the server has no model that generates text", remedy="load one on the server")
    if name is None:
        raise ModelNotFound(
            f"the server has {len(known)} models, and the command names none",
            remedy=f"name one of: {', '.join(known)}",
        )
    if name not in known:
        raise ModelNotFound(f"the server has no model {name!r}", remedy=suggestion(name, known=known))
    return name


@dataclass(frozen=True, slots=True, kw_only=True)
class _RemoteModel:
    """Uses one model of a server as a `TextGenerator`."""

    client: Client
    name: str

    def stream(self, prompt: str, **options: Unpack[SamplingOptions]) -> Stream:
        return self.client.stream(prompt, model=self.name, **options)

    def chat_stream(
        self, messages: Messages, *, return_progress: bool = False, **options: Unpack[SamplingOptions]
    ) -> Stream:
        return self.client.chat_stream(messages, model=self.name, return_progress=return_progress, **options)

    def complete(self, prompts: Prompts, **options: Unpack[SamplingOptions]) -> tuple[Completion, ...]:
        return self.client.complete(prompts, model=self.name, **options)

    def tokenize(self, prompt: Messages, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        return self.client.tokenize(prompt, model=self.name, add_special_tokens=add_special_tokens)

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return self.client.detokenize(token_ids, model=self.name, skip_special_tokens=skip_special_tokens)
