"""The command `genserve calibrate`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from genserve.cli.completion_command import model_names
from genserve.cli.flags import JSON_FLAG, RepositoryFlags
from genserve.errors import InvalidRequest, RepositoryError, require
from genserve.settings import Flag, flag

if TYPE_CHECKING:
    from collections.abc import Callable

    from genserve.textmodel.calibration import Fit
    from genserve.textmodel.decisions import Probabilities, Question
    from genserve.textmodel.text_model import TextModel

MIN_ANSWERS = 20    # of a type of question: four in each fold of the cross-validation
_MAX_FILE_BYTES = 256 << 20
_MAX_THREADS = 16


@dataclass(frozen=True, kw_only=True)
class CalibrateFlags(RepositoryFlags):
    """The flags of `genserve calibrate`."""

    model: str = flag(MISSING, Flag(help="A text model.", is_argument=True, complete=model_names))
    file: Path = flag(
        MISSING,
        Flag(
            help='JSON lines: bodies of /v1/systemone, each with the right "answers" by the names of its '
            "questions: an option of a choice, true or false of a noul, the number of a score's level.",
            is_argument=True,
        ),
    )
    dry_run: bool = flag(False, Flag(help="Show the temperatures, do not write them."))
    json_: bool = flag(False, JSON_FLAG)


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledAnswer:
    """A question about a state, and which option is right."""

    line: int
    state: Any
    instructions: str | None
    question: Question
    label: int


def calibrate(flags: CalibrateFlags) -> None:
    """Fit the probabilities of `/v1/systemone` to labelled answers, and write temperatures next to the model.

    A line of the file: {"state": "Where is it?", "questions": {"angry": {"type": "noul", "instructions": "Is
    it angry?"}}, "answers": {"angry": false}}. Of each type of question (choice, noul, score) at least 20
    answers fit one temperature, by which log-probabilities are divided: it changes how sure the model is, not
    which option is the likeliest. The calibration error is the mean distance between the probability of the
    likeliest option and how often it is right; that with the temperatures is measured on lines to which they
    were not fitted, in five folds. Servers use them after the next load of the model, and only as long as its
    files are the same.
    """
    from genserve.cli.console import print_json
    from genserve.cli.model_choice import bring_model
    from genserve.cli.opened_models import started
    from genserve.repository.repository import Repository
    from genserve.textmodel.calibration import Calibration, calibrated_model, write_calibration
    from genserve.textmodel.receipts import described

    answers = read_labelled(flags.file)
    folder, name = bring_model(flags.model, repository=flags.model_repository)
    repository = Repository([folder])
    stages = repository.text_stages(name)
    if stages is None:
        raise RepositoryError(f"{name!r} is not a text model", remedy="see `genserve models`")
    if base := repository.lifecycle.adapters.get(name):
        raise RepositoryError(
            f"{name!r} is an adapter, and has no temperatures of its own", remedy=f"calibrate {base!r}"
        )
    with started(repository, name) as model:
        logprobs = _asked(model, answers, file=flags.file)
        facts = calibrated_model(described(model.facts()))
    fits = _fits(answers, logprobs)
    path = None
    if not flags.dry_run:
        temperatures = {kind: fit.temperature for kind, fit in fits.items()}
        path = write_calibration(
            stages["logits"].latest_version(), Calibration(temperatures=temperatures, model=facts), fits=fits
        )
    if flags.json_:
        print_json({"model": name, "fits": {kind: fit.as_dict() for kind, fit in fits.items()}})
        return
    for kind, fit in fits.items():
        print(
            f"{kind}: {fit.num_answers} answers, of which {fit.accuracy:.0%} are right; temperature "
            f"{fit.temperature:.3f}; calibration error {fit.error_before:.4f} before, {fit.error_after:.4f} "
            "after"
        )
    if path is not None:
        print(f"written to {path}; load the model again to use it")


def read_labelled(path: Path) -> list[LabelledAnswer]:
    """Return the labelled answers of a file.

    Raises:
        InvalidRequest: the file cannot be read, a line is not valid, or a type of question has fewer than
            `MIN_ANSWERS`. The message has the number of the line and the place in it.
    """
    from genserve.files import read_regular_text

    try:
        text = read_regular_text(path, max_bytes=_MAX_FILE_BYTES)
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error.strerror}", field="file") from None
    answers: list[LabelledAnswer] = []
    for number, line in enumerate(text.split("\n"), start=1):    # texts may hold U+2028 as it is
        if not line.strip():
            continue
        try:
            answers += _read_line(line, number)
        except InvalidRequest as error:
            raise InvalidRequest(
                f"line {number} of {path}: {error.message}", field=error.field, remedy=error.remedy
            ) from None
    counts: dict[str, int] = {}
    for answer in answers:
        counts[answer.question.type] = counts.get(answer.question.type, 0) + 1
    few = next((kind for kind, count in counts.items() if count < MIN_ANSWERS), None)
    if few is not None or not counts:
        has = f"{counts[few]} answers to questions of type {few}" if few else "no answers"
        raise InvalidRequest(
            f"{path} has {has}", field="file", remedy=f"label at least {MIN_ANSWERS} of each type"
        )
    return answers


def _read_line(line: str, number: int) -> Iterator[LabelledAnswer]:
    from genserve.prompt import inside
    from genserve.textmodel.decisions import read_question

    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"it is not JSON: {error}", field="file") from None
    require(isinstance(fields, dict), "the line", "must be an object")
    questions, labels = fields.get("questions"), fields.get("answers")
    require(isinstance(fields.get("state"), str | dict | list), "state", "must be text, an object or a list")
    require(isinstance(questions, dict), "questions", "must be an object")
    require(isinstance(labels, dict), "answers", "must be an object: the right answer to each question")
    require(labels.keys() <= questions.keys(), "answers", "has a name that is not in questions")
    instructions = fields.get("instructions")
    require(isinstance(instructions, str | None), "instructions", "must be text")
    for name, label in labels.items():
        asked = questions[name]
        with inside(f"questions.{name}"):
            require(isinstance(asked, dict) and isinstance(asked.get("type"), str), "type", "is missing")
            question = read_question(
                asked["type"], instructions=asked.get("instructions"), criteria=asked.get("criteria")
            )
        yield LabelledAnswer(
            line=number,
            state=fields["state"],
            instructions=instructions,
            question=question,
            label=_label(question, label, field=f"answers.{name}"),
        )


def _label(question: Question, label: Any, *, field: str) -> int:
    """Return the index of the option that a label names; raises InvalidRequest."""
    if question.type == "noul":
        require(isinstance(label, bool), field, "must be true or false")
        return 0 if label else 1
    if question.type == "score":
        valid = isinstance(label, int) and not isinstance(label, bool) and 0 <= label < len(question.options)
        require(valid, field, f"must be a level, 0 to {len(question.options) - 1}")
        return int(label)
    names = [option.name for option in question.options]
    require(label in names, field, "must be one of the question's options")
    return names.index(label)


def _asked(model: TextModel, answers: Sequence[LabelledAnswer], *, file: Path) -> list[Probabilities]:
    """Return the log-probabilities of the options of each question; raises the errors of `decide`."""
    from genserve.textmodel.decisions import decide

    def ask(answer: LabelledAnswer) -> Probabilities:
        try:
            return decide(model, answer.state, answer.question, instructions=answer.instructions)
        except InvalidRequest as error:
            raise InvalidRequest(
                f"line {answer.line} of {file}: {error.message}", field=error.field, remedy=error.remedy
            ) from None

    found = []
    with (
        _progress(len(answers)) as advance,
        ThreadPoolExecutor(min(_MAX_THREADS, model.max_num_seqs)) as threads,
    ):
        try:
            for one in threads.map(ask, answers):
                found.append(one)
                advance()
        except BaseException:
            threads.shutdown(cancel_futures=True)
            raise
    return found


@contextmanager
def _progress(total: int) -> Iterator[Callable[[], None]]:
    """Show how many answers the model has given, on a terminal; yield a function that counts one."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from genserve.cli.console import make_console

    console = make_console(stderr=True)
    columns = (TextColumn("{task.completed}/{task.total} answers"), BarColumn(30), TimeRemainingColumn())
    hidden = not console.is_terminal or console.is_dumb_terminal
    with Progress(*columns, console=console, disable=hidden, transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda: bar.update(task, advance=1)


def _fits(answers: Sequence[LabelledAnswer], logprobs: Sequence[Probabilities]) -> Mapping[str, Fit]:
    """Return the fit of each type of question; the answers of a line are in one fold."""
    from genserve.textmodel.calibration import fit

    fits: dict[str, Fit] = {}
    for kind in dict.fromkeys(answer.question.type for answer in answers):
        own = [index for index, answer in enumerate(answers) if answer.question.type == kind]
        fits[kind] = fit(
            [logprobs[index] for index in own],
            [answers[index].label for index in own],
            groups=[answers[index].line for index in own],
        )
    return fits
