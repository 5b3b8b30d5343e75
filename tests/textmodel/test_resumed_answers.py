"""Answers that go on behind tokens of another engine are the undisturbed ones, whatever the request."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from genserve.completion import FinishReason, join_deltas
from genserve.engine.delta_streams import DeltaStream
from genserve.errors import InvalidRequest, NotResumable
from genserve.prompt import Chat, Message, Tool
from genserve.repository.repository import Repository
from genserve.sampling.sampling_params import SamplingParams, sampling_params
from tests.support.documented_plugins import copy_with_plugins
from tests.support.thinking_model import copy_with_tags

PROMPT = "The tea in the tin is hot. The tea in the"
# Sees logits, keeps a count, and appends tokens that it has not sampled. It may begin with another count.
OWN_LOOP = """

class TritonPythonModel(TritonPythonModel):
    num_unsteady = 0

    async def decode(self, sequence):
        count = 0
        if sequence.params.cache_salt == "unsteady":
            TritonPythonModel.num_unsteady += 1
            count = self.num_unsteady
        while not sequence.finished:
            logits = await sequence.logits()
            count += int(logits.argmax()) % 3
            sequence.append(int(logits.argsort()[-1 - count % 3]))
            if count % 5 == 4 and not sequence.finished:
                sequence.append(count % 300)
"""
# Its state depends on logits.
PROCESSOR = """

class Alternate:
    def __init__(self, context):
        self.forbidden = 0

    def __call__(self, token_ids, logits):
        forbidden, self.forbidden = self.forbidden, int(logits.argmax())
        logits[forbidden] = float("-inf")

TritonPythonModel.logits_processors = {**TritonPythonModel.logits_processors, "alternate": Alternate}
"""
LOOPS = {"sampling": PROCESSOR, "own": OWN_LOOP}


@pytest.fixture(scope="module")
def models(tiny_repository, tmp_path_factory):
    """The tiny model with tags and plug-ins, and the same with a loop of its own."""
    root = tmp_path_factory.mktemp("resumed")
    thinking = copy_with_tags(tiny_repository, root / "tags")
    with ExitStack() as undo:
        models = {}
        for name, more in LOOPS.items():
            repository = Repository([copy_with_plugins(thinking, root / name, more=more)])
            undo.callback(repository.close)
            repository.start()
            models[name] = repository.text_model("tiny")
        yield models


def request(model, prompt, params, *, received=(), num_choices=1):
    """Return a request; `received` has the tokens of each answer that the caller has."""
    made = model.prepare(prompt, params, num_choices=num_choices)
    return made.rest(elapsed_s=0.0, received=received)


def stream(model, prompt, params, *, received=()):
    """Submit a request with one choice."""
    return DeltaStream(model.engine, request(model, prompt, params, received=received))


def by_choice(deltas):
    """Return the deltas of each of two choices."""
    read = list(deltas)
    return [[delta for delta in read if delta.choice == choice] for choice in range(2)]


def tokens(deltas):
    return tuple(token_id for delta in deltas for token_id in delta.token_ids)


def resumed_everywhere(model, prompt, params, *, step=1):
    """Return the deltas of an undisturbed answer, and those of one resumed behind each `step`-th of them."""
    # The same seed for all.
    undisturbed = request(model, prompt, params)
    deltas = list(DeltaStream(model.engine, undisturbed))
    cuts = range(1, len(deltas), step)
    streams = [
        DeltaStream(model.engine, undisturbed.rest(elapsed_s=0.0, received=[tokens(deltas[:cut])]))
        for cut in cuts
    ]
    return deltas, [(deltas[:cut], list(resumed)) for cut, resumed in zip(cuts, streams, strict=True)]


def assert_the_same(model, prompt, params, *, step=1):
    """Resume an answer behind each `step`-th of its deltas; return it undisturbed."""
    deltas, resumed = resumed_everywhere(model, prompt, params, step=step)
    whole = join_deltas(deltas)
    for before, after in resumed:
        assert all(delta.token_ids or delta.finish_reason for delta in after)
        joined = join_deltas([*before, *after])
        assert joined == whole
        assert joined.usage.cached_tokens <= joined.usage.prompt_tokens
    return whole


_SAMPLED = st.fixed_dictionaries(
    {"seed": st.integers(0, 2**64 - 1), "max_tokens": st.integers(2, 20)},
    optional={
        "temperature": st.sampled_from([0.0, 0.7, 1.0, 2.0]),
        "top_p": st.sampled_from([0.5, 0.95]),
        "top_k": st.sampled_from([3, 40]),
        "min_p": st.sampled_from([0.02, 0.3]),
        "typical_p": st.just(0.7),
        "xtc_probability": st.just(0.6),
        "dynatemp_range": st.just(0.5),
        "mirostat_mode": st.sampled_from([1, 2]),
        "samplers": st.just(("temperature", "top_k", "min_p", "top_p")),
        "repetition_penalty": st.sampled_from([0.8, 1.4]),
        "frequency_penalty": st.sampled_from([-1.0, 1.5]),
        "presence_penalty": st.sampled_from([-1.0, 1.5]),
        "penalty_window": st.sampled_from([3, 10]),
        "dry_multiplier": st.just(2.0),
        "dry_sequence_breakers": st.just(("\n", "e")),
        "no_repeat_ngram_size": st.sampled_from([1, 2]),
        "bad_words": st.just(("te", "a")),
        "logit_bias": st.just({2: 4.0, 318: 5.0, 319: 3.0}),
        "min_tokens": st.integers(1, 6),
        "stop_token_ids": st.just((5, 50, 100, 150, 200, 250, 300)),
        "stop_regex": st.just(("[^a-z ]{6}",)),
        "include_stop_str_in_output": st.booleans(),
        "ignore_eos": st.booleans(),
        "skip_special_tokens": st.booleans(),
        "repetition_detection": st.just({"max_pattern_size": 4, "min_count": 2}),
        "thinking_token_budget": st.integers(0, 4),
        "reasoning_budget_message": st.sampled_from(["", "so.", None]),
        "stream_interval": st.sampled_from([1, 2, 5]),
        "logprobs": st.just(True),
        "top_logprobs": st.sampled_from([2]),
        "logprobs_mode": st.just("processed"),
        "prompt_logprobs": st.just(1),
        "stop_rules": st.just([{"name": "at_most_lines", "args": {"lines": 1}}]),
        "output_parser": st.just({"name": "hide", "args": {"start": "e", "end": "a"}}),
        "logits_processors": st.just([{"name": "no_digits"}]),
    },
)


def params_of(options):
    try:
        return sampling_params(options)
    except InvalidRequest:  # two parameters exclude each other
        return assume(False)


@settings(suppress_health_check=list(HealthCheck))
@given(options=_SAMPLED, stop_from=st.integers(0, 30), is_stop_complete=st.booleans())
def test_an_answer_resumed_at_any_token_is_the_undisturbed_one(models, options, stop_from, is_stop_complete):
    """Stop strings are from the undisturbed text, so some are met and others held back to no avail."""
    model, params = models["sampling"], params_of(options)
    whole = assert_the_same(model, PROMPT, params)
    stop = whole.text[stop_from : stop_from + 4] + ("" if is_stop_complete else "\0")
    assert_the_same(model, PROMPT, replace(params, stop=(stop or "e", "\0")))


def test_cuts_fall_within_characters_and_within_possible_stops(models):
    """What the property above rests on."""
    params = SamplingParams(max_tokens=60, ignore_eos=True, temperature=1.0, seed=3)
    deltas, _ = resumed_everywhere(models["sampling"], PROMPT, params)
    assert any(not delta.text for delta in deltas), "no character was incomplete"
    text = join_deltas(deltas).text
    held, resumed = resumed_everywhere(models["sampling"], PROMPT, replace(params, stop=(text[-9:] + "\0",)))
    lengths = [sum(len(d.text) for d in held[: i + 1]) for i in range(len(held))]
    without = [sum(len(d.text) for d in deltas[: i + 1]) for i in range(len(deltas))]
    assert any(some < others for some, others in zip(lengths, without, strict=False)), "nothing was held back"
    assert all(join_deltas([*before, *after]).text == text for before, after in resumed)


_SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "array", "items": {"type": "integer"}}, "b": {"type": "string"}},
    "required": ["a", "b"],
}


@pytest.mark.parametrize(
    "outputs",
    [{"json": _SCHEMA}, {"json_object": True}, {"regex": "(ab|cd){1,9}e"}, {"choice": ["tea", "team"]}],
)
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.extended)])
def test_a_grammar_continues(models, outputs, seed):
    options = {"structured_outputs": outputs, "temperature": 1.0, "seed": seed, "max_tokens": 40}
    assert_the_same(models["sampling"], PROMPT, sampling_params({**options, "logprobs": True}))


@pytest.mark.parametrize("tool_choice", ["auto", "required"])
def test_tool_calls_continue_and_close_in_the_same_place(models, tool_choice):
    """With few tokens left, the grammar closes the call; it looks ahead for this from time to time."""
    tool = Tool(name="add", description="", parameters=_SCHEMA)
    chat = Chat(messages=(Message(role="user", content="tea?"),), tools=(tool,), tool_choice=tool_choice)
    params = SamplingParams(
        temperature=1.0,
        seed=4,
        max_tokens=80,
        logprobs=True,
        logit_bias={318: 3.0, 319: 6.0},
        truncate_prompt_tokens=60,
    )
    whole = assert_the_same(models["sampling"], chat, params, step=5)
    if tool_choice == "required":
        assert whole.finish_reason is FinishReason.LENGTH
        assert whole.text.endswith("]</tool_call>")


def test_reasoning_that_the_prompt_began_continues_under_its_budget(models):
    limits = {"thinking_token_budget": 7, "reasoning_budget_message": "so."}
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=20, ignore_eos=True, **limits)
    whole = assert_the_same(models["sampling"], PROMPT + "<think>", params)
    message = tuple(models["sampling"].tokenizer.encode("so.", add_special_tokens=False))
    end = whole.token_ids.index(319)
    begin = end - len(message)
    assert whole.token_ids[begin:end] == message
    assert 7 <= begin < 7 + 4, "it waits for the end of a character"


# What is drawn depends on all draws before.
MIROSTAT = {"mirostat_tau": 2.0, "mirostat_eta": 1.0}


@pytest.mark.parametrize(
    "options",
    [
        {**MIROSTAT, "mirostat_mode": 1},
        {**MIROSTAT, "mirostat_mode": 2},
        {"logits_processors": [{"name": "alternate"}]},
    ],
)
@pytest.mark.parametrize("stream_interval", [1, pytest.param(3, marks=pytest.mark.extended)])
def test_a_state_that_depends_on_logits_is_found_again(models, options, stream_interval):
    sampled = {"temperature": 1.0, "seed": 1, "logprobs": True, "max_tokens": 40}
    params = sampling_params({**sampled, "stream_interval": stream_interval, **options})
    assert_the_same(models["sampling"], PROMPT, params)


@pytest.mark.parametrize("sampled", [{}, {"temperature": 1.0, "seed": 5, "logprobs": True}])
def test_a_loop_of_the_repository_is_run_again_in_silence(models, sampled):
    assert_the_same(models["own"], PROMPT, SamplingParams(max_tokens=24, ignore_eos=True, **sampled))


def test_a_loop_that_answers_otherwise_ends_with_a_typed_error(models):
    model, params = models["own"], SamplingParams(max_tokens=8, ignore_eos=True, cache_salt="unsteady")
    received = tokens(list(stream(model, PROMPT, params))[:3])
    resumed = stream(model, PROMPT, params, received=[received])
    with pytest.raises(NotResumable, match="token 1 "):
        list(resumed)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.extended),
        {"logprobs": True},
        pytest.param({"stop": ("e",)}, marks=pytest.mark.extended),
        {"num_beam_groups": 2, "diversity_penalty": 0.5},
    ],
)
def test_beams_are_searched_again_in_silence(models, options):
    model = models["sampling"]
    params = SamplingParams(use_beam_search=True, beam_width=4, max_tokens=24, **options)
    searched = request(model, PROMPT, params, num_choices=2)
    deltas = by_choice(DeltaStream(model.engine, searched))
    common = tokens(deltas[0][:-1])
    assert common == tokens(deltas[1][:-1])
    for cut in range(1, len(deltas[0])):
        received = [tokens(answer[:cut]) for answer in deltas]
        resumed = DeltaStream(model.engine, searched.rest(elapsed_s=0.0, received=received))
        for answer, after in zip(deltas, by_choice(resumed), strict=True):
            assert join_deltas([*answer[:cut], *after]) == join_deltas(answer)


def test_tokens_that_end_an_answer_cannot_be_resumed(models):
    eos = 2
    with pytest.raises(NotResumable, match="end"):
        stream(models["sampling"], PROMPT, SamplingParams(), received=[(40, eos)])
    with pytest.raises(NotResumable):
        stream(models["sampling"], PROMPT, SamplingParams(max_tokens=2), received=[(40, 41, 42)])


def test_the_received_tokens_are_computed_as_a_prompt_and_found_in_the_prefix_cache(models):
    model = models["sampling"]
    params = SamplingParams(max_tokens=100, ignore_eos=True, temperature=1.0, seed=9)
    deltas = list(stream(model, PROMPT, params))
    received = tokens(deltas)[:80]
    num_steps = model.engine.num_steps
    resumed = stream(model, PROMPT, params, received=[received])
    after = list(resumed)
    assert tokens(after) == tokens(deltas)[80:]
    assert model.engine.num_steps - num_steps <= 20
    usage = after[-1].usage
    assert usage.completion_tokens == 100
    assert usage.cached_tokens == usage.prompt_tokens, "the answer of the other run was cached, too"


def test_the_deadline_passes_for_a_resumed_answer_too(models):
    model = models["sampling"]
    params = SamplingParams(max_tokens=200, ignore_eos=True, seed=1)
    received = tokens(list(stream(model, PROMPT, params))[:9])
    limited = replace(params, max_time_ms=1)
    [last] = list(stream(model, PROMPT, limited, received=[received]))[-1:]
    assert (last.finish_reason, last.stop_reason) == (FinishReason.LENGTH, "deadline")
    assert last.usage.completion_tokens >= 9
