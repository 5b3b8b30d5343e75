"""Tool call parser: reads the calls in the text of an answer, piece by piece, in any `ToolFormat`."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Collection
from enum import Enum, auto

from genserve.completion import MessageDelta, ToolCallDelta
from genserve.text.tool_formats import ToolFormat

_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_JSON_SIGN = re.compile(r'\\.?|["{}\[\]]', re.DOTALL)
_LETTERS = string.ascii_letters + string.digits


class _CallState(Enum):
    CONTENT = auto()        # before the first call
    ARGUMENTS = auto()
    TAIL = auto()           # after the arguments of a call
    HEAD = auto()           # of a later call, up to its arguments
    AFTER = auto()          # after the last call


class ToolCallParser:
    """Reads the calls in the text of one answer, without its reasoning, piece by piece.

    The joined result does not depend on the cuts. What precedes the calls is content, without the whitespace
    at its end, and so is what follows them. Text that begins like a call and goes on otherwise, names another
    tool or ends before the arguments is content, too.

    Args:
        tool_format: of the calls.
        names: of the tools that may be called.
    """

    def __init__(self, tool_format: ToolFormat, *, names: Collection[str]) -> None:
        self._format = tool_format
        self._names = names
        self._mark = _squeezed(tool_format.begin)
        self._before_name = _squeezed(tool_format.before_name)
        self._before_arguments = _squeezed(tool_format.before_arguments)
        tail = _squeezed(tool_format.after_arguments)
        self._separator = None if tool_format.separator is None else tail + _squeezed(tool_format.separator)
        self._closing = tail + _squeezed(tool_format.closing)
        self._state = _CallState.CONTENT
        self._held = ""
        self._num_read = 0          # characters of `_held` in which no call begins
        self._may_lack_mark = tool_format.begin_is_optional
        self._has_rest = False      # there is content after the calls
        self._num_calls = 0
        self._arguments = _JsonObject()

    @property
    def within_call(self) -> bool:
        """Whether the text so far ends within the arguments of a call."""
        return self._state is _CallState.ARGUMENTS

    def push(self, text: str, *, last: bool) -> MessageDelta:
        """Add a piece; return the content and the calls that no later piece can change."""
        self._held += text
        content: list[str] = []
        calls: list[ToolCallDelta] = []
        before = None
        while before is not self._state:    # each state reads until the next one, or all there is
            before = self._state
            match before:
                case _CallState.CONTENT:
                    content.append(self._read_content(calls, last=last))
                case _CallState.ARGUMENTS:
                    self._read_arguments(calls)
                case _CallState.TAIL:
                    self._read_tail(last=last)
                case _CallState.HEAD:
                    self._read_head(calls, last=last)
                case _CallState.AFTER:
                    content.append(self._read_rest())
        return MessageDelta(content="".join(content), tool_calls=tuple(calls))

    def _read_content(self, calls: list[ToolCallDelta], *, last: bool) -> str:
        """Return the content that is certain, and begin the first call if it comes."""
        while (start := self._next_start()) is not None:
            opening = self._mark + _squeezed(self._format.opening) if self._is_mark(start) else ""
            try:
                head = self._head(start, opening)
            except _Cut:
                if not last:
                    return self._take(len(self._held[:start].rstrip()))
                head = None
            if head is not None:
                content = self._held[:start].rstrip()
                self._begin_call(calls, *head)
                return content
            self._may_lack_mark = False
            self._num_read = start + 1 if self._is_mark(start) else 0
        if last:
            return self._take(len(self._held))
        num_begun = max(n for n in range(len(self._mark)) if self._held.endswith(self._mark[:n]))
        return self._take(len(self._held[: len(self._held) - num_begun].rstrip()))

    def _next_start(self) -> int | None:
        """Return where the next call may begin."""
        if self._may_lack_mark:
            return len(self._held) - len(self._held.lstrip())
        start = self._held.find(self._mark, self._num_read)
        return None if start < 0 else start

    def _is_mark(self, start: int) -> bool:
        return self._held.startswith(self._mark, start)

    def _read_head(self, calls: list[ToolCallDelta], *, last: bool) -> None:
        try:
            head = self._head(0, "")
        except _Cut:
            if not last:
                return
            head = None
        if head is None:
            self._state = _CallState.AFTER
        else:
            self._begin_call(calls, *head)

    def _head(self, start: int, opening: str) -> tuple[str, int] | None:
        """Return the name in the head of a call, and where its arguments begin; None: it is none.

        Raises:
            _Cut: it may become one.
        """
        at = self._after(opening + self._before_name, start)
        name = None if at is None else _NAME.match(self._held, at)
        if at == len(self._held) or (name is not None and name.end() == len(self._held)):
            raise _Cut
        if name is None or name[0] not in self._names:
            return None
        at = self._after(self._before_arguments + "{", name.end())
        return None if at is None else (name[0], at - 1)

    def _begin_call(self, calls: list[ToolCallDelta], name: str, start: int) -> None:
        calls.append(ToolCallDelta(index=self._num_calls, id=self._new_id(), name=name))
        self._num_calls += 1
        self._held = self._held[start:]
        self._arguments = _JsonObject()
        self._state = _CallState.ARGUMENTS

    def _new_id(self) -> str:
        if self._format.has_short_ids:
            return "".join(secrets.choice(_LETTERS) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"

    def _read_arguments(self, calls: list[ToolCallDelta]) -> None:
        end = self._arguments.end(self._held)
        if text := self._take(len(self._held) if end is None else end):
            calls.append(ToolCallDelta(index=self._num_calls - 1, arguments=text))
        if end is not None:
            self._state = _CallState.TAIL

    def _read_tail(self, *, last: bool) -> None:
        """Find out whether another call follows."""
        for pattern, state in ((self._separator, _CallState.HEAD), (self._closing, _CallState.AFTER)):
            try:
                end = None if pattern is None else self._after(pattern, 0)
            except _Cut:
                if not last:
                    return
                if state is _CallState.AFTER:
                    self._held = ""     # the end of the answer cuts the end of the calls
                continue
            if end is not None:
                self._held, self._state = self._held[end:], state
                return
        self._state = _CallState.AFTER

    def _read_rest(self) -> str:
        """Return what follows the calls, without whitespace at its start."""
        rest = self._take(len(self._held))
        rest = rest if self._has_rest else rest.lstrip()
        self._has_rest = self._has_rest or bool(rest)
        return rest

    def _after(self, pattern: str, start: int) -> int | None:
        """Return where the text after a pattern begins, whitespace ignored; None: it is another text.

        Raises:
            _Cut: the text may become the pattern.
        """
        at = start
        for sign in pattern:
            while self._held[at : at + 1].isspace():
                at += 1
            if at == len(self._held):
                raise _Cut
            if self._held[at] != sign:
                return None
            at += 1
        return at

    def _take(self, num_chars: int) -> str:
        """Return the first characters, and forget them."""
        taken, self._held = self._held[:num_chars], self._held[num_chars:]
        self._num_read = max(0, self._num_read - num_chars)
        return taken


class _Cut(Exception):
    """The text ends where a pattern goes on."""


class _JsonObject:
    """Finds the end of a JSON object that arrives in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escapes = False   # the next character

    def end(self, text: str) -> int | None:
        """Read a piece; return where the text after the object begins, None: in a later piece."""
        start = 1 if self._escapes and text else 0
        self._escapes = self._escapes and not text
        for sign in _JSON_SIGN.finditer(text, start):
            if sign[0].startswith("\\"):
                self._escapes = sign[0] == "\\"
            elif sign[0] == '"':
                self._in_string = not self._in_string
            elif not self._in_string:
                self._depth += 1 if sign[0] in "{[" else -1
                if self._depth == 0:
                    return sign.end()
        return None


def _squeezed(text: str) -> str:
    """Return a text without whitespace."""
    return "".join(text.split())
