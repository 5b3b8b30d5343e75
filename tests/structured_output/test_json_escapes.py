"""The spellings of strings in JSON that a grammar allows: all of RFC 8259, whatever the schema."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend

from genserve.prompt import Tool
from genserve.sampling.structured_outputs import structured_outputs
from genserve.structured_output.grammar_compiler import GrammarCompiler, GuidanceGrammar
from genserve.structured_output.json_escapes import unescaped
from genserve.structured_output.tool_grammar import ToolGrammar
from genserve.text.tokenizer import Tokenizer
from genserve.text.tokenizer_files import TokenizerFiles
from genserve.text.tool_formats import HERMES
from tests.structured_output.test_grammar_compiler import VOCAB_SIZE, accepts, next_ids, random_text
from tests.support.json_strings import SPELLINGS, random_strings
from tests.support.representatives import with_extended
from tests.support.tiny_llama import tiny_tokenizer
from tests.text.vocabularies import sentencepiece_bpe

STRINGS = random_strings(100, seed=0)


def tokenizer_of(backend: Backend) -> Tokenizer:
    files = TokenizerFiles(
        backend=backend,
        special_tokens={},
        add_bos_token=False,
        eos_token_ids=frozenset({2}),
        chat_template=None,
    )
    return Tokenizer(files)


def with_words(*words: str) -> Tokenizer:
    """A tokenizer in whose vocabulary some texts are one token, though not added ones."""
    backend = json.loads(tiny_tokenizer(vocab_size=320).to_str())
    model = backend["model"]
    for word in words:
        for end in range(2, len(word) + 1):
            model["merges"].append([word[: end - 1], word[end - 1]])
            model["vocab"].setdefault(word[:end], len(model["vocab"]))
    return tokenizer_of(Backend.from_str(json.dumps(backend)))


def words_of_escapes() -> Tokenizer:
    """As in the vocabularies of Llama 3 and Qwen 2.5."""
    return with_words(r"\u", "00", "e9", r"\/", r":\/\/", "9s", "://", r"d\"")


# Tokens of words hold whole escapes and parts of some, tokens of bytes only parts.
@pytest.fixture(scope="module", params=["words", pytest.param("bytes", marks=pytest.mark.extended)])
def tokenizer(request) -> Tokenizer:
    if request.param == "bytes":
        return tokenizer_of(tiny_tokenizer(vocab_size=320))
    return words_of_escapes()


@pytest.fixture(scope="module")
def grammars(tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, vocab_size=VOCAB_SIZE)


def begin(grammars: GrammarCompiler, **options: Any) -> GuidanceGrammar:
    form = structured_outputs(options)
    assert form is not None
    return grammars.compile(form)


def calling(grammars: GrammarCompiler, schema: dict[str, Any], *, must_call: bool) -> GuidanceGrammar:
    tools = ToolGrammar(
        tool_format=HERMES,
        tools={0: Tool(name="f", parameters={"properties": {"a": schema}, "required": ["a"]})},
        must_call=must_call,
        parallel=False,
        after_reasoning=False,
    )
    return grammars.compile_tools(tools, text=None)


SCHEMAS = {
    "any text": {"type": "string"},
    "a bounded length": {"type": "string", "minLength": 1, "maxLength": 60},
    "a pattern": {"type": "string", "pattern": r"^[^|]*$"},
    "a format and a length": {"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 60}]},
}


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("schema", with_extended(SCHEMAS, always=("any text", "a pattern")))
def test_a_string_may_be_spelled_in_any_way(grammars, tokenizer, schema, spelling):
    strings = STRINGS if schema == "any text" else STRINGS[::3]
    text = f"[{', '.join(map(SPELLINGS[spelling], strings))}]"
    grammar = begin(grammars, json={"type": "array", "items": SCHEMAS[schema]})
    if schema == "a pattern":  # no token goes on behind an escape there
        token_ids = [i for one in text for i in tokenizer.encode(one, add_special_tokens=False)]
    else:
        token_ids = tokenizer.encode(text, add_special_tokens=False)
    for token_id in token_ids:
        assert token_id in next_ids(grammar)
        assert grammar.accept(token_id)
    assert grammar.complete


@pytest.mark.parametrize("must_call", [False, True])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_arguments_may_be_spelled_in_any_way(grammars, tokenizer, spelling, must_call):
    schema = {"type": "array", "items": {"type": "string"}}
    strings = ", ".join(map(SPELLINGS[spelling], STRINGS[::2]))
    content = "" if must_call else r"\usepackage C:\ \/ \u00 "
    text = f'{content}<tool_call>\n{{"name": "f", "arguments": {{"a": [{strings}]}}}}\n</tool_call>'
    assert accepts(calling(grammars, schema, must_call=must_call), tokenizer, text)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ({"choice": [r"\alpha", "/x"]}, r"\/x"),
        ({"choice": [r"\union", "é"]}, r"\u00e9"),
        ({"regex": "(\\\\n|é)+"}, r"\u00e9"),
        ({"grammar": r'start: "\\n" | "/"'}, r"\/"),
    ],
)
def test_a_text_that_is_no_json_has_no_escapes_beside_tools(grammars, tokenizer, form, text):
    tools = ToolGrammar(
        tool_format=HERMES, tools={0: Tool(name="f")}, must_call=False, parallel=False, after_reasoning=False
    )
    begun = grammars.compile_tools(tools, text=structured_outputs(form))
    assert not accepts(begun, tokenizer, text)


STRUCTURE = {"begin": "<a>", "schema": {"type": "array", "items": {"type": "string"}}, "end": "</a>"}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_json_within_tags_may_be_spelled_in_any_way(grammars, tokenizer, spelling):
    strings = ", ".join(map(SPELLINGS[spelling], STRINGS[::3]))
    grammar = begin(grammars, structural_tag={"structures": [STRUCTURE], "triggers": ["<a>"]})
    assert accepts(grammar, tokenizer, rf"C:\ \/ \u00 <a>[{strings}]</a>\/")


@pytest.mark.parametrize(
    ("grammar", "expected"),
    [
        ('start: "%json {" %json {"type": "string"} "}"', True),
        ('start: "%json {" a "}" // %json {"\na: %json\n {\n}', True),
        ('start: "%json {" %json {"type": "string", "x-guidance": {}} "}"', False),
    ],
)
def test_json_of_a_lark_grammar_may_have_escapes_by_code(grammars, tokenizer, grammar, expected):
    text = r'%json {"caf\u00e9\ud83d\ude00"}'
    assert accepts(begin(grammars, grammar=grammar), tokenizer, text) == expected


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"json_object": True}, marks=pytest.mark.extended),
        {"json": {"additionalProperties": True}},
    ],
)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_keys_may_be_spelled_in_any_way(grammars, tokenizer, options, spelling):
    pairs = ", ".join(f"{SPELLINGS[spelling](one)}: 1" for one in STRINGS[::2])
    assert accepts(begin(grammars, **options), tokenizer, f"{{{pairs}}}")


@pytest.mark.parametrize("schema", SCHEMAS)
def test_lone_surrogates_and_unknown_escapes_are_refused(grammars, tokenizer, schema):
    for text in (r"\ud83d", r"\ude00", r"\ud83d\u0041", r"\ud83dx", r"\x41", r"\u12g4"):
        assert not accepts(begin(grammars, json=SCHEMAS[schema]), tokenizer, f'"{text}"'), text


@pytest.mark.parametrize("begun", [pytest.param('"\\', marks=pytest.mark.extended), r'"\u00'])
@pytest.mark.parametrize("schema", with_extended(SCHEMAS, always=("any text", "a pattern")))
def test_a_loop_that_ignores_the_mask_cannot_write_an_unknown_escape(grammars, tokenizer, schema, begun):
    grammar = begin(grammars, json=SCHEMAS[schema])
    for token_id in tokenizer.encode(begun, add_special_tokens=False):
        assert grammar.accept(token_id)
    allowed = next_ids(grammar)
    for token_id in range(len(tokenizer.token_texts())):
        assert grammar.fork().accept(token_id) == (token_id in allowed)


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        ({"pattern": r"^https?://[^\s]+/a$"}, r'"https://b\/\/a"', True),
        ({"pattern": r"^https?://[^\s]+/a$"}, r'"https://b\/\/ "', False),
        ({"pattern": "^[a-z]+$"}, r'"a\/b"', False),
        ({"pattern": "^.{3}$"}, r'"\u00e9\ud83d\ude00\/"', True),
        ({"pattern": "^.{2}$"}, r'"\u00e9\ud83d\ude00\/"', False),
        ({"pattern": "^[^\u0400-\u04ff]*$"}, r'"\u03ff"', True),
        ({"pattern": "^[^\u0400-\u04ff]*$"}, r'"\u0410"', False),
        ({"pattern": "^[a-z\u00e4\u00f6\u00fc\u00df\\s]+$"}, r'"m\u00fcller"', True),
        ({"pattern": "^[\u0430-\u044f\u0451\\s]+$"}, r'"\u0430\u0451"', True),
        ({"pattern": '^[a-z\u00e7\u011f\u0131\u015f"]+$'}, r'"\u015f"', True),
        ({"pattern": '^[\u3041-\u3093"]+$'}, r'"\u3042"', True),
        ({"pattern": '^[\U0001f600-\U0001f60f"]+$'}, r'"\ud83d\ude0e"', True),
        ({"pattern": '^[\U0001f600-\U0001f60f"]+$'}, r'"\ud83d\ude10"', False),
        ({"maxLength": 2}, r'"\ud83d\ude00\/"', True),
        ({"maxLength": 2}, r'"\ud83d\ude00\/a"', False),
        # A text in which nothing must be escaped is written as it is, so a model has no choice to get wrong.
        ({"pattern": "^https?://a$"}, '"https://a"', True),
        ({"pattern": "^https?://a$"}, r'"https:\/\/a"', False),
        ({"enum": ["a/b", "caf\u00e9"]}, '"caf\u00e9"', True),
        ({"enum": ["a/b", "caf\u00e9"]}, r'"caf\u00e9"', False),
        ({"enum": ["a/b", "caf\u00e9"]}, r'"a\/b"', False),
        ({"enum": ['a"/b']}, r'"a\"/b"', True),
    ],
)
def test_an_escape_counts_as_the_character_that_it_stands_for(grammars, tokenizer, schema, text, expected):
    schema = schema if "enum" in schema else {"type": "string", **schema}
    assert accepts(begin(grammars, json=schema), tokenizer, text) == expected


@pytest.mark.parametrize("must_call", [False, True])
def test_no_slash_is_escaped_outside_of_strings(grammars, tokenizer, must_call):
    grammar = calling(grammars, {"type": "integer"}, must_call=must_call)
    text = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n<'
    for token_id in tokenizer.encode(text, add_special_tokens=False):
        assert grammar.accept(token_id)
    allowed = [tokenizer.token_texts()[token_id] for token_id in next_ids(grammar)]
    assert all(text.startswith("/") for text in allowed)


@pytest.mark.parametrize("schema", SCHEMAS)
def test_a_random_model_writes_json_of_the_schema_to_its_end(grammars, tokenizer, schema):
    for seed in range(4):
        text = random_text(begin(grammars, json={**SCHEMAS[schema], "maxLength": 8}), tokenizer, seed=seed)
        assert text is not None or schema == "a pattern"
        assert text is None or isinstance(json.loads(text), str | int)


def test_a_copy_goes_on_with_the_escape(grammars, tokenizer):
    grammar = begin(grammars, json={"type": "string", "pattern": "^.$"})
    for token_id in tokenizer.encode('"\\', add_special_tokens=False):
        assert grammar.accept(token_id)
    copy = grammar.fork()
    for token_id in tokenizer.encode('n"', add_special_tokens=False)[:1]:
        assert token_id not in next_ids(grammar), "no newline"
    assert accepts(copy, tokenizer, '/"')
    assert accepts(grammar, tokenizer, 'u00e9"')


def test_a_vocabulary_of_sentencepiece_spells_escapes_too():
    tokenizer = tokenizer_of(sentencepiece_bpe())
    grammars = GrammarCompiler(tokenizer, vocab_size=len(tokenizer.token_texts()))
    grammar = begin(grammars, json={"type": "string", "pattern": "^[^|]*$"})
    ids = {text: token_id for token_id, text in enumerate(tokenizer.token_texts())}
    for byte in rb'"\u00e9\/"':
        token_id = ids.get(chr(byte), 3 + byte)
        assert grammar.accept(token_id), chr(byte)
    assert grammar.complete


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (rb"caf\u00e9", "caf\u00e9"),
        (rb"\ud83d\ude00\/", "\U0001f600/"),
        (rb"\n\\\"", '\n\\"'),
        (rb"a\u00", r"a\u00"),
    ],
)
def test_escapes_are_read(text, expected):
    assert unescaped(text) == expected.encode()
