"""The grammars of llguidance over a real tokenizer of 320 tokens."""

from __future__ import annotations

import re
import subprocess
import sys

import numpy as np
import pytest

from genserve.errors import InvalidRequest
from genserve.sampling.structured_outputs import structured_outputs
from genserve.structured_output.grammar_compiler import MAX_COMPILED, GrammarCompiler, GuidanceGrammar
from genserve.text.tokenizer import Tokenizer
from tests.text.vocabularies import (
    bloom,
    byte_level_bpe,
    sentencepiece_bpe,
    tokenizer_of,
    unigram,
    word_piece,
)

VOCAB_SIZE = 333     # padded, as in models


@pytest.fixture(scope="module")
def tokenizer(tiny_repository) -> Tokenizer:
    return Tokenizer.from_folder(tiny_repository / "tiny_tokenizer" / "1")


@pytest.fixture(scope="module")
def grammars(tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, vocab_size=VOCAB_SIZE)


def begin(grammars: GrammarCompiler, **options) -> GuidanceGrammar:
    form = structured_outputs(options)
    assert form is not None
    return grammars.compile(form)


def next_ids(grammar: GuidanceGrammar, *, vocab_size: int = VOCAB_SIZE) -> list[int]:
    mask = np.full(-(-vocab_size // 32), -1, dtype=np.int32)
    grammar.fill(mask)
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def random_text(
    grammar: GuidanceGrammar, tokenizer: Tokenizer, *, seed: int, vocab_size: int = VOCAB_SIZE
) -> str | None:
    """The text of a random model, or None if it does not end."""
    rng = np.random.default_rng(seed)
    token_ids: list[int] = []
    for _ in range(400):
        token_ids.append(int(rng.choice(next_ids(grammar, vocab_size=vocab_size))))
        if token_ids[-1] in tokenizer.eos_token_ids:
            return tokenizer.decode(token_ids[:-1])
        assert grammar.accept(token_ids[-1])
        if grammar.complete:
            return tokenizer.decode(token_ids)
    return None


def accepts(grammar: GuidanceGrammar, tokenizer: Tokenizer, text: str) -> bool:
    """Whether the whole text, followed by its end, is allowed."""
    for token_id in tokenizer.encode(text, add_special_tokens=False):
        if token_id not in next_ids(grammar):
            return False
        assert grammar.accept(token_id)
    return grammar.complete or not tokenizer.eos_token_ids.isdisjoint(next_ids(grammar))


@pytest.mark.parametrize(
    "regex", [r"\d{4}-\d\d", "(yes|no)!?", "[a-f]+", "é(b|😀)*", 'a/"b\\n', "^start.end$", "[a-z]{1,4}@[A-Z]"]
)
def test_a_text_matches_its_whole_regex(grammars, tokenizer, regex):
    texts = [random_text(begin(grammars, regex=regex), tokenizer, seed=seed) for seed in range(20)]
    finished = [text for text in texts if text is not None]
    assert finished
    assert all(re.fullmatch(regex, text) for text in finished)


def test_a_digit_is_an_ascii_digit(grammars, tokenizer):
    assert not accepts(begin(grammars, regex=r"\d+"), tokenizer, "\N{ARABIC-INDIC DIGIT TWO}")


def test_a_choice_may_contain_any_characters(grammars, tokenizer):
    choices = ["yes", "yes please", "no", 'q"u\\o', "two\nlines", "é😀", "/a+/", " led", "<|x|>"]
    drawn = {random_text(begin(grammars, choice=choices), tokenizer, seed=seed) for seed in range(60)}
    assert drawn <= set(choices)
    assert all(accepts(begin(grammars, choice=choices), tokenizer, choice) for choice in choices)
    assert not accepts(begin(grammars, choice=choices), tokenizer, "yes p")


@pytest.mark.parametrize("text", ["{}", "a{}b", "{}{}"])
def test_the_name_of_a_special_token_is_text_like_any_other(grammars, tokenizer, text):
    text = text.replace("{}", tokenizer.eos_token)
    grammar, token_ids = begin(grammars, choice=[text]), []
    while not grammar.complete:
        token_ids.append(next_ids(grammar)[0])
        assert grammar.accept(token_ids[-1])
    assert tokenizer.decode(token_ids) == text


@pytest.mark.parametrize(
    "grammar", ['?start: "<" NAME ">"\nNAME: /[a-z]+/', 'root ::= "<" [a-z]+ ">"'], ids=["lark", "gbnf"]
)
def test_a_grammar_may_be_in_lark_or_gbnf(grammars, tokenizer, grammar):
    assert accepts(begin(grammars, grammar=grammar), tokenizer, "<abc>")
    assert not accepts(begin(grammars, grammar=grammar), tokenizer, "<abc")


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        (r'root ::= "\u00e9ab"', "\u00e9ab"),
        (r'root ::= "\\u00e9"', r"\u00e9"),
        (r'root ::= "\x22\U0001F600\n"', '"\U0001f600\n'),
        (r"root ::= [\u00e8-\u00ea]", "\u00e9"),
        (r"root ::= [a-z&&b]", "a"),
        (r"root ::= [--/]", "."),
        (r"root ::= [^\]a]", "b"),
        (r'root ::= . "." # any "character', "\n."),
        (r'start: "x::=y"', "x::=y"),
    ],
)
def test_characters_of_a_grammar_are_those_of_its_notation(grammars, tokenizer, grammar, text):
    assert accepts(begin(grammars, grammar=grammar), tokenizer, text)


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        ('root ::= word "ing"\nword ::= [a-z]+', "going"),
        ('root ::= "<" text "</end>"\ntext ::= [^\\x00]*', "<a<b\n</end>"),
        ('root ::= item ("," item)*\nitem ::= ws [0-9]{1,2} ws\nws ::= | " " b\nb ::= " "*', "1 ,  23 "),
        ('root ::= "(" root ")" | [0-9]+ | ""', "((12))"),
        ("root ::= ([0-9a-f]{2})+", "12ab"),
        ('root ::= "(" root ")" | ((( [0-9]+ ) )? "-")*', "(1--)"),
        # In Lark's notation it is twice as long.
        pytest.param('root ::= "!" ("," ' + "[,.;:] " * 9000 + ")?", "!", id="long"),
    ],
)
def test_rules_of_gbnf_match_in_any_way_that_lets_the_rest_match(grammars, tokenizer, grammar, text):
    assert accepts(begin(grammars, grammar=grammar), tokenizer, text)


WEATHER = {"begin": "<f=rain>", "schema": {"enum": [1, 2]}, "end": "</f>"}
CLOCK = {"begin": "<f=time>", "schema": {"type": "array", "maxItems": 0}, "end": "</f>"}
TAG = {"structures": [WEATHER, CLOCK], "triggers": ["<f="]}
DEEP = '{"items":' * 200 + "{}" + "}" * 200


@pytest.mark.parametrize(
    ("text", "is_read", "may_end"),
    [
        ("well, <f and </f>", True, True),
        ("so: <f=rain>", True, False),
        ("so: <f=rain>2</f> and <f=time>[]</f><", True, True),
        ("so: <f=snow>", False, False),
        ("so: <f=rain>3", False, False),
        ("so: <f=rain>2</f> and <f=rain>[", False, False),
    ],
)
def test_a_text_with_tags_is_free_outside_of_them(grammars, tokenizer, text, is_read, may_end):
    grammar = begin(grammars, structural_tag=TAG)
    assert all(grammar.accept(token_id) for token_id in tokenizer.encode(text)) == is_read
    assert (not tokenizer.eos_token_ids.isdisjoint(next_ids(grammar))) == may_end


def test_json_object_allows_only_objects(grammars, tokenizer):
    assert accepts(begin(grammars, json_object=True), tokenizer, '{"a": [1, null]}')
    assert not accepts(begin(grammars, json_object=True), tokenizer, "[1]")


OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "array"}}}
SPACED, TIGHT = '{"a": 1, "b": [1, 2]}', '{"a":1,"b":[1,2]}'
LINES = '{\n    "a": 1,\n    "b": [1, 2]\n}'


@pytest.mark.parametrize(
    ("options", "allowed", "rejected"),
    [
        ({}, [SPACED], [TIGHT, LINES]),
        ({"disable_any_whitespace": False}, [SPACED, TIGHT, LINES], [SPACED.replace("1", " " * 40 + "1", 1)]),
        ({"whitespace_pattern": ""}, [TIGHT], [SPACED, LINES]),
        ({"whitespace_pattern": " ?"}, [SPACED, TIGHT], [LINES]),
        ({}, ["{}"], ['{"a": 1, "b": [], "c": 1}']),
        ({"disable_additional_properties": False}, ['{"a": 1, "b": [], "c": 1}'], ['{"a":1}']),
    ],
)
@pytest.mark.parametrize("form", ["json", "structural_tag"])
def test_json_is_compact_unless_a_request_asks_for_another_form(
    grammars, tokenizer, form, options, allowed, rejected
):
    tag = {"structures": [{"begin": "<f>", "schema": OBJECT, "end": "</f>"}], "triggers": ["<f>"]}
    written = "{}" if form == "json" else "<f>{}</f>"
    asked = options | {form: OBJECT if form == "json" else tag}
    for texts, is_allowed in ((allowed, True), (rejected, False)):
        for text in texts:
            answer = written.replace("{}", text)
            assert accepts(begin(grammars, **asked), tokenizer, answer) == is_allowed


def test_the_options_of_a_schema_of_llguidance_do_not_apply(grammars, tokenizer):
    schema = OBJECT | {"x-guidance": {"whitespace_flexible": True, "item_separator": ";"}}
    assert accepts(begin(grammars, json=schema), tokenizer, SPACED)
    assert not accepts(begin(grammars, json=schema), tokenizer, LINES)


def test_a_grammar_is_complete_when_nothing_may_follow(grammars, tokenizer):
    number, word = begin(grammars, json={"type": "integer"}), begin(grammars, regex="no")
    assert not word.complete
    for grammar in (number, word):
        for token_id in tokenizer.encode("1" if grammar is number else "no", add_special_tokens=False):
            assert grammar.accept(token_id)
    assert word.complete
    assert not number.complete
    assert not tokenizer.eos_token_ids.isdisjoint(next_ids(number))


def test_answers_with_the_same_grammar_are_independent(grammars):
    first, second = begin(grammars, regex="[ab]c"), begin(grammars, regex="[ab]c")
    allowed = next_ids(second)
    assert first.accept(allowed[0])
    assert next_ids(second) == allowed != next_ids(first)


def test_a_token_that_is_not_allowed_is_rejected(grammars, tokenizer):
    grammar = begin(grammars, regex="no")
    assert not grammar.accept(tokenizer.encode("y")[0])
    assert grammar.failure
    assert next_ids(grammar) == []


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"regex": "[a"}, "unclosed character class"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"regex": r"[^\s\S]"}, "no text"),
        ({"grammar": "start: nobody"}, "nobody"),
        ({"grammar": 'root ::= "a'}, "line 1"),
        ({"grammar": r'root ::= "\ud83d"'}, r"\ud83d is no character"),
        ({"json": {"type": "string", "not": {"const": "a"}}}, "not"),
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json": {"x-guidance": {"lenient": True}, "uniqueItems": True}}, "uniqueItems"),
        ({"json": {"type": "text"}}, "text"),
        ({"structural_tag": TAG | {"structures": [WEATHER | {"schema": {"not": {}}}]}}, "not"),
        ({"json": {"type": "string", "format": "colour"}}, "colour"),
        ({"json": {"$ref": "#/$defs/missing"}}, "missing"),
        ({"json": DEEP}, "recursion limit"),
        ({"structural_tag": TAG | {"structures": [WEATHER | {"schema": DEEP}]}}, "recursion limit"),
        ({"json": {"$ref": "http://localhost/schema"}}, "localhost"),
        ({"json": {"$ref": "#"}}, "no text"),
        ({"json": {"const": 1, "minimum": 2}}, "nsatisfiable"),
        # Each way to begin is an item of the parser.
        ({"grammar": "start: " + " | ".join(f'"{number}"' for number in range(3000))}, "items"),
    ],
)
def test_a_grammar_that_does_not_compile_is_rejected_with_the_reason(grammars, options, reason):
    with pytest.raises(InvalidRequest, match=re.escape(reason)) as rejection:
        begin(grammars, **options)
    assert rejection.value.field == "structured_outputs"


def test_only_the_latest_grammars_stay_compiled(grammars):
    for number in range(MAX_COMPILED + 3):
        begin(grammars, regex=f"x{number}")
    kept = [form.text for form in grammars._compiled]
    assert kept == [f"x{number}" for number in range(3, MAX_COMPILED + 3)]
    begin(grammars, regex="x3")
    assert [form.text for form in grammars._compiled][-1] == "x3"


def test_llguidance_is_imported_by_the_first_request_that_needs_it(tiny_repository):
    program = f"""
import sys
from genserve import LLM
with LLM(model_repository={str(tiny_repository)!r}) as llm:
    llm.generate("a", max_tokens=2)
    print("llguidance" in sys.modules, "torch" in sys.modules)
    print(llm.generate("a", structured_outputs=dict(choice=["yes"])).text)
    print("llguidance" in sys.modules, "torch" in sys.modules)
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines() == ["False False", "yes", "True False"]


@pytest.mark.parametrize("family", [byte_level_bpe, sentencepiece_bpe, bloom])
def test_tokenizers_with_byte_tokens_support_grammars(family):
    tokenizer = ending(family())
    grammars = GrammarCompiler(tokenizer, vocab_size=tokenizer.vocab_size)
    for seed in range(20):
        text = random_text(
            begin(grammars, regex="ab?( a| b| é)*"), tokenizer, seed=seed, vocab_size=tokenizer.vocab_size
        )
        assert text is None or re.fullmatch("ab?( a| b| é)*", text)


@pytest.mark.parametrize("family", [unigram, word_piece])
def test_other_tokenizers_are_rejected(family):
    tokenizer = ending(family())
    with pytest.raises(InvalidRequest, match="llguidance rejects the tokenizer"):
        begin(GrammarCompiler(tokenizer, vocab_size=tokenizer.vocab_size), regex="a")


def test_a_tokenizer_with_more_tokens_than_logits_is_rejected(tokenizer):
    with pytest.raises(InvalidRequest, match="llguidance rejects the tokenizer"):
        begin(GrammarCompiler(tokenizer, vocab_size=300), regex="a")


def test_a_model_without_an_eos_token_is_rejected():
    tokenizer = tokenizer_of(byte_level_bpe())
    with pytest.raises(InvalidRequest, match="end-of-sequence"):
        begin(GrammarCompiler(tokenizer, vocab_size=tokenizer.vocab_size), regex="a")


def ending(backend) -> Tokenizer:
    """A tokenizer whose third token ends a text."""
    tokenizer = tokenizer_of(backend)
    tokenizer.eos_token_ids = frozenset({2})
    return tokenizer
