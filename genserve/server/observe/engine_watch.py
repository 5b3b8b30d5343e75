"""Engine watch: notices an engine that hangs with its requests, and one that goes on again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from genserve.engine.engine_thread import EngineThread
from genserve.log import quoted
from genserve.repository.served_models import ServedModels

logger = logging.getLogger(__name__)

_INTERVAL_S = 1
# The time within a step after which a thread that does not use the processor hangs: a probe learns it within
# 5 s.
_IDLE_CHECKS = 4
# A thread that computes may be in a long step of a large model, of at most 256 tokens. It hangs after this
# time, or after ten times the longest step so far.
_COMPUTING_CHECKS = 60
_LONGER_THAN_BEFORE = 10
# A thread that polls or waits for a lock uses less of the processor than this share.
_COMPUTING_SHARE = 0.02


@dataclass(slots=True)
class _Sample:
    """The last state of an engine, and the number of checks since it has changed."""

    turns: int
    cpu_s: float | None
    since_turn: int = 0     # checks
    idle: int = 0           # checks of these in which its thread did not compute, one after the other
    longest: int = 0        # most checks that a step took


class EngineWatch:
    """Sets `stalled` of the engines that hang, and logs when one begins and ceases to.

    It counts its own checks instead of reading a clock: a process that was stopped, or gets little of the
    processor, checks rarely too, and no engine is suspected because of it. An idle engine does not hang.
    """

    def __init__(self, engines: Callable[[], Iterable[tuple[str, EngineThread]]]) -> None:
        """Watch what `engines` returns: the names of models, and their engines."""
        self._engines = engines
        self._samples: WeakKeyDictionary[EngineThread, _Sample] = WeakKeyDictionary()

    async def run(self) -> None:
        """Check once a second until cancelled."""
        while True:
            await asyncio.sleep(_INTERVAL_S)
            self.check()

    def check(self) -> None:
        """Look at every engine once."""
        for name, engine in self._engines():
            stalled = self._stalls(engine)
            if stalled and not engine.stalled:
                logger.error(
                    "the engine of %s hangs: it has %d requests, and has not begun another step for %d s; "
                    "the model is not ready until it does; if it does not, restart the server",
                    quoted(name),
                    engine.num_accepted,
                    self._samples[engine].since_turn * _INTERVAL_S,
                )
            elif engine.stalled and not stalled:
                logger.warning("the engine of %s goes on", quoted(name))
            engine.stalled = stalled

    def _stalls(self, engine: EngineThread) -> bool:
        turns, cpu_s = engine.num_turns, engine.cpu_s()
        sample = self._samples.get(engine)
        if sample is None or not (engine.alive and engine.num_accepted) or turns != sample.turns:
            longest = 0 if sample is None else max(sample.longest, sample.since_turn)
            self._samples[engine] = _Sample(turns, cpu_s, longest=longest)
            return False
        sample.since_turn += 1
        # What is unknown is taken to compute.
        used_s = _INTERVAL_S if cpu_s is None or sample.cpu_s is None else cpu_s - sample.cpu_s
        sample.idle = sample.idle + 1 if used_s <= _COMPUTING_SHARE * _INTERVAL_S else 0
        sample.cpu_s = cpu_s
        longest_allowed = max(_COMPUTING_CHECKS, _LONGER_THAN_BEFORE * sample.longest)
        return sample.idle >= _IDLE_CHECKS or sample.since_turn >= longest_allowed


def engines_of(repository: ServedModels) -> list[tuple[str, EngineThread]]:
    """Return the names of the text models of a repository, and their engines, which are of this process."""
    engines = [(model.name, model.engine) for model in repository.text_models]
    return [(name, engine) for name, engine in engines if isinstance(engine, EngineThread)]
