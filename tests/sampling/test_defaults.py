"""The sampling parameters of generation_config.json, and which of them a request gets."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from genserve.errors import InvalidRequest
from genserve.sampling.defaults import default_sampling_params, with_model_defaults
from genserve.sampling.sampling_params import GENERATION_CONFIG, sampling_params, unused_parameters

DEFAULTS: dict[str, Any] = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "max_tokens": 64}
CHAT = {"temperature": 1.0}     # the default of a dialect


def resolved(options: dict[str, Any], defaults: dict[str, Any] = DEFAULTS) -> dict[str, Any]:
    params = with_model_defaults(sampling_params(options, defaults=CHAT), defaults)
    return {name: getattr(params, name) for name in ("temperature", "top_p", "top_k", "max_tokens")}


def test_values_count_as_for_transformers():
    config = {
        "do_sample": True, "temperature": 1.0, "top_k": 50, "top_p": 0.8, "min_p": None, "typical_p": 0.9,
        "repetition_penalty": 1.05, "no_repeat_ngram_size": 3, "max_new_tokens": 512, "eos_token_id": [1, 2],
        "epsilon_cutoff": 0.01, "eta_cutoff": 0.02, "num_beams": 1, "transformers_version": "4.51.0",
    }
    counted = transformers.GenerationConfig.from_dict(config).to_diff_dict()
    expected = {name: counted[key] for key, name in GENERATION_CONFIG.items() if key in counted}
    assert default_sampling_params(config) == expected
    assert len(expected) == 9


def test_a_model_that_does_not_sample_is_greedy():
    assert default_sampling_params({"do_sample": False, "temperature": 0.7}) == {"temperature": 0.0}
    assert default_sampling_params({"do_sample": True}) == {}


@pytest.mark.parametrize(
    ("config", "field"),
    [({"temperature": "0.7"}, "temperature"), ({"top_p": 2}, "top_p"), ({"max_new_tokens": 0}, "max_tokens")],
)
def test_a_value_out_of_range_is_rejected(config, field):
    with pytest.raises(InvalidRequest) as rejection:
        default_sampling_params(config)
    assert rejection.value.field == field


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, DEFAULTS),
        ({"max_tokens": None}, DEFAULTS),
        ({"temperature": 0.2}, DEFAULTS | {"temperature": 0.2}),
        ({"temperature": 1.0, "top_p": 1.0}, DEFAULTS | {"temperature": 1.0, "top_p": 1.0}),
        ({"top_k": -1, "max_tokens": 5}, DEFAULTS | {"top_k": 0, "max_tokens": 5}),
        ({"temperature": 0.0}, DEFAULTS | {"temperature": 0.0}),
        ({"samplers": ["temperature", "top_p"]}, DEFAULTS | {"top_k": 0}),
        ({"mirostat_mode": 2}, {"temperature": 0.6, "top_p": 1.0, "top_k": 0, "max_tokens": 64}),
        ({"min_tokens": 65}, DEFAULTS | {"max_tokens": None}),
    ],
)
def test_a_request_gets_the_defaults_of_what_it_does_not_give(options, expected):
    assert resolved(options) == expected


def test_a_dialect_has_the_default_of_what_the_model_does_not_recommend():
    assert resolved({}, {"top_p": 0.9}) == {"temperature": 1.0, "top_p": 0.9, "top_k": 0, "max_tokens": None}


def test_defaults_that_contradict_the_request_are_left_out():
    params = with_model_defaults(sampling_params({"use_beam_search": True}), DEFAULTS)
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.0, 1.0, 0, 64)
    assert resolved({"best_of": 2}, {"temperature": 0.0})["temperature"] == 1.0


def test_only_what_a_request_gives_can_be_without_effect():
    params = with_model_defaults(sampling_params({"temperature": 0.0, "top_k": 5}), DEFAULTS)
    assert unused_parameters(params) == ["top_k"]


def test_the_defaults_of_a_model_without_any_change_nothing():
    params = sampling_params({}, defaults=CHAT)
    assert with_model_defaults(params, {}) is params
