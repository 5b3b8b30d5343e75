r"""GBNF: llama.cpp's notation of grammars, which llguidance converts to Lark's.

Its converter loses the zeros of `\u00e9`, reads `&&`, `--` and `~~` in a class as Rust's operations on sets,
and has `.` match no newline; it writes `("a"{2})+` without the parentheses, and Lark's reader rejects it. So
characters, classes and such repetitions are rewritten before.

A rule of llama.cpp's matches in any way that lets the rest match; a terminal of Lark's matches as much as it
can, so that nothing would follow `word` in `word "ing"`. So a grammar without recursion becomes one terminal.
In a recursive one, or one of more than `MAX_CHARS` characters, a rule that needs no recursive rule matches as
much as it can.
"""

from __future__ import annotations

import re

from genserve.prompt import TextFormat
from genserve.structured_output.text_grammar import TextGrammarError, text_rules

_CHAR = r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)|[^\\]"
# The texts, classes, comments and dots of a grammar, and the ends of what is repeated and repeated again.
_PART = re.compile(
    r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|#[^\n]*|\.|[*+?}][\s)]*\)(?=\s*[*+?{])', re.DOTALL
)
_ITEM = re.compile(rf"({_CHAR})(?:(-)({_CHAR}))?", re.DOTALL)
_ONE = re.compile(_CHAR, re.DOTALL)
_RULE = re.compile(r"^[ \t]*[\w-]+\s*::=", re.MULTILINE)
_ANY = "[\\x00-\U0010ffff]"
_MEANT = {"n": "\n", "r": "\r", "t": "\t", **{char: char for char in '\\"[]'}}


def is_gbnf(grammar: str) -> bool:
    """Return whether a grammar is in this notation."""
    return _RULE.search(grammar) is not None


def gbnf_to_lark(grammar: str) -> str:
    """Return a grammar in Lark's notation.

    Raises:
        ValueError: it has an escape that is no character, or llguidance's converter rejects it.
    """
    from llguidance import grammar_from

    lark = grammar_from("gbnf", _PART.sub(_rewritten, grammar))
    form = TextFormat(syntax="lark", definition=lark.removeprefix("%llguidance {}"))
    try:
        rules = text_rules(form, name="TEXT", in_json=False)
    except TextGrammarError:
        rules = None
    return lark if rules is None else "\n".join(["start: TEXT", *rules])


def _rewritten(part: re.Match[str]) -> str:
    text = part[0]
    match text[0]:
        case "#":
            return text
        case ".":
            return _ANY
        case '"':
            return f'"{_ONE.sub(lambda found: _written(found[0]), text[1:-1])}"'
        case "[":
            sign = "^" if text.startswith("[^") else ""
            return f"[{sign}{_ITEM.sub(_item, text[1 + len(sign) : -1])}]"
    return f'{text[0]} ""{text[1:]}'  # so that its parentheses stay


def _item(found: re.Match[str]) -> str:
    """Rewrite a character of a class, or a range of them."""
    return _written(found[1]) + (f"-{_written(found[3])}" if found[2] else "")


def _written(char: str) -> str:
    """Return a character in a way that neither Lark nor Rust reads otherwise."""
    meant = char
    if len(char) > 2:
        meant = chr(int(char[2:], 16))
    elif len(char) == 2:
        meant = _MEANT.get(char[1], "")
    if not meant or "\ud800" <= meant <= "\udfff":
        raise ValueError(f"{char} is no character of a GBNF grammar")
    return f"\\x{ord(meant):02x}" if meant < "\x80" and not meant.isalnum() else meant
