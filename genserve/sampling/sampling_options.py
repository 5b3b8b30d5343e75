"""Sampling options: the keyword arguments of the SDK; written by scripts/sampling_options.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict

from genserve.sampling.plugin_call import PluginCall, PluginCallOptions
from genserve.sampling.repetition_detection import RepetitionDetection
from genserve.sampling.structured_outputs import StructuredOutputOptions, StructuredOutputs


class SamplingOptions(TypedDict, total=False):
    """The keyword arguments of `LLM` and of the clients: `SamplingParams` with looser types."""

    structured_outputs: StructuredOutputs | StructuredOutputOptions | None
    allowed_token_ids: Sequence[int] | None
    logit_bias: Mapping[int, float] | Mapping[str, float] | None
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    penalty_window: int
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_penalty_last_n: int
    dry_sequence_breakers: str | Sequence[str] | None
    no_repeat_ngram_size: int
    bad_words: str | Sequence[str] | None
    min_tokens: int
    suppress_tokens: Sequence[int] | None
    temperature: float
    dynatemp_range: float
    dynatemp_exponent: float
    top_n_sigma: float
    top_h: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    epsilon_cutoff: float
    eta_cutoff: float
    xtc_probability: float
    xtc_threshold: float
    samplers: str | Sequence[str] | None
    mirostat_mode: int
    mirostat_tau: float
    mirostat_eta: float
    seed: int | None
    best_of: int
    use_beam_search: bool
    beam_width: int | None
    length_penalty: float
    early_stopping: bool | Literal['never']
    num_beam_groups: int
    diversity_penalty: float
    max_tokens: int | None
    max_time_ms: int | None
    stop: str | Sequence[str] | None
    stop_regex: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    stop_rules: Sequence[PluginCall | PluginCallOptions] | None
    repetition_detection: RepetitionDetection | Mapping[str, int] | None
    ignore_eos: bool
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    spaces_between_special_tokens: bool
    stream_interval: int
    thinking_token_budget: int | None
    reasoning_budget_message: str | None
    logits_processors: Sequence[PluginCall | PluginCallOptions] | None
    output_parser: PluginCall | PluginCallOptions | None
    return_receipt: bool
    logprobs: bool
    top_logprobs: int
    logprob_token_ids: Sequence[int] | None
    logprobs_mode: Literal['raw', 'processed']
    prompt_logprobs: int | None
    add_special_tokens: bool | None
    truncate_prompt_tokens: int | None
    truncation_side: Literal['left', 'right']
    cache_salt: str | None
    return_cache_match: bool
    priority: int
