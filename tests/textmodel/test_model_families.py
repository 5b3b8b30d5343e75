"""Answers of many model families: what a template writes into a history, the parser reads in an answer."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from genserve.completion import Delta, FinishReason, MessageDelta, joined_calls
from genserve.engine.engine import Engine
from genserve.engine.speculation import PromptLookup, Proposer, Speculation
from genserve.engine.token_sequence import TokenSequence
from genserve.sampling.grammar_bitmask import is_allowed
from genserve.sampling.logits_array import FloatArray
from genserve.text.message_parser import MessageParser
from genserve.textmodel.reasoning_tokens import ReasoningTokens
from tests.fakes.drafts import Foreseen
from tests.fakes.logits import PagedLogits
from tests.fakes.sequences import Clock, sample_loop
from tests.support.model_families import (
    FAMILIES,
    PUBLISHED,
    Answer,
    FamilyModel,
    Turn,
    random_turn,
    tokenizer_of_family,
)

MAX_LENGTH = 4096
# Those with thoughts first: pytest lets tests share a model whose place in their lists is the same.
MODELS = [
    pytest.param((family, published), id=published or family.name)
    for family in sorted(FAMILIES, key=lambda family: not family.thought)
    for published in (family.published if PUBLISHED else (None,))
]


@pytest.fixture(scope="module", params=MODELS)
def of_family(request) -> Iterator[Callable[[bool], FamilyModel]]:
    """Makes the family's model, with marks that are special tokens or others."""
    model = cache(lambda special: FamilyModel(*request.param, special=special))
    yield model
    for special in (False, True):
        model(special).tokenizer.close()


def read(parser: MessageParser, pieces: Sequence[tuple[str, tuple[int, ...]]]) -> Turn:
    deltas = [parser.read(Delta(text=text, token_ids=ids)) for text, ids in pieces]
    deltas.append(parser.read(Delta(text="", token_ids=(), finish_reason=FinishReason.STOP)))
    return turn_of(deltas)


def turn_of(deltas: Sequence[MessageDelta]) -> Turn:
    calls = joined_calls([call for delta in deltas for call in delta.tool_calls])
    return Turn(
        reasoning="".join(delta.reasoning for delta in deltas),
        content="".join(delta.content for delta in deltas),
        calls=tuple((call.name, json.loads(call.arguments)) for call in calls),
    )


def cut(text: str, draw: random.Random) -> list[tuple[str, tuple[int, ...]]]:
    pieces = []
    while text:
        length = draw.choice([1, 1, 2, 3, 7, 40])
        pieces.append((text[:length], ()))
        text = text[length:]
    return pieces


# The marks are special tokens with odd seeds.
ALL = pytest.param(range(200), id="all", marks=pytest.mark.extended)
SAMPLES = [[pytest.param(range(first, first + 1), id="one"), ALL] for first in range(2)]


@pytest.mark.parametrize("seeds", SAMPLES[0])
def test_a_streamed_answer_is_read_as_it_was_written(of_family, seeds):
    for seed in seeds:
        draw = random.Random(seed)
        model = of_family(seed % 2 == 1)
        turn = random_turn(model.family, draw)
        answer = model.answer(turn)
        assert read(model.parser(begun=answer.begun), cut(answer.text, draw)) == turn, answer.text
        by_token = zip(model.texts(answer.token_ids), ((i,) for i in answer.token_ids), strict=True)
        assert read(model.parser(begun=answer.begun), [*by_token]) == turn, answer.text


@pytest.mark.parametrize("of_family", [one for one in MODELS if one.values[0][0].thought], indirect=True)
@pytest.mark.parametrize("seeds", SAMPLES[0])
def test_an_open_thought_is_reasoning_and_calls_at_its_end_are_calls(of_family, seeds):
    for seed in seeds:
        draw = random.Random(seed)
        model = of_family(seed % 2 == 1)
        end = model.family.thought[1]
        turn = replace(random_turn(model.family, draw), content="", reasoning="I call.")
        is_dropped = model.family.drops_thoughts_without_calls and not turn.calls
        if is_dropped or end in json.dumps(turn.calls):
            continue
        answer = model.answer(turn)
        thought, mark, calls = answer.text.partition(end)
        calls = (mark + calls).removeprefix(model.family.forgotten or end)
        for text, expected in ((thought, replace(turn, calls=())), (thought + calls, turn)):
            assert read(model.parser(begun=answer.begun), cut(text, draw)) == expected, text


# Their arguments are JSON, texts between marks, and literals; and messages in channels.
FEW = ("qwen3", "qwen3_5", "lfm2_5", "gpt_oss")
FIRST_FEW = [
    pytest.param(*one.values, id=one.id, marks=[] if one.values[0][0].name in FEW else pytest.mark.extended)
    for one in MODELS
]
DRAFTED = [
    pytest.param(range(2), id="some"),
    *(pytest.param(range(n, n + 40), id=f"from-{n}", marks=pytest.mark.extended) for n in range(0, 200, 40)),
]


class Scripted(PagedLogits):
    """A model that writes given answers to given prompts, whatever else is drafted."""

    def __init__(self, answers: Mapping[tuple[int, ...], tuple[int, ...]], *, vocab_size: int) -> None:
        super().__init__(
            max_num_seqs=8, max_length=MAX_LENGTH, block_size=32, num_blocks=400, vocab_size=vocab_size
        )
        self._answers = answers

    def row_after(self, history: Sequence[int]) -> FloatArray:
        row = np.zeros(self.vocab_size, dtype=np.float32)
        row[self._next(tuple(history))] = 1
        return row

    def _next(self, history: tuple[int, ...]) -> int:
        for prompt, answer in self._answers.items():
            length = len(history) - len(prompt)
            if 0 <= length < len(answer) and history == prompt + answer[:length]:
                return answer[length]
        return 0  # behind a wrong draft


def generated(model: FamilyModel, answers: Mapping[tuple[int, ...], Answer], draft: Proposer | None):
    """What an engine generates for each prompt: the tokens, and the deltas; and its number of steps."""
    [eos, *_] = sorted(model.tokenizer.eos_token_ids)
    written = {prompt: (*answer.token_ids, eos) for prompt, answer in answers.items()}
    logits = Scripted(written, vocab_size=model.tokenizer.vocab_size)
    speculation = Speculation(draft) if draft else None
    engine = Engine(logits, decode=sample_loop, speculation=speculation, clock=Clock())
    deltas: dict[TokenSequence, list[Delta]] = {}
    for prompt, answer in answers.items():
        sequence = model.sequence(prompt, begun=answer.begun)
        deltas[sequence] = []
        engine.add(sequence)
    while (result := engine.step()) is not None:
        assert not result.failed
        for sequence in result.advanced:
            if delta := sequence.pop_delta():
                deltas[sequence].append(delta)
    engine.check_integrity()
    return deltas, len(logits.forwards)


@pytest.mark.parametrize("of_family", FIRST_FEW, indirect=True)
@pytest.mark.parametrize("seeds", DRAFTED)
def test_drafts_change_neither_the_text_nor_what_is_read_in_it(of_family, seeds):
    for few in (seeds[start : start + 8] for start in range(0, len(seeds), 8)):
        draw = random.Random(few[0])
        model = of_family(few[0] % 16 == 8)
        turns = [random_turn(model.family, draw) for _ in few]
        answers = {}
        for number, turn in zip(few, turns, strict=True):
            answer = model.answer(turn)
            # A turn before, which prompt lookup finds, and a token by which prompts differ.
            before = model.answer(draw.choice(turns)).token_ids
            answers[*answer.token_ids[:20], *before, 3 + number] = answer
        plain, num_steps = generated(model, answers, None)
        draft = PromptLookup() if few[0] % 32 < 16 else Foreseen(list(plain), error_rate=0.1)
        found, fewer_steps = generated(model, answers, draft)
        assert fewer_steps < num_steps
        for sequence, expected, turn in zip(found, plain, turns, strict=True):
            assert sequence.token_ids == expected.token_ids
            begun = answers[tuple(sequence.token_ids[: sequence.num_prompt_tokens])].begun
            for deltas in (found[sequence], plain[expected]):
                parser = model.parser(begun=begun)
                assert turn_of([parser.read(delta) for delta in deltas]) == turn


@pytest.mark.parametrize("seeds", SAMPLES[1])
def test_the_grammar_writes_what_the_template_writes(of_family, seeds):
    for seed in seeds:
        model = of_family(seed % 2 == 1)
        answer = model.answer(random_turn(model.family, random.Random(seed)))
        grammar = model.grammar(begun=answer.begun)
        mask = np.zeros(-(-model.tokenizer.vocab_size // 32), dtype=np.int32)
        for place, token_id in enumerate(answer.token_ids):
            grammar.fill(mask)
            before = model.tokenizer.decode(answer.token_ids[:place], skip_special_tokens=False)
            assert is_allowed(mask, token_id), (before[-60:], model.tokenizer.token(token_id))
            assert grammar.accept(token_id)
        grammar.fill(mask)
        assert grammar.complete or any(is_allowed(mask, i) for i in model.tokenizer.eos_token_ids)


def test_a_prompt_that_rules_out_reasoning_by_a_note_in_it_begins_it():
    [family] = [family for family in FAMILIES if family.name == "seed_oss"]
    note = "<seed:cot_budget_reflect>"
    with_note = replace(family, marks=(*family.marks, note))
    tokenizer = tokenizer_of_family(with_note, "{{ messages }}", special=True)
    reasoning = ReasoningTokens(tokenizer)
    assert reasoning.is_open_after(tokenizer.encode(f"<seed:think>{note}"))
    assert not reasoning.is_open_after(tokenizer.encode("<seed:think><seed:eos>"))
