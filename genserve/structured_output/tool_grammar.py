"""Tool grammar: writes the grammar of an answer that may or must call tools, in llguidance's notation."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from genserve.prompt import Tool
from genserve.structured_output.argument_grammar import ANYTHING, ArgumentGrammar, Parts, written
from genserve.text.tool_formats import ToolFormat

_ID = "/[A-Za-z0-9]{9}/"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolGrammar:
    """The structure of an answer that may call tools.

    Each call names one of the tools, and its arguments match the tool's schema. The text before the calls is
    free, except that it does not contain the mark that begins calls. The answer ends after the calls.
    """

    tool_format: ToolFormat
    tools: Mapping[int, Tool]       # the callable tools, by their index in the request; empty: no calls
    must_call: bool                 # the answer consists of calls
    parallel: bool                  # the answer may have several calls
    after_reasoning: bool           # the answer may begin with newlines

    def source(self, parts_of: Callable[[str], Parts], *, text: Mapping[str, Any] | None) -> str:
        """Return the grammar's source; equal grammars have equal sources.

        Args:
            parts_of: splits a text at its special tokens.
            text: the serialized llguidance grammar of an answer without calls; None: free text.
        """
        arguments = ArgumentGrammar(self.tool_format.arguments, parts_of)
        rules = [*self._rules(parts_of, arguments, has_structure=text is not None), *arguments.rules]
        grammars: list[dict[str, Any]] = [{"lark_grammar": "\n".join(rules)}]
        if text is not None:
            grammars.append({**text, "name": "text"})
        return json.dumps({"grammars": [*grammars, *arguments.schemas]}, ensure_ascii=False)

    def _rules(
        self, parts_of: Callable[[str], Parts], arguments: ArgumentGrammar, *, has_structure: bool
    ) -> Iterator[str]:
        mark = parts_of(self.tool_format.begin)
        marks_by_token = any(isinstance(part, int) for part in mark)
        bare = self.tool_format.begin_is_optional
        choices = []
        if has_structure and not self.must_call:
            choices += ["@text"]
        elif not self.must_call:
            choices += ["TEXT"]
            yield from self._text_rules()
        if self.tools:
            if self.must_call or has_structure:
                choices += [f"{written(mark)} calls"]
            elif marks_by_token and isinstance(mark[0], str):
                choices += [f"TEXT_AND_MARK {written(mark[1:])} calls"]
                yield f"TEXT_AND_MARK: TEXT {json.dumps(mark[0])}"
            elif marks_by_token:
                choices += [f"TEXT {written(mark)} calls"]
            else:
                choices += ["content_and_mark calls"]
                yield f"content_and_mark[lazy]: {ANYTHING} {written(mark)}"
            choices += ["calls"] if bare else []
            yield from self._call_rules(parts_of, arguments)
        fixed = self.must_call or has_structure
        newlines = r"/\n{1,4}/? " if fixed and self.after_reasoning else ""
        yield f"start: {newlines}({' | '.join(choices)})"

    def _text_rules(self) -> Iterator[str]:
        """Yield the rules of free text in which no call begins, not even by a mark that is spelled out."""
        excluded = ["~WITH_MARK"]
        yield f"WITH_MARK: {ANYTHING} {json.dumps(self.tool_format.begin)} {ANYTHING}"
        if self.tool_format.begin_is_optional and self.tools:
            names = " | ".join(json.dumps(f'"{tool.name}"') for tool in self.tools.values())
            excluded += ["~BARE_CALL"]
            yield rf'BARE_CALL: /\s*\{{\s*"name"\s*:\s*/ ({names}) {ANYTHING}'
        yield f"TEXT: {' & '.join([ANYTHING, *excluded])}"

    def _call_rules(self, parts_of: Callable[[str], Parts], arguments: ArgumentGrammar) -> Iterator[str]:
        tool_format = self.tool_format
        more, separator, closing = "", tool_format.separator, tool_format.closing
        if self.parallel and separator is not None:
            more = f"({written(parts_of(separator))} call)*"
        # The lexer would read the longer text wherever it begins, so the separator is not a part of it.
        shared = separator if separator and closing.startswith(separator) else ""
        end = f"{written(parts_of(shared))} {written(parts_of(closing.removeprefix(shared)))}"
        yield f"calls: {written(parts_of(tool_format.opening))} call {more} {end}"
        calls = []
        for index, tool in self.tools.items():
            head = tool_format.before_name + tool.name
            if tool_format.before_id:
                ids = f" ({written(parts_of(tool_format.before_id))} {_ID})? "
                before = written(parts_of(head)) + ids + written(parts_of(tool_format.before_arguments))
            else:
                before = written(parts_of(head + tool_format.before_arguments))
            tail = written(parts_of(tool_format.after_arguments))
            if tool_format.has_last_ids:
                tail = f'(", \\"id\\": \\"" {_ID} "\\"")? {tail}'
            calls.append(f"{before} {arguments.of(index, tool)} {tail}")
        yield f"call: {' | '.join(calls)}"
