from __future__ import annotations

import functools
import itertools
import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from genserve.engine.engine import Engine
from genserve.engine.sequence_plugins import PluginContext, SequencePlugins
from genserve.engine.speculation import Speculation
from genserve.errors import InvalidRequest, ModelFailed, RepositoryError
from genserve.llm import LLM
from genserve.sampling.batch_sampler import sample
from genserve.sampling.sampling_params import SamplingParams
from genserve.textmodel.decoder_plugins import ParsedText
from genserve.textmodel.decoder_stage import load_decoding
from tests.fakes.drafts import Oracle
from tests.fakes.logits import VOCAB_SIZE, PagedLogits, greedy_answer
from tests.fakes.sequences import Clock, IdText, sample_loop, sequence_of
from tests.support.documented_plugins import copy_with_plugins, documented_model

FAULTY = """
from pydantic import AfterValidator, BaseModel

def even(value):
    if value % 2:
        raise ValueError("must be even")
    return value

def small(value):
    assert value < 9, "must be small"
    return value

class Range(BaseModel):
    end: Annotated[int, AfterValidator(even)]

def within(
    context, *,
    start: Annotated[int, AfterValidator(even), AfterValidator(small)] = 0,
    range: dict[str, int] = {"end": 0},
):
    Range(**range)
    return lambda token_ids, text: False

class Breaks:
    def __init__(self, context, *, after: int = 0, how: str = "raise"):
        self.after = len(context.prompt_token_ids) + after
        self.how = how

    def __call__(self, token_ids, seen):
        if len(token_ids) >= self.after:
            return {"raise": lambda: 1 / 0, "exit": exit, "shape": lambda: seen[:2]}[self.how]()

class Insists:
    hook = "post_penalty"

    def __init__(self, context, *, text: str):
        [self.id] = context.tokenizer.encode(text)

    def __call__(self, token_ids, logits):
        logits[self.id] = 1e9

class Mute:
    def __init__(self, context):
        pass

    def push(self, text):
        return None

    def flush(self):
        return ""

class Late(Mute):
    def push(self, text):
        return text

    def flush(self):
        return 1 / 0

def fails(context):
    raise OSError

def makes_nothing(context):
    pass

def makes_hooked(context):
    def processor(token_ids, logits):
        logits[:] = 0
    processor.hook = "post"
    return processor

class TritonPythonModel(TritonPythonModel):
    logits_processors = TritonPythonModel.logits_processors | {
        "breaks": Breaks, "fails": fails, "insists": Insists, "hooked": makes_hooked
    }
    stop_rules = TritonPythonModel.stop_rules | {"breaks": Breaks, "within": within}
    output_parsers = TritonPythonModel.output_parsers | {
        "mute": Mute, "late": Late, "nothing": makes_nothing
    }
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory, tiny_repository):
    """With plug-ins that fail, and those of the documentation."""
    return copy_with_plugins(tiny_repository, tmp_path_factory.mktemp("plugins") / "repository", more=FAULTY)


@pytest.fixture(scope="module")
def llm(repository):
    with LLM(model_repository=repository) as llm:
        yield llm


def call(name, **args):
    return {"name": name, "args": args}


def token_id(llm, text):
    [token_id] = llm._model.tokenizer.encode(text)
    return token_id


DRAWN = {"temperature": 1.0, "max_tokens": 48, "seed": 3}


def test_a_logits_processor_changes_which_tokens_can_be_sampled(llm):
    plain = [llm.generate("1 2 3", **DRAWN | {"seed": seed}).text for seed in range(4)]
    rid = [
        llm.generate("1 2 3", **DRAWN | {"seed": seed}, logits_processors=[call("no_digits")]).text
        for seed in range(4)
    ]
    assert any(char.isdigit() for char in "".join(plain))
    assert not any(char.isdigit() for char in "".join(rid))


def test_the_documented_processor_accepts_tensors_of_a_device():
    context = PluginContext(
        tokenizer=Digits(), vocab_size=12, prompt_token_ids=(1,), params=SamplingParams(), seed=0
    )
    row = torch.zeros(12)
    documented()["NoDigits"](context)([1], row)
    assert torch.isfinite(row).tolist() == [False] * 10 + [True] * 2


class Digits:
    def decode(self, token_ids):
        return "0123456789ab"[token_ids[0]]


def test_a_plugin_gets_the_arguments_of_the_request(llm):
    ones = {"max_tokens": 6, "logit_bias": {token_id(llm, "1"): 100.0}}
    assert llm.generate("x", **ones).text == "111111"
    late = llm.generate("x", **ones, logits_processors=[call("no_digits", first=4)]).token_ids
    assert token_id(llm, "1") not in late[:4]
    assert late[4:] == (token_id(llm, "1"),) * 2


def test_plugins_do_not_affect_log_probabilities(llm):
    def first_logprob(**options):
        return llm.generate("x", max_tokens=1, logprobs=True, **options).logprobs[0]

    one = {"logit_bias": {token_id(llm, "1"): 100.0}}
    other = llm.generate("x", **one, max_tokens=1, logits_processors=[call("no_digits")]).token_ids[0]
    there = first_logprob(logit_bias={other: 100.0})
    assert first_logprob(**one, logits_processors=[call("no_digits")]) == there


def test_a_stop_rule_ends_the_answer_after_the_token_it_saw(llm):
    options = DRAWN | {"logit_bias": {token_id(llm, "\n"): 4.0}, "ignore_eos": True}
    plain = llm.generate("tell me", **options).text
    ended = llm.generate("tell me", **options, stop_rules=[call("at_most_lines", lines=2)])
    assert plain.count("\n") > 2
    assert ended.text == "\n".join(plain.split("\n")[:2]) + "\n"
    assert (ended.finish_reason, ended.stop_reason) == ("stop", "at_most_lines")
    longer = llm.generate("tell me", **options, min_tokens=47, stop_rules=[call("at_most_lines", lines=2)])
    assert len(longer.token_ids) >= 47


def test_an_output_parser_rewrites_the_text_while_it_streams(llm):
    plain = llm.generate("tell me", **DRAWN).text
    start, end = plain[4:6], plain[12:14]
    hidden = re.sub(f"{re.escape(start)}.*?({re.escape(end)}|$)", "", plain, flags=re.DOTALL)
    with llm.stream("tell me", **DRAWN, output_parser=call("hide", start=start, end=end)) as stream:
        deltas = list(stream)
    assert "".join(delta.text for delta in deltas) == hidden != plain
    assert sum(bool(delta.text) for delta in deltas) > 1


@functools.cache
def documented():
    names: dict[str, Any] = {}
    exec(documented_model(), names)
    return names


PIECES = ["<think>", "</think>", "<", "</", "think>", "a", "\n"]


@given(pieces=st.lists(st.sampled_from(PIECES)), cuts=st.lists(st.integers(0, 60)))
def test_the_documented_parser_does_not_depend_on_how_the_text_is_split(pieces, cuts):
    text = "".join(pieces)
    parser = documented()["Hide"](None)
    ends = sorted({min(cut, len(text)) for cut in (0, *cuts, len(text))})
    shown = [parser.push(text[start:end]) for start, end in itertools.pairwise(ends)]
    expected = re.sub(r"<think>.*?(</think>|\Z)", "", text, flags=re.DOTALL)
    assert "".join(shown) + parser.flush() == expected


def test_a_processor_sees_each_token_once_with_speculation():
    asked: list[int] = []

    def counts(token_ids, logits):
        asked.append(len(token_ids))

    model = PagedLogits()
    sequence = sequence_of([5, 6, 7], max_tokens=9, plugins=SequencePlugins(processors=[("counts", counts)]))
    engine = Engine(model, decode=sample_loop, speculation=Speculation(Oracle()), clock=Clock())
    engine.add(sequence)
    while engine.step():
        pass
    assert max(model.forwards[1:]) > (1,)
    assert sequence.token_ids[3:] == greedy_answer([5, 6, 7], num_tokens=9)
    assert asked == list(range(3, 12))


def test_a_parser_is_flushed_where_a_stop_string_ends_the_text():
    class Keeps:
        def push(self, text):
            return ""

        def flush(self):
            return "all"

    text = ParsedText(IdText(stop_at=7), Keeps(), name="keeps")
    assert [text.push(3), text.stop] == ["", None]
    assert (text.push(7), text.stop) == ("all", "<7>")
    assert text.flush() == "", "it was flushed"


@pytest.mark.parametrize(
    ("options", "field", "words"),
    [
        ({"logits_processors": [call("no_digit")]}, "logits_processors[0].name", "no_digits"),
        ({"stop_rules": [call("at_most_lines")]}, "stop_rules[0].args.lines", "lines: is missing"),
        ({"stop_rules": [call("at_most_lines", line=3)]}, "stop_rules[0].args.line", "did you mean lines?"),
        ({"stop_rules": [call("at_most_lines", lines="3")]}, "stop_rules[0].args.lines", "a whole number"),
        ({"stop_rules": [call("at_most_lines", lines=0)]}, "stop_rules[0].args.lines", "must be at least 1"),
        (
            {"logits_processors": [call("no_digits", fist=1)]},
            "logits_processors[0].args.fist",
            "no argument 'fist'",
        ),
        ({"logits_processors": [call("no_digits", first={1})]}, "logits_processors[0]", "JSON"),
        ({"output_parser": call("hide", start="")}, "output_parser.args", "a tag is empty"),
        ({"stop_rules": [call("within", start=1)]}, "stop_rules[0].args.start", "start: must be even"),
        ({"stop_rules": [call("within", start=10)]}, "stop_rules[0].args.start", "start: must be small"),
        ({"stop_rules": [call("within", range={"end": 1})]}, "stop_rules[0].args.end", "end: must be even"),
        ({"output_parser": call("show")}, "output_parser.name", "it has hide"),
        ({"output_parser": "hide"}, "output_parser", "name and args"),
        ({"output_parser": {"name": "hide", "code": "x"}}, "output_parser", "name and args"),
        ({"logits_processors": call("no_digits")}, "logits_processors", "list"),
        ({"logits_processors": [call("no_digits")] * 17}, "logits_processors", "at most 16"),
        ({"stop_rules": [{"name": ""}]}, "stop_rules[0].name", "1 to 128"),
        ({"stop_rules": [{"name": "at_most_lines", "args": [3]}]}, "stop_rules[0].args", "must map"),
    ],
)
def test_an_invalid_plugin_call_is_rejected_with_its_field(llm, options, field, words):
    with pytest.raises(InvalidRequest) as raised:
        llm.generate("x", **options)
    assert raised.value.field == field
    assert field in raised.value.message
    assert words in str(raised.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"logits_processors": [call("breaks")]}, "logits processor 'breaks' failed: ZeroDivisionError"),
        pytest.param(
            {"logits_processors": [call("breaks", how="exit")]},
            "'breaks' failed: SystemExit",
            marks=pytest.mark.extended,
        ),
        ({"logits_processors": [call("breaks", how="shape")]}, "returned logits of shape (2,)"),
        pytest.param(
            {"logits_processors": [call("fails")]},
            "logits processor 'fails' failed",
            marks=pytest.mark.extended,
        ),
        ({"stop_rules": [call("breaks", after=2)]}, "stop rule 'breaks' failed: ZeroDivisionError"),
        pytest.param(
            {"logits_processors": [call("insists", text="n")], "structured_outputs": {"choice": ["yes"]}},
            "is not allowed by the request's grammar",
            marks=pytest.mark.extended,
        ),
        ({"logits_processors": [call("hooked")]}, "the hook of the logits processor 'hooked' is 'post'"),
        pytest.param(
            {"output_parser": call("mute")},
            "output parser 'mute' did not return a string",
            marks=pytest.mark.extended,
        ),
        ({"output_parser": call("nothing")}, "'nothing' has no method push"),
        pytest.param(
            {"output_parser": call("late")}, "output parser 'late' failed", marks=pytest.mark.extended
        ),
        pytest.param(
            {"output_parser": call("late"), "max_time_ms": 1},
            "output parser 'late' failed",
            marks=pytest.mark.extended,
        ),
    ],
)
def test_an_exception_of_a_plugin_ends_its_own_answer_and_names_it(llm, options, words):
    with llm.stream("tell me", **DRAWN) as other:
        first = next(iter(other))
        with pytest.raises(ModelFailed, match=re.escape(words)):
            llm.generate("x", max_tokens=8, **options)
        text = first.text + "".join(delta.text for delta in other)
    assert text == llm.generate("tell me", **DRAWN).text


def test_a_plugin_survives_preemption():
    """It is asked once for each token, although the tokens are computed anew."""
    asked: list[int] = []

    def counts(token_ids, logits):
        asked.append(len(token_ids))

    plugins = SequencePlugins(processors=[("counts", counts)])
    older = sequence_of([6], max_length=16, max_tokens=12)
    sequence = sequence_of([5], max_length=16, max_tokens=12, plugins=plugins)
    engine = Engine(PagedLogits(max_length=16, num_blocks=4), decode=sample_loop)
    engine.add(older)
    engine.add(sequence)
    while engine.step():
        pass
    assert sequence.num_preemptions
    assert sequence.token_ids[1:] == greedy_answer([5], num_tokens=12)
    assert asked == list(range(1, 13))


@pytest.mark.parametrize("place", [np.array, torch.tensor])
def test_the_hook_chooses_before_or_after_the_rules_of_the_request(place):
    def forbid_all_but_7(token_ids, logits):
        assert type(logits) is type(place([0.0]))
        logits[:7] = logits[8:] = float("-inf")

    def raise_8(token_ids, logits):
        logits[8] = 100.0
        return logits

    raise_8.hook = "post_penalty"
    rows = place(np.zeros((3, VOCAB_SIZE), dtype=np.float32))
    sequences = [
        sequence_of([1], vocab_size=VOCAB_SIZE, suppress_tokens=(8,), plugins=SequencePlugins(processors=[p]))
        for p in (("only 7", forbid_all_but_7), ("8", raise_8))
    ]
    picks = sample(rows, [*sequences, sequence_of([1], vocab_size=VOCAB_SIZE)])
    assert [picked.token_id for picked in picks] == [7, 8, 0]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("class P: pass", "no method __call__"),
        ("class P:\n  def __call__(self): pass", "context"),
        ("def P(context, first): pass", "keyword-only"),
        ("def P(context, *, first): pass", "first has no annotation"),
        ("def P(context, *, first: Nowhere): pass", "Nowhere"),
        ("def P(context, *, first: object()): pass", "schema"),
        ("def P(context, *, first: __import__('typing').Callable): pass", "JsonSchema"),
        ("P = 3", "neither a class nor a function"),
        ("def P(context): pass\nP.hook = 'first'", "hook is 'first'"),
    ],
)
def test_a_plugin_with_a_wrong_signature_fails_the_load_with_its_line(tmp_path, code, words):
    path = tmp_path / "model.py"
    code = f"from __future__ import annotations\n\n{code}\n"
    path.write_text(
        f"{code}class TritonPythonModel:\n    stop_rules = {{'p': P}}\n    async def decode(self, s): pass\n"
    )
    with pytest.raises(RepositoryError, match=words) as raised:
        load_decoding(path, name="stage")
    assert "stop_rules['p']" in raised.value.message
    assert raised.value.message.startswith(str(path) if "= 3" in code else f"{path}:3")


def test_a_model_without_plugins_lists_none(tiny_repository):
    decoding = load_decoding(tiny_repository / "tiny_decoder" / "1" / "model.py", name="tiny_decoder")
    assert decoding.plugins.described() == {}
    params = SamplingParams()
    context = PluginContext(tokenizer=None, vocab_size=8, prompt_token_ids=(1,), params=params, seed=0)
    assert not decoding.plugins.for_sequence(context).processes
