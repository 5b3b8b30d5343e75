"""Decoding fields: what the bodies of all dialects may say about decoding, by vLLM's names."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Field, WithJsonSchema
from pydantic.json_schema import SkipJsonSchema

from genserve.errors import InvalidRequest
from genserve.sampling.structured_outputs import structured_outputs_of_format
from genserve.server.request_body import Body

__all__ = ["DecodingFields", "PluginFields", "Texts"]


class PluginFields(Body):
    """A call of one of the model's plug-ins."""

    name: str
    args: dict[str, Any] = Field(default={})


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _form(description: str, **schema: Any) -> dict[str, Any]:
    return {"description": description, **schema}


# What `sampling/structured_outputs.py` reads and checks; the document of the routes has its fields.
FormFields: TypeAlias = Annotated[
    dict[str, Any],
    WithJsonSchema(
        {
            "type": "object",
            "description": "The form that the text has: exactly one of these.",
            "properties": {
                "json": _form("A JSON schema, or its text.", type=["object", "string"]),
                "json_object": _form("Any JSON object.", type="boolean"),
                "regex": _form("The whole text matches.", type="string"),
                "choice": _form("The text is one of these.", type="array", items={"type": "string"}),
                "grammar": _form("In Lark's notation, or llama.cpp's GBNF.", type="string"),
                "structural_tag": _form("Between some tags, JSON.", type=["object", "string"]),
            },
            "additionalProperties": False,
        }
    ),
]
# One text stands for a list of it.
Texts: TypeAlias = Annotated[list[str] | None, BeforeValidator(_listed)]


class DecodingFields(Body):
    """The fields whose names and meanings are those of `SamplingParams`; None: not said."""

    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    epsilon_cutoff: float | None = None
    eta_cutoff: float | None = None
    top_n_sigma: float | None = None
    top_h: float | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    mirostat_mode: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    dynatemp_range: float | None = None
    dynatemp_exponent: float | None = None
    samplers: list[str] | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    penalty_window: int | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_penalty_last_n: int | None = None
    dry_sequence_breakers: list[str] | None = None
    no_repeat_ngram_size: int | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    suppress_tokens: list[int] | None = None
    bad_words: list[str] | None = None
    min_tokens: int | None = None
    stop_regex: Texts = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    stream_interval: int | None = None
    max_time_ms: int | None = None
    repetition_detection: dict[str, int] | None = None
    ignore_eos: bool | None = None
    use_beam_search: bool | None = None
    beam_width: int | None = None
    length_penalty: float | None = None
    early_stopping: Literal[True, False, "never"] | None = None
    num_beam_groups: int | None = None
    diversity_penalty: float | None = None
    logprobs_mode: Literal["raw", "processed"] | None = None
    structured_outputs: FormFields | None = None
    thinking_token_budget: int | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    cache_salt: str | None = None
    priority: int | None = None
    # Here for their refusal, which says why: `sampling/sampling_params.py`.
    penalty_alpha: SkipJsonSchema[Any] = None
    guidance_scale: SkipJsonSchema[Any] = None
    dola_layers: SkipJsonSchema[Any] = None
    watermark: SkipJsonSchema[Any] = None
    guided_json: SkipJsonSchema[Any] = None
    guided_regex: SkipJsonSchema[Any] = None
    guided_choice: SkipJsonSchema[Any] = None
    guided_grammar: SkipJsonSchema[Any] = None
    logits_processors: list[PluginFields] | None = None
    stop_rules: list[PluginFields] | None = None
    output_parser: PluginFields | None = None

    def said(self) -> dict[str, Any]:
        """Return the options that the request gives, for `sampling_params`."""
        values = self.model_dump(include=set(DecodingFields.model_fields))
        return {name: value for name, value in values.items() if value is not None}

    def form_beside(self, own: Any, *, field: str) -> Any:
        """Return the form of the answer: that of `structured_outputs`, or of the dialect's own field.

        Raises:
            InvalidRequest: both say something, or the dialect's is badly written; `field` is its name.
        """
        form = structured_outputs_of_format(own, field=field)
        if form is not None and self.structured_outputs is not None:
            message = f"{field} and structured_outputs ask for two forms"
            raise InvalidRequest(message, field=field, remedy="leave one out")
        return self.structured_outputs if form is None else form
