"""Measured steps: how long the steps of an engine take, in the file that `genserve plan` reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import orjson

from genserve.errors import InvalidRequest

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSize:
    """The quantities that determine the duration of a step."""

    decodes: int            # sequences with one token
    context_tokens: int     # the sum of the decodes' cached tokens
    prompt_tokens: int      # tokens of prompts
    prompt_pairs: int       # the sum, over the prompt tokens, of the tokens before each: what attention reads
    rows: int               # rows of logits: one for each decode and each prompt that the step completes


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """The median time of some steps of one size."""

    size: StepSize
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """The capacity of an engine."""

    max_num_seqs: int               # sequences of a step
    max_num_batched_tokens: int     # tokens of a step
    max_length: int                 # tokens of a sequence
    num_blocks: int                 # blocks of the KV cache
    block_size: int                 # tokens of a block
    num_state_slots: int = 0        # slots of recurrent states


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingCost:
    """The time that a server adds to the steps of its engine: HTTP, templates, tokenizing and sending."""

    request_s: float = 0.0      # from the arrival of a request to the engine's queue
    busy_s: float = 0.0         # added by the arrival of a request to the steps of other requests
    step_s: float = 0.0         # added to each step
    token_s: float = 0.0        # added to a step for each token that is sent


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredEngine:
    """The measured steps of a model on one machine, which describe a replica to the planner."""

    model: str
    machine: str
    limits: EngineLimits
    serving: ServingCost
    steps: Sequence[MeasuredStep]

    def write(self, path: Path) -> None:
        """Write the measurement as JSON, with times in seconds."""
        steps = [asdict(step.size) | {"seconds": step.seconds} for step in self.steps]
        document = asdict(self) | {"steps": steps}
        path.write_bytes(orjson.dumps(document, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


def read_measured_engine(path: Path) -> MeasuredEngine:
    """Read a file that `MeasuredEngine.write` has written.

    Raises:
        InvalidRequest: the file cannot be read, or has another format.
    """
    try:
        document = orjson.loads(path.read_bytes())
        steps = [
            MeasuredStep(size=_of(StepSize, step), seconds=float(step["seconds"]))
            for step in document["steps"]
        ]
        engine = MeasuredEngine(
            model=str(document["model"]),
            machine=str(document["machine"]),
            limits=_of(EngineLimits, document["limits"]),
            serving=_of(ServingCost, document["serving"]),
            steps=steps,
        )
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error.strerror}", field="step_times") from error
    except (ValueError, TypeError, KeyError) as error:
        raise InvalidRequest(
            f"{path} has no step times: {error!r}",
            field="step_times",
            remedy="write it with `genserve tune MODEL --step-times FILE`",
        ) from None
    if not steps or not all(step.seconds > 0 for step in steps):
        message = f"{path} has no steps, or one that takes no time"
        raise InvalidRequest(message, field="step_times", remedy="measure it again")
    return engine


def _of(kind: type[T], values: Mapping[str, Any]) -> T:
    # An older file lacks what has been added since, with a default.
    names = [field.name for field in fields(kind) if field.default is MISSING or field.name in values]  # type: ignore[arg-type]
    return kind(**{name: values[name] for name in names})
