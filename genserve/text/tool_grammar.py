"""Tool grammar: the grammar of an answer that may or must call tools, in llguidance's notation."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from genserve.prompt import Tool
from genserve.text.json_schema import lenient_schema
from genserve.text.tool_formats import ToolFormat

# A text as plain texts and the ids of special tokens.
Parts: TypeAlias = Sequence[str | int]

_ANYTHING = r"/(.|\n)*/"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolGrammar:
    """What an answer with tools may be.

    Each call names one of the tools, and its arguments match the tool's schema. What precedes the calls is
    free text, which does not contain their mark. The answer ends after the calls.
    """

    tool_format: ToolFormat
    tools: Mapping[int, Tool]       # that may be called, by their index in the request; empty: no calls
    must_call: bool                 # the answer consists of calls
    parallel: bool                  # there may be several calls
    after_reasoning: bool           # newlines may come first

    def source(self, parts_of: Callable[[str], Parts], *, text: Mapping[str, Any] | None) -> str:
        """Return the grammar; equal ones have equal sources.

        Args:
            parts_of: finds the special tokens in a text.
            text: an answer without calls, as llguidance serializes grammars; None: free text.
        """
        rules = "\n".join(self._rules(parts_of, has_structure=text is not None))
        grammars: list[dict[str, Any]] = [{"lark_grammar": rules}]
        if text is not None:
            grammars.append({**text, "name": "text"})
        for index, tool in self.tools.items():
            grammars.append({"name": f"arguments{index}", "json_schema": arguments_schema(tool)})
        return json.dumps({"grammars": grammars}, ensure_ascii=False)

    def _rules(self, parts_of: Callable[[str], Parts], *, has_structure: bool) -> Iterator[str]:
        mark = parts_of(self.tool_format.begin)
        marks_by_token = not isinstance(mark[0], str)
        bare = self.tool_format.begin_is_optional
        choices = []
        if has_structure and not self.must_call:
            choices += ["@text"]
        elif not self.must_call:
            choices += ["TEXT"]
            yield from self._text_rules()
        if self.tools:
            if self.must_call or has_structure:
                choices += [f"{_written(mark)} calls"]
            elif marks_by_token:
                choices += [f"TEXT {_written(mark)} calls"]
            else:
                choices += ["content_and_mark calls"]
                yield f"content_and_mark[lazy]: {_ANYTHING} {_written(mark)}"
            choices += ["calls"] if bare else []
            yield from self._call_rules(parts_of)
        fixed = self.must_call or has_structure
        newlines = r"/\n{1,4}/? " if fixed and self.after_reasoning else ""
        yield f"start: {newlines}({' | '.join(choices)})"

    def _text_rules(self) -> Iterator[str]:
        """Yield the free text, in which no call begins; a mark that is a token is not spelled out either."""
        excluded = ["~WITH_MARK"]
        yield f"WITH_MARK: {_ANYTHING} {json.dumps(self.tool_format.begin)} {_ANYTHING}"
        if self.tool_format.begin_is_optional and self.tools:
            names = " | ".join(json.dumps(f'"{tool.name}"') for tool in self.tools.values())
            excluded += ["~BARE_CALL"]
            yield rf'BARE_CALL: /\s*\{{\s*"name"\s*:\s*/ ({names}) {_ANYTHING}'
        yield f"TEXT: {' & '.join([_ANYTHING, *excluded])}"

    def _call_rules(self, parts_of: Callable[[str], Parts]) -> Iterator[str]:
        tool_format = self.tool_format
        more = ""
        if self.parallel and tool_format.separator is not None:
            more = f"({_written(parts_of(tool_format.separator))} call)*"
        opening, closing = (_written(parts_of(text)) for text in (tool_format.opening, tool_format.closing))
        yield f"calls: {opening} call {more} {closing}"
        calls = []
        for index, tool in self.tools.items():
            head = parts_of(tool_format.before_name + tool.name + tool_format.before_arguments)
            tail = parts_of(tool_format.after_arguments)
            calls.append(f"{_written(head)} @arguments{index} {_written(tail)}")
        yield f"call: {' | '.join(calls)}"


def arguments_schema(tool: Tool) -> dict[str, Any]:
    """Return the schema of a tool's arguments, as llguidance gets it.

    Clients send the tools of others, whose schemas have any keywords: those of zod's records and e-mail
    addresses are unsupported.
    """
    return lenient_schema({"type": "object", "properties": {}, **tool.parameters})


def _written(parts: Parts) -> str:
    """Return a text in Lark's notation."""
    return " ".join(f"<[{part}]>" if isinstance(part, int) else json.dumps(part) for part in parts)
