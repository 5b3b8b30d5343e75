"""Tuned model: writes a chosen setting into the configs of a model's stages."""

from __future__ import annotations

import difflib
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from genserve.config.edit import ConfigChange, change_text
from genserve.errors import ModelNotFound, RepositoryError, suggestion
from genserve.files import replacement
from genserve.repository.index import ModelEntry, scan
from genserve.repository.model_validation import Validator, accept
from genserve.repository.text_stages import stage_owners
from genserve.textmodel.logits_config import is_logits_stage
from genserve.tuning.search_space import Setting, config_change, top1_agreement


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedModel:
    """A logits stage, and the ensemble that it belongs to, if any."""

    logits: ModelEntry
    ensemble: ModelEntry | None
    entries: Mapping[str, ModelEntry]       # all models of the repository

    @property
    def current(self) -> Setting:
        """The setting in the config of the logits stage."""
        config = self.logits.config
        assert config is not None  # a diagnostic was raised otherwise
        return Setting.from_config(config)

    def agreements(self, graphs: Iterable[str]) -> dict[str, float]:
        """Return the `top1_agreement` of the graphs for which it is known."""
        folder = self.logits.latest_version()
        known = {graph: top1_agreement(folder / graph) for graph in graphs}
        return {graph: agreement for graph, agreement in known.items() if agreement is not None}

    def edits(self, setting: Setting) -> list[ConfigEdit]:
        """Return the edits that write a setting into the configs; empty: the configs have it already.

        All stages get the batch size, since an ensemble's batch size must not exceed a stage's. A shared
        stage keeps at least the batch size that its other ensembles need.

        Raises:
            RepositoryError: a config cannot be read or edited.
        """
        edits = [self._edit(entry, setting) for entry in self._stages(setting.batch_size)]
        return [edit for edit in edits if edit.before != edit.after]

    def _stages(self, batch_size: int) -> list[ModelEntry]:
        """Return the models in an order in which the ensemble's batch size never exceeds a stage's."""
        if self.ensemble is None or self.ensemble.config is None:
            return [self.logits]
        names = dict.fromkeys(step.model_name for step in self.ensemble.config.ensemble_steps)
        stages = [self.entries[name] for name in names]
        is_more = batch_size > self.ensemble.config.max_batch_size
        return [*stages, self.ensemble] if is_more else [self.ensemble, *stages]

    def _edit(self, entry: ModelEntry, setting: Setting) -> ConfigEdit:
        config, path = entry.config, entry.parsed.path.resolve()
        assert config is not None  # a diagnostic was raised otherwise
        batch_size = max(setting.batch_size, self._needed(entry))
        if entry.name == self.logits.name:
            change = config_change(replace(setting, batch_size=batch_size), entry)
        else:
            # A stage without batching keeps batch size 0: its tensors have no batch dimension.
            fields = {"max_batch_size": batch_size} if config.max_batch_size > 0 else {}
            change = ConfigChange(fields=fields, parameters={})
        before = _read(path)
        try:
            return ConfigEdit(path=path, before=before, after=change_text(before, change))
        except RepositoryError as error:
            raise RepositoryError(f"{path}: {error.message}", remedy=error.remedy) from error

    def _needed(self, entry: ModelEntry) -> int:
        """Return the batch size that other ensembles need of a stage."""
        needed = [
            other.config.max_batch_size
            for other in self.entries.values()
            if other.config is not None
            and other is not self.ensemble
            and any(step.model_name == entry.name for step in other.config.ensemble_steps)
        ]
        return max(needed, default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigEdit:
    """A config.pbtxt before and after an edit."""

    path: Path
    before: str
    after: str

    def diff(self) -> str:
        """Return the changed lines, as `diff -u` does."""
        return "".join(
            difflib.unified_diff(
                self.before.splitlines(keepends=True),
                self.after.splitlines(keepends=True),
                fromfile=str(self.path),
                tofile=str(self.path),
                n=0,
            )
        )


def find_model(name: str, *, repository: Path) -> TunedModel:
    """Find a model to tune, by its own name or the name of its logits stage.

    Raises:
        ModelNotFound: there is no such model.
        RepositoryError: the folder does not exist, or the model is not a text model or has an error.
    """
    entries = scan([repository])
    if name not in entries:
        remedy = suggestion(name, known=entries)
        raise ModelNotFound(f"there is no model {name!r} in {repository}", remedy=remedy)
    validator = Validator(entries)
    chains = validator.text_models
    owner = name if name in chains else stage_owners(chains).get(name)
    if owner is None and not is_logits_stage(entries[name].config):
        accept(validator.diagnostics(entries[name]))    # an error may be why it is no text model
        raise RepositoryError(
            f"model {name!r} is not a text model, so there is nothing to tune",
            remedy=f"text models: {', '.join(chains) or 'none; `genserve pull smollm2` installs one'}",
        )
    model = TunedModel(
        logits=chains[owner]["logits"] if owner else entries[name],
        ensemble=entries[owner] if owner else None,
        entries=entries,
    )
    for entry in filter(None, (model.logits, model.ensemble)):
        accept(validator.diagnostics(entry))
    return model


def write_edits(edits: list[ConfigEdit]) -> None:
    """Write configs, each file atomically.

    Raises:
        RepositoryError: a file cannot be written; the files before it in the list have been written.
    """
    for edit in edits:
        try:
            with replacement(edit.path) as complete:
                complete.write_bytes(edit.after.encode("utf-8"))
                shutil.copymode(edit.path, complete)
        except OSError as error:
            raise RepositoryError(
                f"{edit.path} cannot be written: {error.strerror}",
                remedy="make the folder writable, or make the changes of `--dry-run` by hand",
            ) from error


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")    # text mode would change the line ends
    except (OSError, UnicodeDecodeError) as error:
        raise RepositoryError(f"{path} cannot be read: {error}", remedy="check that it exists") from error
