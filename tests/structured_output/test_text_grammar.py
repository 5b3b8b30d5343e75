"""Grammars of texts within JSON strings: they allow what the given grammar allows, escaped."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

import pytest
from llguidance import LLMatcher, LLTokenizer

from genserve.prompt import TextFormat
from genserve.structured_output.text_grammar import MAX_CHARS, TextGrammarError, text_grammar, text_rules

BEFORE, AFTER = json.dumps('{"input": "'), json.dumps('"}')
# The grammar of Codex's tool `apply_patch`.
APPLY_PATCH = r"""
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?

filename: /(.+)/
add_line: "+" /(.*)/ LF -> line

change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF

%import common.LF
"""
PATCH = '*** Begin Patch\n*** Update File: a\\b "c".py\n@@ é\n-\ttab\n+\x01"\n \n*** End Patch'
CALCULATOR = r"""
// An expression, with comments.
?start: sum      # the start
sum: product | sum ("+" | "-") product
product: atom
    | product "*" atom
atom: NUMBER | "(" sum ")" | STRING | NAME
STRING: "\"" ("a".."z" | "\\" | "\n"i)* "\""
NAME: /[a-z_]+/i & ~("if" | /else/)
%import common.NUMBER
%import common (WS, CNAME)
%ignore WS
"""
# Without recursion.
PAIRS = r"""
start: pair (";" pair)~1..2 last?
pair: NAME "=" (VALUE | "NULL"i | "\x41".."\u0043") -> a_pair
last: ";"
NAME: /[a-z]+/ & ~("if" | "x".."y" | "\"")
VALUE: INTEGER | "\"" /[^"\\]*/ "\""
%import common.INT -> INTEGER
%ignore /[ \n]+/   // and comments
%ignore "#" /[a-z]*/ LF
%import common.LF
"""


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    return LLTokenizer("byte")


def accepts(tokenizer: LLTokenizer, grammar: str, text: str) -> bool:
    """Whether a whole text matches a grammar."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = tokenizer.tokenize_bytes(text.encode())
    return matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting()


def grammar(form: TextFormat, *, in_json: bool) -> str:
    before, after = (BEFORE, AFTER) if in_json else ("", "")
    rules = text_rules(form, name="TEXT", in_json=in_json)
    if rules is None:
        recursive = {"name": "text", "lark_grammar": text_grammar(form, after=after, in_json=in_json)}
        return json.dumps({"grammars": [{"lark_grammar": f"start: {before} @text"}, recursive]})
    return LLMatcher.grammar_from_lark("\n".join([f"start: {before} TEXT {after}", *rules]))


def written(form: TextFormat) -> str:
    return grammar(form, in_json=True)


def as_given(form: TextFormat) -> str:
    return grammar(form, in_json=False)


def escaped(text: str) -> str:
    return json.dumps({"input": text}, ensure_ascii=False)


@pytest.mark.parametrize(
    ("definition", "fitting", "others"),
    [
        (
            APPLY_PATCH,
            (PATCH, PATCH + "\n", "*** Begin Patch\n*** Add File: é\n+\n*** End Patch\n"),
            ("", PATCH + "\n\n", PATCH.replace("@@ é", "@é"), PATCH.replace("\n-", "\nx"), PATCH[:-1]),
        ),
        (
            PAIRS,
            ('a=1;b = "\n\t";', "a=1;b=null", "a=\nB #c\n;iff=Null\n ; b=2"),
            ("", "a=1", ' a=1;b=2', "a=D;b=1", "if=1;b=1", 'a="\\";b=1', "a=1;b=1;c=1;d=1", "a=1\t;b=1"),
        ),
        (
            'start: "\U0001f600\\u007f\\"" /\U0001f600|\\x7f/',
            ('\U0001f600\x7f"\U0001f600', '\U0001f600\x7f"\x7f'),
            ("\U0001f600", '\U0001f600\x7f"\U0001f601'),
        ),
        (
            CALCULATOR,
            ("1", '1 +\n 2 *("a\\\nz")', "iff", "1 "),
            ("", "\t1", "1 +", '"A"', "if", "else", '"', "\\n"),
        ),
    ],
)
def test_a_grammar_of_lark_holds_within_json(tokenizer, definition, fitting, others):
    form = TextFormat(syntax="lark", definition=definition)
    given = LLMatcher.grammar_from_lark(definition)
    for text in fitting:
        assert accepts(tokenizer, given, text), text
        assert accepts(tokenizer, as_given(form), text), text
        assert accepts(tokenizer, written(form), escaped(text)), text
        json_text = escaped(text)
        for changed in (json_text + " ", " " + json_text, json_text + "\\n", json_text[:-1], text):
            assert not accepts(tokenizer, written(form), changed), changed
    for text in others:
        assert not accepts(tokenizer, given, text), text
        assert not accepts(tokenizer, as_given(form), text), text
        assert not accepts(tokenizer, written(form), escaped(text)), text


REGEXES = [
    r"a+",
    r"(.*)",
    r"(?s)(.|é)*",
    r"(?s:.)+a.*",
    r"(a|(?s).)(.)",
    r"[^a\\]*",
    r"[\s\S]*",
    r"[a\n-]+",
    r"[\]\"\\/]+",
    r"[[:cntrl:]]+|[[:^space:]]*",
    r"[a-z&&[^b]\n]*",
    r"[\x00-\x22--\t]*",
    r"\w+\s*=\s*\"[^\"]*\"",
    r"\D*\n",
    r"\p{Cc}+|\P{L}+",
    r"\x{22}\u005c\t",
    r"(?P<name>/a/)|b{2,3}|\.\*",
    r"(?i)É\nn",
    r"(?i:[k\n])+",
]
CHARACTERS = ("a", "b", "z", "n", "N", "K", "é", "É", "\u212a", "\U0001f600", " ", "=", "/", ".", "*", "-")
CHARACTERS += ("]", "0")
CHARACTERS += ('"', "\\", "\n", "\t", "\r", "\b", "\f", "\v", "\x00", "\x1f", "\x7f")


def texts() -> Iterator[str]:
    draw = random.Random(5)
    yield from ("", *CHARACTERS, '"\\\t', "/a/", "bb", ".*", "é\nn", "É\nN", 'a = "b"')
    for _ in range(40):
        yield "".join(draw.choices(CHARACTERS, k=draw.randint(2, 5)))


@pytest.mark.parametrize("pattern", REGEXES)
@pytest.mark.parametrize("syntax", ["regex", "lark"])
def test_a_regular_expression_holds_within_json(tokenizer, pattern, syntax):
    in_slashes = pattern.replace("/", r"\/")
    definition = pattern if syntax == "regex" else f"start: /{in_slashes}/"
    form = TextFormat(syntax=syntax, definition=definition)
    plain, held = LLMatcher(tokenizer, as_given(form)), LLMatcher(tokenizer, written(form))
    assert not held.is_error(), held.get_error()
    for text in texts():
        results = []
        for matcher, tried in ((plain, text), (held, escaped(text))):
            ids = tokenizer.tokenize_bytes(tried.encode())
            fits = matcher.validate_tokens(ids) == len(ids)
            copy = matcher.deep_copy()
            results.append(fits and copy.consume_tokens(ids) and copy.is_accepting())
        assert results[0] == results[1], (text, results)


@pytest.mark.parametrize(
    ("syntax", "definition"),
    [
        ("lark", 'start: %json {"type": "object"}'),
        ("lark", 'start: %regex {"substring_chars": "ab"}'),
        ("lark", 'start: %lark { start: "a" }'),
        ("lark", '%llguidance {"no_forcing": true}\nstart: "a"'),
        ("lark", "start: <|im_end|>"),
        ("lark", "start: <[3]>"),
        ("lark", "start: @other"),
        ("lark", "%import python.NAME\nstart: NAME"),
        ("lark", "%import common.NOTHING\nstart: NOTHING"),
        ("lark", "start: 'a'"),
        ("lark", ""),
        ("lark", 'begin: "a"'),
        ("lark", 'start: "a"\nstart: "b"'),
        ("lark", '"a"'),
        ("lark", "start: /a/x"),
        ("lark", 'start: "ab".."c"'),
        ("lark", "a" * (MAX_CHARS + 1)),
        ("regex", "(?x)a b"),
        ("regex", "(?R).$"),
        ("regex", "(?-u:a)"),
        ("regex", "[a"),
        ("regex", r"\x{110000}"),
    ],
)
def test_what_is_not_supported_is_an_error(syntax, definition):
    with pytest.raises(TextGrammarError):
        text_rules(TextFormat(syntax=syntax, definition=definition), name="TEXT", in_json=True)
