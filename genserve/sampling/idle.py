"""Idle parameters: what a request gives, and what nothing comes of beside its others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from genserve.sampling.params import SamplingParams
from genserve.sampling.stages import DRAWING

__all__ = ["idle_parameters"]

_PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")
# By parameter: those of which one must ask for something.
_SWITCHES: Mapping[str, Sequence[str]] = {
    "xtc_threshold": ("xtc_probability",),
    "mirostat_tau": ("mirostat_mode",),
    "mirostat_eta": ("mirostat_mode",),
    "dynatemp_exponent": ("dynatemp_range",),
    "penalty_window": _PENALTIES,
    "dry_base": ("dry_multiplier",),
    "dry_allowed_length": ("dry_multiplier",),
    "dry_penalty_last_n": ("dry_multiplier",),
    "dry_sequence_breakers": ("dry_multiplier",),
}


def idle_parameters(params: SamplingParams) -> list[str]:
    """Return the parameters that are not as by default and change nothing.

    These are the details of a rule that is off, and where nothing is drawn, all that a draw is made from.
    """
    given = frozenset(params.changed_names())
    idle = [name for name, switches in _SWITCHES.items() if name in given and given.isdisjoint(switches)]
    greedy = params.temperature == 0
    return idle + [name for name in DRAWING if greedy and name in given]
