"""Refused methods: ways of decoding that are known elsewhere and not offered here, and why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from genserve.errors import InvalidRequest

__all__ = ["without_refused_methods"]

_NO_HIDDEN_STATES = "needs the hidden states of the model, and the logits stage gives logits alone"
_SECOND_PROMPT = "needs a second forward without the prompt at each step, which the engine does not run"

# By parameter: why not, and the value with which a client asks for nothing.
_REFUSED: Mapping[str, tuple[str, object]] = {
    "penalty_alpha": (f"contrastive search {_NO_HIDDEN_STATES}", 0),
    "dola_layers": (f"DoLa {_NO_HIDDEN_STATES}", None),
    "guidance_scale": (f"classifier-free guidance {_SECOND_PROMPT}", 1),
    "watermark": ("watermarks are not written, and one that is asked for must not be missing", False),
}
# By parameter: how it is written today.
_RENAMED: Mapping[str, str] = {
    f"guided_{form}": f'structured_outputs: {{"{form}": ...}}'
    for form in ("json", "regex", "choice", "grammar")
}


def without_refused_methods(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options without those of methods that are not offered, where these ask for nothing.

    Raises:
        InvalidRequest: one asks for something; `field` is its name.
    """
    for name, (reason, neutral) in _REFUSED.items():
        if options.get(name) is not None and options[name] != neutral:
            raise InvalidRequest(f"{name} is not supported: {reason}", field=name, remedy="leave it out")
    for name, newer in _RENAMED.items():
        if options.get(name) is not None:
            message = f"{name} is not supported: it is now a part of structured_outputs"
            raise InvalidRequest(message, field=name, remedy=f"write {newer}")
    return {name: value for name, value in options.items() if name not in {*_REFUSED, *_RENAMED}}
