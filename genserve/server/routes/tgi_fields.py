"""TGI fields: what the bodies of its dialect may say.

`model` in the body is ours, and so are parameters by vLLM's names; a parameter of TGI's that we do not
honour is refused by name, unless its value asks for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from pydantic import Field

from genserve.sampling.param_table import DRAWING, require
from genserve.sampling.sampling_params import SamplingParams, sampling_params
from genserve.server.decoding_fields import DecodingFields
from genserve.server.request_body import Body

__all__ = ["CompatibleBody", "GenerateBody", "Parameters"]

# Our names of what can be wrong, and this dialect's.
_NAMES = {name: f"parameters.{name}" for name in DecodingFields.model_fields} | {
    **{option.name: f"parameters.{option.name}" for option in fields(SamplingParams)},
    "prompt": "inputs",
    "max_tokens": "parameters.max_new_tokens",
    "prompt_logprobs": "parameters.decoder_input_details",
    "top_logprobs": "parameters.top_n_tokens",
}
# Of what vLLM has a name for, too.
_OWN = {"structured_outputs": "grammar", "truncate_prompt_tokens": "truncate"}


class Parameters(DecodingFields):
    """TGI's parameters, and vLLM's."""

    adapter_id: str | None = None
    best_of: int | None = Field(default=None, gt=0)
    decoder_input_details: bool | None = None
    details: bool | None = None
    do_sample: bool | None = None
    grammar: dict[str, Any] | None = None
    max_new_tokens: int | None = None
    return_full_text: bool | None = None
    seed: int | None = None
    stop: list[str] | None = None
    temperature: float | None = Field(default=None, gt=0.0)
    top_k: int | None = Field(default=None, gt=0)
    top_n_tokens: int | None = None
    truncate: int | None = Field(default=None, gt=0)

    @property
    def draws(self) -> bool:
        """Whether to draw: TGI does if it is told to, or if a parameter has no meaning otherwise."""
        given = ((getattr(self, name), neutral) for name, neutral in DRAWING.items())
        return bool(self.do_sample) or any(value not in (None, neutral) for value, neutral in given)

    def names(self) -> Mapping[str, str]:
        """Our names of what can be wrong, and this request's."""
        said = {name: f"parameters.{own}" for name, own in _OWN.items() if getattr(self, own) is not None}
        return {**_NAMES, **said}

    def params(self, *, logprobs: bool) -> SamplingParams:
        """The sampling parameters.

        Raises:
            InvalidRequest: out of range, or asks for something that TGI has and we do not.
        """
        self._require_coherence()
        truncate = {} if self.truncate is None else {"truncate_prompt_tokens": self.truncate}
        return sampling_params(
            {
                **self.said(),
                **truncate,
                "max_tokens": self.max_new_tokens,
                "temperature": self._temperature(),
                "top_k": self.top_k or 0,
                "stop": self.stop,
                "seed": self.seed,
                "logprobs": logprobs,
                "top_logprobs": self.top_n_tokens or 0,
                "prompt_logprobs": 0 if self.decoder_input_details else None,
                "best_of": self.best_of or 1,
                "structured_outputs": self.form_beside(self.grammar, field="parameters.grammar"),
            }
        )

    def _require_coherence(self) -> None:
        searching, several = bool(self.use_beam_search), (self.best_of or 1) > 1
        cuts = None not in (self.truncate, self.truncate_prompt_tokens)
        for name, wrong, rule in (
            ("adapter_id", self.adapter_id is not None, "is not supported"),
            ("do_sample", searching and self.do_sample, "cannot be combined with use_beam_search"),
            ("best_of", several and not searching and not self.draws, "needs do_sample"),
            ("truncate", cuts, "cannot be combined with truncate_prompt_tokens"),
        ):
            require(not wrong, f"parameters.{name}", rule)

    def _temperature(self) -> float:
        temperature = 1.0 if self.temperature is None else self.temperature
        if self.use_beam_search:  # what draws beside it is refused by its own name
            return 0.0 if temperature == 1.0 else temperature
        return temperature if self.draws else 0.0


class GenerateBody(Body):
    """Body of `POST /generate` and `POST /generate_stream`."""

    inputs: str
    parameters: Parameters = Parameters()
    model: str | None = None


class CompatibleBody(GenerateBody):
    """Body of `POST /`."""

    stream: bool = False
