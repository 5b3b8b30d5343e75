"""The command `genserve tune`."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from genserve.cli.completion_command import model_names
from genserve.cli.flags import JSON_FLAG, RepositoryFlags
from genserve.errors import RepositoryError
from genserve.log import at_level
from genserve.settings import Flag, flag

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from genserve.tuning.measurement import BestSetting, Goal, Measurement, Samples
    from genserve.tuning.search_space import SearchSpace, Setting
    from genserve.tuning.tuned_model import ConfigEdit, TunedModel

_MAX_STOLEN_SHARE = 0.1     # share of the time that other programs may use: more would distort the result


@dataclass(frozen=True, kw_only=True)
class TuneFlags(RepositoryFlags):
    """The options of `genserve tune`."""

    model: str | None = flag(
        None,
        Flag(
            help="Default: the only text model, or smollm2.",
            is_argument=True,
            variable="GENSERVE_MODEL",
            complete=model_names,
        ),
    )
    objective: Literal["throughput", "latency"] = flag(
        "throughput",
        Flag(help="Most tokens per second, or the shortest time between tokens of a single request."),
    )
    max_inter_token_ms: float = flag(100, Flag(help="Upper bound of the time between two tokens.", minimum=0))
    batch_size: list[int] | None = flag(
        None, Flag(help="Size to measure; repeatable. Default: 1, 2, 4 ... 64.", minimum=1)
    )
    threads: list[int] | None = flag(
        None, Flag(help="Number to measure; repeatable. Default: all cores, half, a quarter.", minimum=1)
    )
    context: list[int] | None = flag(
        None, Flag(help="Tokens in the KV cache; repeatable. Default: 64 and 512.", minimum=1)
    )
    min_top1_agreement: float = flag(
        0.9, Flag(help="Minimum agreement of another graph with its source.", minimum=0, maximum=1)
    )
    budget_seconds: float = flag(
        60, Flag(help="Time to measure; every setting is measured at least once.", minimum=0)
    )
    step_times: Path | None = flag(
        None,
        Flag(
            help="Then measure whole engine steps with the config, for half as long, into this file for "
            "`genserve plan`."
        ),
    )
    plot: Path | None = flag(None, Flag(help="Plot the measurements to this .png, .svg or .pdf."))
    dry_run: bool = flag(False, Flag(help="Show the changes, do not write them."))
    allow_busy: bool = flag(
        False, Flag(help="Write the changes even if other programs used a tenth of the time or more.")
    )
    json_: bool = flag(False, JSON_FLAG)


def tune(flags: TuneFlags) -> None:
    """Measure batch sizes, threads and graphs of a model on this machine, and write the best to config.pbtxt.

    Ctrl-C ends the measurement: the results so far are shown, and nothing is written. If other programs used
    so much of the time that the results depend on them, nothing is written either, and the exit code is 1.
    """
    from genserve.cli.console import print_json
    from genserve.cli.plots import check_folder, check_plot, draw_settings
    from genserve.tuning.measurement import Goal, Objective
    from genserve.tuning.search_space import make_search_space
    from genserve.tuning.tuned_model import write_edits

    if flags.plot is not None:
        check_plot(flags.plot)
    if flags.step_times is not None:
        check_folder(flags.step_times, of="step times")
    name, tuned = _find(flags.model, repository=flags.model_repository)
    space = make_search_space(
        tuned.logits,
        batch_sizes=flags.batch_size or (),
        threads=flags.threads or (),
        contexts=flags.context or (),
    )
    goal = Goal(objective=Objective(flags.objective), max_inter_token_s=flags.max_inter_token_ms / 1e3)
    samples, is_interrupted = _measure(tuned, space, goal=goal, budget_s=flags.budget_seconds)
    tuning = _Tuning(
        name=name,
        goal=goal,
        current=tuned.current,
        agreements=tuned.agreements(space.graphs),
        measurements=samples.measurements(),
        stolen_share=samples.stolen_share,
        is_interrupted=is_interrupted,
    )
    choice = tuning.choose(min_agreement=flags.min_top1_agreement)
    if choice is not None and flags.plot is not None:
        title = f"genserve tune {name}"
        draw_settings(tuning.measurements, choice=choice, goal=goal, title=title, path=flags.plot)
    if not flags.json_:
        _print_measurements(tuning, choice=choice)
    edits = _edits(tuned, choice, is_interrupted=is_interrupted)
    is_rejected = bool(edits) and tuning.is_busy and not (flags.allow_busy or flags.dry_run)
    is_written = bool(edits) and not (is_rejected or flags.dry_run)
    if is_written:
        write_edits(edits)
    if flags.json_:
        print_json(_document(tuning, choice=choice, edits=edits, is_written=is_written))
    else:
        _print_edits(edits, is_interrupted=is_interrupted, dry_run=flags.dry_run, is_rejected=is_rejected)
    if is_interrupted or is_rejected:
        raise SystemExit(130 if is_interrupted else 1)
    if flags.step_times is not None:
        _write_step_times(tuned, flags.step_times, budget_s=flags.budget_seconds / 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tuning:
    """The measurements of one run, and their goal."""

    name: str
    goal: Goal
    current: Setting
    agreements: Mapping[str, float]     # top-1 agreement of graphs with their source, by graph
    measurements: Sequence[Measurement]
    stolen_share: float                 # share of the time that other programs used
    is_interrupted: bool

    @property
    def is_busy(self) -> bool:
        """Whether the times depend more on other programs than on the model."""
        return self.stolen_share > _MAX_STOLEN_SHARE

    def choose(self, *, min_agreement: float) -> BestSetting | None:
        """Return the best setting; None: nothing was measured."""
        from genserve.tuning.measurement import choose, eligible

        candidates = eligible(
            self.measurements, agreements=self.agreements, least=min_agreement, current=self.current
        )
        return choose(candidates, goal=self.goal, current=self.current) if candidates else None


def _find(model: str | None, *, repository: Path | None) -> tuple[str, TunedModel]:
    """Return a model by its own name or its logits stage's; a missing model is pulled if possible."""
    from genserve.cli.model_choice import bring_model
    from genserve.export import pulled_name
    from genserve.store import default_repository
    from genserve.tuning.tuned_model import find_model

    if model is None or pulled_name(model) is not None:
        folder, name = bring_model(model, repository=repository)
    else:   # the name may be a logits stage, which `bring_model` does not know
        folder, name = repository or default_repository(), model
    return name, find_model(name, repository=folder)


def _write_step_times(tuned: TunedModel, path: Path, *, budget_s: float) -> None:
    """Measure the steps of the model with its present configs, and write the file."""
    from genserve.cli.console import ConsoleProgress
    from genserve.planner.serving_cost import measure_serving_cost, serving
    from genserve.tuning.engine_steps import measure_engine

    if tuned.ensemble is None:
        raise RepositoryError(
            f"{tuned.logits.name!r} belongs to no text model, so an engine has no steps with it",
            remedy="add an ensemble of a tokenizer, this stage and a decoder",
        )
    name, repository = tuned.ensemble.name, tuned.ensemble.path.parent
    try:
        with at_level("genserve", logging.ERROR), ConsoleProgress().task("measuring steps of the engine"):
            engine = measure_engine(name, repository=repository, budget_s=budget_s)
        server = serving(name, logits=tuned.logits.path.name, repository=repository)
        with ConsoleProgress().task("measuring a server"), server as url:
            engine = replace(engine, serving=measure_serving_cost(engine, url=url))
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    engine.write(path)


def _measure(tuned: TunedModel, space: SearchSpace, *, goal: Goal, budget_s: float) -> tuple[Samples, bool]:
    """Return the samples, and whether Ctrl-C ended the measurement."""
    from genserve.cli.console import ConsoleProgress
    from genserve.tuning.measurement import Samples, take_samples

    samples, task_name = Samples(), f"measuring {tuned.logits.name}"
    max_step_s = 2 * goal.max_inter_token_s     # noise does not explain a larger distance from the bound
    try:
        task = ConsoleProgress().task(task_name, total=round(budget_s * 1e3))
        with at_level("genserve", logging.ERROR), task as advance:     # each load repeats the warnings
            last_s = time.monotonic()
            for sample in take_samples(tuned.logits, space, budget_s=budget_s, max_step_s=max_step_s):
                samples.add(sample)
                now_s = time.monotonic()
                advance(round((now_s - last_s) * 1e3))
                last_s = now_s
    except KeyboardInterrupt:
        return samples, True
    return samples, False


def _edits(tuned: TunedModel, choice: BestSetting | None, *, is_interrupted: bool) -> list[ConfigEdit]:
    """Return the edits that write the best setting into the configs; none after Ctrl-C.

    Raises:
        RepositoryError: nothing could be measured.
    """
    if is_interrupted:
        return []
    if choice is None:
        raise RepositoryError(
            f"no setting of {tuned.logits.name!r} has room in its KV cache for the contexts of the others",
            remedy="a smaller --context, or more `kv_cache_bytes` in its config",
        )
    return tuned.edits(choice.best.setting)


def _document(
    tuning: _Tuning, *, choice: BestSetting | None, edits: Sequence[ConfigEdit], is_written: bool
) -> dict[str, object]:
    """Return the document that `--json` prints."""
    best = choice.best if choice else None
    measurements = [
        {
            "graph": m.setting.graph,
            "threads": m.setting.threads,
            "batch_size": m.setting.batch_size,
            "top1_agreement": tuning.agreements.get(m.setting.graph),
            "tokens_per_s": m.tokens_per_s,
            "inter_token_ms": m.inter_token_s * 1e3,
            "step_ms": [{"context": context, "ms": step_s * 1e3} for context, step_s in m.step_s.items()],
            "kv_cache_bytes": m.cache_bytes,
            "is_current": m.setting == tuning.current,
            "is_best": m is best,
        }
        for m in tuning.measurements
    ]
    return {
        "model": tuning.name,
        "objective": tuning.goal.objective,
        "max_inter_token_ms": tuning.goal.max_inter_token_s * 1e3,
        "meets_max_inter_token_ms": choice is not None and choice.meets_bound,
        "measurements": measurements,
        "stolen_share": tuning.stolen_share,
        "is_interrupted": tuning.is_interrupted,
        "changes": [{"path": str(edit.path), "diff": edit.diff()} for edit in edits],
        "is_written": is_written,
    }


def _print_measurements(tuning: _Tuning, *, choice: BestSetting | None) -> None:
    from rich.table import Table

    from genserve.cli.console import print_table

    best, agreements = choice.best if choice else None, tuning.agreements
    contexts = list(best.step_s) if best else []
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("graph", no_wrap=True)
    times = [f"ms at {context}" for context in contexts]
    for heading in ("top-1", "threads", "batch", "tokens/s", *times, "MiB"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("")
    for m in tuning.measurements:
        remarks = ["now"] * (m.setting == tuning.current) + ["best"] * (m is best)
        table.add_row(
            m.setting.graph,
            f"{agreements[m.setting.graph]:.1%}" if m.setting.graph in agreements else "",
            str(m.setting.threads),
            str(m.setting.batch_size),
            f"{m.tokens_per_s:.0f}",
            *(f"{m.step_s[context] * 1e3:.1f}" for context in contexts),
            f"{m.cache_bytes / 2**20:.0f}",
            ", ".join(remarks),
            style="bold" if m is best else None,
        )
    print_table(table)
    if tuning.is_busy:
        print(f"other programs used {tuning.stolen_share:.0%} of the time: tune again without them")
    if choice is not None:
        _print_choice(tuning, choice)


def _print_choice(tuning: _Tuning, choice: BestSetting) -> None:
    if not choice.meets_bound:
        bound = f"{tuning.goal.max_inter_token_s * 1e3:g} ms"
        print(f"no setting keeps {bound} between tokens; the best is the nearest")
    for m in tuning.measurements:
        if m.setting == tuning.current:
            print(f"now:  {_line(m)}")
    print(f"best: {_line(choice.best)}")


def _line(m: Measurement) -> str:
    setting = f"batch {m.setting.batch_size}, threads {m.setting.threads}, {m.setting.graph}"
    return f"{setting}: {m.tokens_per_s:.0f} tokens/s, at most {m.inter_token_s * 1e3:.0f} ms between tokens"


def _print_edits(
    edits: Sequence[ConfigEdit], *, is_interrupted: bool, dry_run: bool, is_rejected: bool
) -> None:
    for edit in edits:
        print(edit.diff(), end="")
    if is_interrupted:
        print("interrupted: nothing was written")
    elif not edits:
        print("the configs already have this setting")
    elif dry_run:
        print("nothing was written: --dry-run")
    elif is_rejected:
        print("nothing was written, since other programs disturbed the measurement; --allow-busy writes it")
    else:
        print(
            "written; a running server reads it at the next load of the model, "
            "which --model-control-mode poll starts by itself"
        )
