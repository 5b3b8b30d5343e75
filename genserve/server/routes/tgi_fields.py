"""TGI fields: the bodies of its dialect.

`model` in the body is an addition, and so are parameters with vLLM's names. A parameter of TGI that is not
supported is rejected by name, unless it has its neutral value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ConfigDict, Field

from genserve.errors import require
from genserve.sampling.param_table import Range
from genserve.sampling.sampling_params import DRAW_PARAMETERS, PARAMETERS, SamplingParams, sampling_params
from genserve.server.decoding_fields import COMMON, DecodingFields, parameter
from genserve.server.request_body import Body, Items


class Parameters(DecodingFields):
    """TGI's parameters, and vLLM's."""

    adapter_id: str | None = Field(default=None, description="Not supported: there are no adapters.")
    best_of: int | None = parameter("best_of", gt=0)
    decoder_input_details: bool | None = Field(
        default=None,
        description="Report the tokens of the prompt with their log-probabilities. Needs `details`.",
        json_schema_extra={"default": False},
    )
    details: bool | None = Field(
        default=None,
        description="Report the tokens of the answer with their log-probabilities, and how it ended.",
        json_schema_extra={"default": False},
    )
    do_sample: bool | None = Field(
        default=None,
        description="Draw tokens; otherwise the best one is taken, unless a parameter of the draw is given.",
        json_schema_extra=COMMON | {"default": False},
    )
    grammar: dict[str, Any] | None = Field(
        default=None,
        description='The form of the text: `{"type": "json", "value": SCHEMA}` or `{"type": "regex", '
        '"value": ...}`. `structured_outputs` has other forms.',
    )
    max_new_tokens: int | None = parameter(
        "max_tokens", description="This number of tokens ends the answer; without it, the end of the context."
    )
    return_full_text: bool | None = Field(
        default=None, description="The text begins with the prompt.", json_schema_extra={"default": False}
    )
    seed: int | None = parameter("seed")
    stop: Items[str] | None = parameter("stop")
    temperature: float | None = parameter(
        "temperature", default=1.0, gt=0.0, description="Divides the logits, if tokens are drawn."
    )
    top_k: int | None = parameter(
        "top_k", default=None, gt=0, description="Keeps this number of best tokens; all by default."
    )
    top_n_tokens: int | None = parameter(
        "top_logprobs", description="Report this number of most likely tokens, too. Needs `details`."
    )
    truncate: int | None = parameter(
        "truncate_prompt_tokens",
        gt=0,
        bounds=Range(1, 2**31 - 1),
        description="A longer prompt is truncated to this number of tokens; without it, it is rejected.",
    )

    @property
    def draws(self) -> bool:
        """Whether tokens are drawn: if `do_sample` says so, or a parameter would have no effect otherwise."""
        given = ((getattr(self, name), neutral) for name, neutral in DRAW_PARAMETERS.items())
        return bool(self.do_sample) or any(value not in (None, neutral) for value, neutral in given)

    def names(self) -> Mapping[str, str]:
        """Return the names in this request by the names in error messages.

        A parameter with two names, TGI's and vLLM's, has the one that the request uses.
        """
        names = {name: f"parameters.{name}" for name in (*DecodingFields.model_fields, *PARAMETERS)}
        for name, row in PARAMETERS.items():
            if row.tgi is not None and (row.own_field or getattr(self, row.tgi) is not None):
                names[name] = f"parameters.{row.tgi}"
        return {**names, "prompt": "inputs"}

    def params(self, *, logprobs: bool) -> SamplingParams:
        """Return the sampling parameters.

        Raises:
            InvalidRequest: one is out of range, not supported, or contradicts another.
        """
        self._validate_together()
        truncate = {} if self.truncate is None else {"truncate_prompt_tokens": self.truncate}
        return sampling_params(
            {
                **self.given(),
                **truncate,
                "max_tokens": self.max_new_tokens,
                "temperature": self._temperature(),
                "logprobs": logprobs,
                "top_logprobs": self.top_n_tokens or 0,
                "prompt_logprobs": 0 if self.decoder_input_details else None,
                "best_of": self.best_of or 1,
                "structured_outputs": self.format_or(self.grammar, field="parameters.grammar"),
            }
        )

    def _validate_together(self) -> None:
        searching, several = bool(self.use_beam_search), (self.best_of or 1) > 1
        truncated_twice = None not in (self.truncate, self.truncate_prompt_tokens)
        for name, wrong, rule in (
            ("adapter_id", self.adapter_id is not None, "is not supported"),
            ("do_sample", searching and self.do_sample, "cannot be combined with use_beam_search"),
            ("best_of", several and not searching and not self.draws, "needs do_sample"),
            ("truncate", truncated_twice, "cannot be combined with truncate_prompt_tokens"),
        ):
            require(not wrong, f"parameters.{name}", rule)

    def _temperature(self) -> float:
        temperature = 1.0 if self.temperature is None else self.temperature
        if self.use_beam_search:    # any other temperature is rejected with it
            return 0.0 if temperature == 1.0 else temperature
        return temperature if self.draws else 0.0


class GenerateBody(Body):
    """Body of `POST /generate` and `POST /generate_stream`."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"inputs": "The sea is", "parameters": {"max_new_tokens": 16}}]}
    )

    inputs: str = Field(description="The prompt.")
    parameters: Parameters = Field(default=Parameters(), description="How the answer is generated.")
    model: str | None = Field(
        default=None,
        description="The name of a model; not needed if there is only one.",
        json_schema_extra=COMMON,
    )


class CompatibleBody(GenerateBody):
    """Body of `POST /`."""

    stream: bool = Field(
        default=False, description="Answer token by token, as server-sent events.", json_schema_extra=COMMON
    )
