"""Tool call parser: reads the calls in the text of an answer, piece by piece, in any `ToolFormat`."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Mapping
from enum import Enum, auto

from genserve.completion import MessageDelta, ToolCallDelta
from genserve.prompt import Tool
from genserve.text.argument_syntax import JSON, ArgumentReader
from genserve.text.marks import Cut, after, mark_start, past_space, squeezed
from genserve.text.tool_formats import ToolFormat

_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_ID = re.compile(r"[A-Za-z0-9]+")
_LAST_ID = ',"id":"'
_LETTERS = string.ascii_letters + string.digits


class _CallState(Enum):
    CONTENT = auto()        # before the first call
    ARGUMENTS = auto()
    TAIL = auto()           # after the arguments of a call
    HEAD = auto()           # before the arguments of a later call
    AFTER = auto()          # after the last call


class ToolCallParser:
    """Reads the tool calls in the text of one answer, without its reasoning, piece by piece.

    The joined result does not depend on how the text was cut. The text before the calls, without trailing
    whitespace, and the text after them are content. So is text that begins like a call but is none, names an
    unknown tool, or ends before the arguments. Arguments come as JSON, whatever their syntax is.

    Args:
        tool_format: how the model writes calls.
        tools: the tools that may be called, by name.

    Attributes:
        mark: the text that begins the calls.
    """

    def __init__(self, tool_format: ToolFormat, *, tools: Mapping[str, Tool]) -> None:
        self._format = tool_format
        self._tools = tools
        self.mark = squeezed(tool_format.begin)
        self._before_name = squeezed(tool_format.before_name)
        self._has_last_ids = tool_format.has_last_ids
        self._before_id = squeezed(tool_format.before_id)
        self._before_arguments = squeezed(tool_format.before_arguments)
        tail = squeezed(tool_format.after_arguments)
        # What may follow the arguments. One may begin with the other, so the longer one is tried first.
        tails = [(tail + squeezed(tool_format.closing), _CallState.AFTER)]
        if tool_format.separator is not None:
            tails.append((tail + squeezed(tool_format.separator), _CallState.HEAD))
        self._tails = sorted(tails, key=lambda pair: -len(pair[0]))
        # What begins the arguments, or follows empty ones.
        has_empty = tool_format.arguments != JSON
        self._beginnings = (tool_format.arguments.beginning, *([tail] if has_empty else []))
        self._state = _CallState.CONTENT
        self._held = ""
        self._num_read = 0          # characters of `_held` in which no call begins
        self._may_lack_mark = tool_format.begin_is_optional
        self._has_rest = False      # there is content after the calls
        self._num_calls = 0
        self._ids: set[str] = set()
        self._arguments: ArgumentReader | None = None      # of the latest call

    @property
    def within_call(self) -> bool:
        """Whether the text so far ends within the arguments of a call."""
        return self._state is _CallState.ARGUMENTS

    @property
    def num_held(self) -> int:
        """The number of characters held back, since they may still become a call."""
        return len(self._held)

    def push(self, text: str, *, last: bool) -> MessageDelta:
        """Add a piece; return the content and the calls that no later piece can change."""
        self._held += text
        content: list[str] = []
        calls: list[ToolCallDelta] = []
        before = None
        while before is not self._state:    # each state reads up to the next state, or the whole text
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
        """Return the certain content, and begin the first call if the text has one."""
        while (start := self._next_start()) is not None:
            opening = self.mark + squeezed(self._format.opening) if self._is_mark(start) else ""
            try:
                head = self._head(start, opening)
            except Cut:
                if not last:
                    return self._pop(len(self._held[:start].rstrip()))
                head = None
            if head is not None:
                content = self._held[:start].rstrip()
                self._begin_call(calls, *head)
                return content
            self._may_lack_mark = False
            self._num_read = start + 1 if self._is_mark(start) else 0
        if last:
            return self._pop(len(self._held))
        return self._pop(len(self._held[: mark_start(self._held, self.mark, start=self._num_read)].rstrip()))

    def _next_start(self) -> int | None:
        """Return where the next call may begin."""
        if self._may_lack_mark:
            return len(self._held) - len(self._held.lstrip())
        start = self._held.find(self.mark, self._num_read)
        return None if start < 0 else start

    def _is_mark(self, start: int) -> bool:
        return self._held.startswith(self.mark, start)

    def _read_head(self, calls: list[ToolCallDelta], *, last: bool) -> None:
        try:
            head = self._head(0, "")
        except Cut:
            if not last:
                return
            head = None
        if head is None:
            self._state = _CallState.AFTER
        else:
            self._begin_call(calls, *head)

    def _head(self, start: int, opening: str) -> tuple[str, str, int] | None:
        """Return name and id in the head of a call, and where the arguments begin; None: the text is no call.

        Raises:
            Cut: the text may become a call.
        """
        at = after(self._held, opening + self._before_name, start)
        name = None if at is None else _NAME.match(self._held, past_space(self._held, at))
        if name is not None and name.end() == len(self._held):
            raise Cut
        if name is None or name[0] not in self._tools:
            return None
        call_id, at = self._id_in_head(name.end())
        at = after(self._held, self._before_arguments, at)
        if at is None or not self._begins_arguments(at):
            return None
        return name[0], call_id, at

    def _id_in_head(self, start: int) -> tuple[str, int]:
        """Return the id behind the name of a call, empty if there is none, and where it ends."""
        at = after(self._held, self._before_id, start) if self._before_id else None
        found = None if at is None else _ID.match(self._held, at)
        if at == len(self._held) or (found is not None and found.end() == len(self._held)):
            raise Cut
        return ("", start) if found is None else (found[0], found.end())

    def _begins_arguments(self, start: int) -> bool:
        """Whether arguments begin here; raises Cut if more text decides."""
        is_cut = False
        for beginning in self._beginnings:
            try:
                if after(self._held, beginning, start) is not None:
                    return True
            except Cut:
                is_cut = True
        if is_cut:
            raise Cut
        return False

    def _begin_call(self, calls: list[ToolCallDelta], name: str, call_id: str, start: int) -> None:
        if call_id in self._ids or not call_id:
            call_id = self._new_id()
        self._ids.add(call_id)
        calls.append(ToolCallDelta(index=self._num_calls, id=call_id, name=name))
        self._num_calls += 1
        self._held = self._held[start:].lstrip()
        self._arguments = self._format.arguments.reader(self._tools[name].parameters)
        self._state = _CallState.ARGUMENTS

    def _new_id(self) -> str:
        if self._format.has_short_ids:
            return "".join(secrets.choice(_LETTERS) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"

    def _read_arguments(self, calls: list[ToolCallDelta]) -> None:
        assert self._arguments is not None
        text, num_read = self._arguments.read(self._held)
        self._pop(num_read)
        if text:
            calls.append(ToolCallDelta(index=self._num_calls - 1, arguments=text))
        if self._arguments.ended:
            self._state = _CallState.TAIL

    def _read_tail(self, *, last: bool) -> None:
        """Find out whether another call follows."""
        try:
            self._skip_id()
        except Cut:
            if not last:
                return
        for pattern, state in self._tails:
            try:
                end = after(self._held, pattern, 0)
            except Cut:
                if not last:
                    return
                if state is _CallState.AFTER:
                    self._held = ""     # the end of the answer cuts the end of the calls
                continue
            if end is not None:
                self._held, self._state = self._held[end:], state
                return
        self._state = _CallState.AFTER

    def _skip_id(self) -> None:
        """Leave out an id behind the arguments, as Mistral Nemo writes it; raises Cut."""
        start = after(self._held, _LAST_ID, 0) if self._has_last_ids else None
        if start is not None:
            end = self._held.find('"', start)
            if end < 0:
                raise Cut
            self._held = self._held[end + 1 :]

    def _read_rest(self) -> str:
        """Return what follows the calls, without whitespace at its start."""
        rest = self._pop(len(self._held))
        rest = rest if self._has_rest else rest.lstrip()
        self._has_rest = self._has_rest or bool(rest)
        return rest

    def _pop(self, num_chars: int) -> str:
        """Remove the first characters, and return them."""
        taken, self._held = self._held[:num_chars], self._held[num_chars:]
        self._num_read = max(0, self._num_read - num_chars)
        return taken
