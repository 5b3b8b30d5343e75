from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from genserve.errors import InvalidRequest
from genserve.sampling.sampling_params import PARAMETERS, SamplingParams, sampling_params, unused_parameters


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": 2.5}, "top_k"),
        ({"top_k": None}, "top_k"),
        ({"top_k": 2**31}, "top_k"),
        ({"top_p": -0.1}, "top_p"),
        ({"seed": 1.5}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"stop": ["a", 5]}, "stop[1]"),
        ({"stop": 5}, "stop"),
        ({"stop_token_ids": 5}, "stop_token_ids"),
        ({"stop": ["a" * 257]}, "stop[0]"),
        ({"stop_token_ids": [1.0]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"max_tokns": 5}, "max_tokns"),
        ({"temperature": True}, "temperature"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": 1e-40}, "repetition_penalty"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty"),
        ({"min_p": 1.1}, "min_p"),
        ({"typical_p": 0}, "typical_p"),
        ({"epsilon_cutoff": 1}, "epsilon_cutoff"),
        ({"eta_cutoff": -0.1}, "eta_cutoff"),
        ({"top_n_sigma": float("inf")}, "top_n_sigma"),
        ({"frequency_penalty": 2.1}, "frequency_penalty"),
        ({"presence_penalty": -2.1}, "presence_penalty"),
        ({"presence_penalty": None}, "presence_penalty"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 6, "max_tokens": 5}, "min_tokens"),
        ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size"),
        ({"logit_bias": [5]}, "logit_bias"),
        ({"logit_bias": {"five": 1}}, "logit_bias"),
        ({"logit_bias": {-5: 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias[5]"),
        ({"logit_bias": {"5": float("nan")}}, "logit_bias[5]"),
        ({"logit_bias": dict.fromkeys(range(1025), 1)}, "logit_bias"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": "5"}, "allowed_token_ids"),
        ({"allowed_token_ids": [1, 2], "suppress_tokens": [2, 1]}, "suppress_tokens"),
        ({"suppress_tokens": [True]}, "suppress_tokens"),
        ({"bad_words": ["a", ""]}, "bad_words[1]"),
        ({"bad_words": {"a": 1}}, "bad_words"),
        ({"use_beam_search": 1}, "use_beam_search"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"logprobs": "yes"}, "logprobs"),
        ({"cache_salt": 5}, "cache_salt"),
        ({"use_beam_search": True, "beam_width": 0}, "beam_width"),
        ({"use_beam_search": True, "length_penalty": float("inf")}, "length_penalty"),
        ({"use_beam_search": True, "early_stopping": "always"}, "early_stopping"),
        ({"use_beam_search": True, "temperature": 0.5}, "temperature"),
        ({"use_beam_search": True, "top_p": 0.5}, "top_p"),
        ({"use_beam_search": True, "prompt_logprobs": 0}, "prompt_logprobs"),
        ({"use_beam_search": True, "best_of": 2}, "best_of"),
        ({"beam_width": 2}, "beam_width"),
        ({"length_penalty": 0.5}, "length_penalty"),
        ({"early_stopping": True}, "early_stopping"),
        ({"best_of": 2}, "best_of"),
        ({"best_of": 0, "temperature": 1}, "best_of"),
        ({"logprob_token_ids": [5]}, "logprob_token_ids"),
        ({"logprob_token_ids": [5, 5], "logprobs": True}, "logprob_token_ids"),
        ({"logprob_token_ids": list(range(257)), "logprobs": True}, "logprob_token_ids"),
        ({"logprob_token_ids": [5], "logprobs": True, "top_logprobs": 1}, "logprob_token_ids"),
        ({"logprobs_mode": "raw_logits"}, "logprobs_mode"),
        ({"logprobs_mode": "processed"}, "logprobs_mode"),
        ({"top_h": 1.1}, "top_h"),
        ({"xtc_probability": -0.1}, "xtc_probability"),
        ({"xtc_threshold": 2}, "xtc_threshold"),
        ({"mirostat_mode": 3}, "mirostat_mode"),
        ({"mirostat_tau": -1}, "mirostat_tau"),
        ({"mirostat_eta": 1.5}, "mirostat_eta"),
        ({"dynatemp_range": -1}, "dynatemp_range"),
        ({"dynatemp_exponent": 0}, "dynatemp_exponent"),
        ({"penalty_window": -1}, "penalty_window"),
        ({"dry_multiplier": -0.1}, "dry_multiplier"),
        ({"dry_base": 0.9}, "dry_base"),
        ({"dry_allowed_length": 0}, "dry_allowed_length"),
        ({"dry_penalty_last_n": -2}, "dry_penalty_last_n"),
        ({"dry_sequence_breakers": ["\n", ""]}, "dry_sequence_breakers[1]"),
        ({"dry_sequence_breakers": ["x"] * 33}, "dry_sequence_breakers"),
        ({"samplers": []}, "samplers"),
        ({"samplers": ["top_k", "top-p"]}, "samplers[1]"),
        ({"samplers": ["top_k", 5]}, "samplers[1]"),
        ({"samplers": ["top_k", "min_p", "top_k"]}, "samplers[2]"),
        ({"samplers": ["min_p"], "temperature": 1, "top_k": 5}, "top_k"),
        ({"samplers": ["min_p"], "temperature": 0.7}, "temperature"),
        ({"samplers": ["min_p"], "temperature": 1, "dynatemp_range": 0.5}, "dynatemp_range"),
        ({"mirostat_mode": 2, "top_p": 0.9}, "top_p"),
        ({"mirostat_mode": 1, "xtc_probability": 0.5}, "xtc_probability"),
        ({"mirostat_mode": 1, "samplers": ["temperature"]}, "samplers"),
        ({"penalty_alpha": 0.6}, "penalty_alpha"),
        ({"dola_layers": "high"}, "dola_layers"),
        ({"guidance_scale": 1.5}, "guidance_scale"),
        ({"watermark": True}, "watermark"),
        ({"include_stop_str_in_output": 1}, "include_stop_str_in_output"),
        ({"stop_regex": ["a", ""]}, "stop_regex[1]"),
        ({"stop_regex": ["a" * 513]}, "stop_regex[0]"),
        ({"stop_regex": ["a"] * 5}, "stop_regex"),
        ({"skip_special_tokens": None}, "skip_special_tokens"),
        ({"spaces_between_special_tokens": False}, "spaces_between_special_tokens"),
        ({"stop_regex": "a", "use_beam_search": True}, "stop_regex"),
        ({"stream_interval": 0}, "stream_interval"),
        ({"max_time_ms": 0}, "max_time_ms"),
        ({"max_time_ms": 1.5}, "max_time_ms"),
        ({"repetition_detection": 5}, "repetition_detection"),
        ({"repetition_detection": {"size": 5}}, "repetition_detection"),
        ({"repetition_detection": {"max_pattern_size": 5}}, "repetition_detection.min_count"),
        ({"repetition_detection": {"min_count": 5}}, "repetition_detection.max_pattern_size"),
        ({"repetition_detection": {"max_pattern_size": 5, "min_count": 1}}, "repetition_detection.min_count"),
        (
            {"repetition_detection": {"max_pattern_size": 2, "min_pattern_size": 3, "min_count": 2}},
            "repetition_detection.min_pattern_size",
        ),
        (
            {"repetition_detection": {"max_pattern_size": 2049, "min_count": 2}},
            "repetition_detection.max_pattern_size",
        ),
        (
            {"repetition_detection": {"max_pattern_size": True, "min_count": 2}},
            "repetition_detection.max_pattern_size",
        ),
    ],
)
def test_a_wrong_option_is_rejected_by_name(options, field):
    with pytest.raises(InvalidRequest) as raised:
        sampling_params(options)
    assert raised.value.field == field


def test_loose_options_become_strict_parameters():
    params = sampling_params({"stop": "END", "stop_token_ids": [3], "temperature": 1, "seed": 2**64 - 1})
    assert params.stop == ("END",)
    assert params.stop_token_ids == (3,)
    assert sampling_params({"stop": None, "stop_token_ids": None}) == sampling_params({})


@pytest.mark.parametrize("all_of_them", [-1, 0])
def test_top_k_minus_one_keeps_all_tokens(all_of_them):
    assert sampling_params({"top_k": all_of_them}).top_k == 0


def test_the_ids_of_a_bias_may_be_digits_as_in_json():
    params = sampling_params({"logit_bias": {"5": -100, 7: 1.5}, "bad_words": "damn"})
    assert params.logit_bias == {5: -100, 7: 1.5}
    assert params.bad_words == ("damn",)
    assert sampling_params({"logit_bias": None, "bad_words": None}) == sampling_params({})
    json.dumps(asdict(params))


def test_token_ids_are_listed_by_parameter():
    params = sampling_params({"logit_bias": {3: 1}, "allowed_token_ids": [3, 4], "stop_token_ids": [5]})
    named = {name: list(ids) for name, ids in params.token_ids().items()}
    assert named == {
        "logit_bias": [3], "stop_token_ids": [5], "allowed_token_ids": [3, 4], "suppress_tokens": [],
        "logprob_token_ids": [],
    }


def test_an_unsupported_method_may_be_given_with_its_neutral_value():
    off = {"penalty_alpha": 0.0, "dola_layers": None, "guidance_scale": 1.0, "watermark": False}
    assert sampling_params(off) == sampling_params({})


def test_dry_breakers_default_and_may_be_empty():
    assert sampling_params({"dry_sequence_breakers": None}) == sampling_params({})
    assert sampling_params({"dry_sequence_breakers": []}).dry_sequence_breakers == ()
    assert sampling_params({"dry_sequence_breakers": "x"}).dry_sequence_breakers == ("x",)


def test_samplers_may_omit_unused_stages():
    order = ["top_p", "temperature"]
    assert sampling_params({"samplers": order, "top_p": 0.5, "temperature": 0.7}).samplers == tuple(order)
    assert sampling_params({"samplers": ["top_p"], "top_k": 5}).temperature == 0


@pytest.mark.parametrize(
    ("details", "switch"),
    [
        ({"xtc_threshold": 0.3}, {"xtc_probability": 0.5}),
        ({"mirostat_tau": 3.0, "mirostat_eta": 0.2}, {"mirostat_mode": 2}),
        ({"dynatemp_exponent": 2.0}, {"dynatemp_range": 0.5}),
        ({"penalty_window": 64}, {"repetition_penalty": 1.2}),
        ({"penalty_window": 64}, {"frequency_penalty": 0.2}),
        ({"penalty_window": 64}, {"presence_penalty": -0.2}),
        (
            {
                "dry_base": 3.0,
                "dry_allowed_length": 4,
                "dry_penalty_last_n": 64,
                "dry_sequence_breakers": ("\n",),
            },
            {"dry_multiplier": 1.0},
        ),
    ],
)
def test_details_of_a_rule_that_is_off_are_unused(details, switch):
    assert unused_parameters(SamplingParams(temperature=1, **details)) == list(details)
    assert unused_parameters(SamplingParams(temperature=1, **details, **switch)) == []


def test_parameters_of_a_draw_are_unused_at_temperature_0():
    rules = {"top_k": 5, "top_p": 0.5, "xtc_probability": 0.5}
    assert unused_parameters(sampling_params({"temperature": 0, **rules})) == list(rules)
    assert unused_parameters(sampling_params({"temperature": 1, **rules})) == []


def test_defaults_are_never_unused():
    defaults = {name: row.default for name, row in PARAMETERS.items()}
    assert unused_parameters(SamplingParams(**defaults)) == []
