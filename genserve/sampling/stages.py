"""Sampling stages: what a draw goes through between the penalties and the token, by name and in order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from genserve.errors import InvalidRequest

__all__ = ["DRAWING", "STAGES", "acting", "require_coherent_stages"]

# The default order, and the parameters that make each stage act, with the value at which it does not.
STAGES: Mapping[str, Mapping[str, float]] = {
    "temperature": {"temperature": 1.0, "dynatemp_range": 0.0},
    "top_n_sigma": {"top_n_sigma": 0.0},
    "top_h": {"top_h": 0.0},
    "top_k": {"top_k": 0},
    "top_p": {"top_p": 1.0},
    "min_p": {"min_p": 0.0},
    "typical_p": {"typical_p": 1.0},
    "epsilon_cutoff": {"epsilon_cutoff": 0.0},
    "eta_cutoff": {"eta_cutoff": 0.0},
    "xtc": {"xtc_probability": 0.0},
}
# What makes a draw of a token, by parameter, with the value at which it asks for nothing.
DRAWING: Mapping[str, object] = {
    **{name: neutral for parameters in STAGES.values() for name, neutral in parameters.items()},
    "mirostat_mode": 0,
    "samplers": (),
}


def require_coherent_stages(params: Any) -> None:
    """Refuse an order that leaves out what the request asks for, and what mirostat takes the place of.

    Raises:
        InvalidRequest: `field` is `samplers`, or the parameter that would be ignored.
    """
    if params.samplers:
        _require_known_names(params.samplers)
        greedy = params.temperature == 0
        for name in () if greedy else acting(params, [s for s in STAGES if s not in params.samplers]):
            raise InvalidRequest(
                f"{name} is given, and samplers leaves its stage out", field=name, remedy="name it there"
            )
    if params.mirostat_mode:
        order = ["samplers"] if params.samplers else []
        for name in [*order, *acting(params, [s for s in STAGES if s != "temperature"])]:
            raise InvalidRequest(
                f"{name} cannot go with mirostat_mode, which truncates by itself", field=name
            )


def acting(params: Any, stages: Iterable[str]) -> Iterator[str]:
    """Return the parameters of those stages that ask for something."""
    for stage in stages:
        for name, neutral in STAGES[stage].items():
            if getattr(params, name) != neutral:
                yield name


def _require_known_names(names: Sequence[object]) -> None:
    for index, name in enumerate(names):
        field = f"samplers[{index}]"
        if not isinstance(name, str) or name not in STAGES:
            known = ", ".join(STAGES)
            raise InvalidRequest(f"{field} is no stage", field=field, remedy=f"the stages are {known}")
        if name in names[:index]:
            raise InvalidRequest(f"{field} names {name!r} again", field=field, remedy="name it once")
