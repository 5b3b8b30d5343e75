from __future__ import annotations

from dataclasses import fields

import pytest

from genserve.sampling.sampling_params import SamplingParams, unused_parameters


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
def test_the_details_of_a_rule_are_idle_where_it_is_off(details, switch):
    assert unused_parameters(SamplingParams(temperature=1, **details)) == list(details)
    assert unused_parameters(SamplingParams(temperature=1, **details, **switch)) == []


def test_the_rules_of_a_draw_are_idle_where_nothing_is_drawn():
    rules = {"top_k": 5, "top_p": 0.5, "xtc_probability": 0.5}
    assert unused_parameters(SamplingParams(temperature=0, **rules)) == list(rules)
    assert unused_parameters(SamplingParams(temperature=1, **rules)) == []


def test_defaults_that_are_sent_along_are_not_idle():
    defaults = {option.name: getattr(SamplingParams(), option.name) for option in fields(SamplingParams)}
    assert unused_parameters(SamplingParams(**defaults)) == []
