"""Harmony: reads the answers of gpt-oss, which consist of messages in channels.

A message is a head, `<|message|>`, its text and `<|end|>`. The prompt has written `<|start|>assistant`, the
first part of the head, and the channel follows: `<|channel|>analysis` for a thought, `final` for the answer,
`commentary` for what the user reads before a call. A head with a recipient, `to=functions.NAME`, before the
channel or after it, makes the message a call, whose text are the arguments; then `<|call|>` ends the answer.

The format is described at https://developers.openai.com/cookbook/articles/openai-harmony.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum, auto

from genserve.completion import Completion, Delta, MessageDelta, ToolCallDelta
from genserve.errors import RepositoryError
from genserve.text.argument_syntax import JSON, ArgumentReader
from genserve.text.marks import mark_start
from genserve.text.message_parser import MessageParser
from genserve.text.tokenizer import Tokenizer

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
MARKS = (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN)
THOUGHTS = "analysis"

_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([A-Za-z0-9_.-]+)")
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
# With these a head begins: the first part of it may be the end of the prompt.
_HEAD_STARTS = (START, CHANNEL, CONSTRAIN, "to=")
_MAX_HEAD = 512     # characters


@dataclass(frozen=True, slots=True, kw_only=True)
class HarmonyTokens:
    """The tokens of the marks."""

    thought_start: tuple[int, ...]      # the head of a thought
    message: int
    end: int
    ids: frozenset[int]                 # of all marks

    @staticmethod
    def of(tokenizer: Tokenizer) -> HarmonyTokens:
        """Return the tokens in a vocabulary; raises RepositoryError if it lacks one."""
        ids = {mark: token_id for mark in MARKS if (token_id := tokenizer.token_id(mark)) is not None}
        if missing := [mark for mark in MARKS if mark not in ids]:
            raise RepositoryError(
                f"calls in the format harmony need the token {missing[0]}, which the vocabulary lacks",
                remedy="take tokenizer.json and the chat template from one checkpoint; if the model is not a "
                "gpt-oss, leave tool_format out of the config of its decoder stage",
            )
        channel = tokenizer.encode(THOUGHTS, add_special_tokens=False)
        return HarmonyTokens(
            thought_start=(ids[CHANNEL], *channel, ids[MESSAGE]),
            message=ids[MESSAGE],
            end=ids[END],
            ids=frozenset(ids.values()),
        )


class _Part(Enum):
    HEAD = auto()
    REASONING = auto()
    CONTENT = auto()
    ARGUMENTS = auto()
    REST = auto()       # after the arguments of a call


class HarmonyParser(MessageParser):
    """Reads the messages of one answer; thoughts are separated by an empty line, and so are other texts.

    Messages to unknown tools are thoughts or content, by their channel. Text that has no head is content.

    Args:
        tokens: the tokens of the marks.
        tools: the names of the tools that may be called.
        separates: whether thoughts are reasoning, instead of content.
    """

    def __init__(self, tokens: HarmonyTokens, *, tools: Collection[str], separates: bool = True) -> None:
        super().__init__(reasoning=None, tools=None)
        self._tokens = tokens
        self._names = tools
        self._separates = separates
        self._answer_ids: list[int] = []
        self._part = _Part.HEAD
        self._held = ""
        self._begun: set[_Part] = set()     # what the answer has texts of
        self._separator = ""                # before the text of the current message
        self._num_calls = 0
        self._arguments: ArgumentReader = JSON.reader({})
        self._has_arguments = False

    def read(self, part: Delta | Completion) -> MessageDelta:
        """See `MessageParser`."""
        self._answer_ids += part.token_ids
        self._held += part.text
        last = part.finish_reason is not None
        read: list[MessageDelta] = []
        before = None
        while before != (self._part, len(self._held)):      # each step reads all that it can
            before = (self._part, len(self._held))
            match self._part:
                case _Part.HEAD:
                    read += self._read_head(last=last)
                case _Part.ARGUMENTS:
                    read += self._read_arguments(last=last)
                case _:
                    read += self._read_text(last=last)
        return MessageDelta(
            reasoning="".join(delta.reasoning for delta in read),
            content="".join(delta.content for delta in read),
            tool_calls=tuple(call for delta in read for call in delta.tool_calls),
        )

    @property
    def num_held(self) -> int:
        """See `MessageParser`."""
        return len(self._held)

    @property
    def num_reasoning_tokens(self) -> int:
        """See `MessageParser`."""
        count, within = 0, False
        start, ids = self._tokens.thought_start, self._answer_ids
        for index, token_id in enumerate(ids):
            if token_id in self._tokens.ids:
                within = tuple(ids[max(0, index + 1 - len(start)) : index + 1]) == start
            else:
                count += within
        return count

    def without_reasoning(self) -> MessageParser | None:
        """See `MessageParser`."""
        return HarmonyParser(self._tokens, tools=self._names, separates=False)

    @property
    def within_call(self) -> bool:
        """See `MessageParser`."""
        return self._part is _Part.ARGUMENTS

    def _read_head(self, *, last: bool) -> list[MessageDelta]:
        head, mark, text = self._held.partition(MESSAGE)
        certain = self._held if last else self._held[: mark_start(self._held, MESSAGE, start=0)]
        if not _may_be_head(head if mark else certain):
            self._begin(_Part.CONTENT, self._held)
        elif mark:
            recipient, channel = _RECIPIENT.search(head), _CHANNEL.search(head)
            if recipient is not None and recipient[1] in self._names:
                self._begin(_Part.ARGUMENTS, text)
                return [self._new_call(recipient[1])]
            is_thought = self._separates and channel is not None and channel[1] == THOUGHTS
            self._begin(_Part.REASONING if is_thought else _Part.CONTENT, text)
        elif last:
            # The answer ends within the head, or has none.
            self._held = "" if any(sign in head for sign in MARKS) else head
            self._begin(_Part.CONTENT, self._held)
        return []

    def _begin(self, part: _Part, text: str) -> None:
        self._part, self._held = part, text
        self._separator = "\n\n" if part in self._begun else ""

    def _new_call(self, name: str) -> MessageDelta:
        call = ToolCallDelta(index=self._num_calls, id=f"call_{secrets.token_hex(12)}", name=name)
        self._num_calls += 1
        self.has_calls = True
        self._arguments, self._has_arguments = JSON.reader({}), False
        return MessageDelta(tool_calls=(call,))

    def _read_text(self, *, last: bool) -> list[MessageDelta]:
        """Read a text up to the mark that ends it."""
        at = min(mark_start(self._held, mark, start=0) for mark in MARKS)
        mark = next((mark for mark in MARKS if self._held.startswith(mark, at)), "")
        end = len(self._held) if last and not mark else at
        text, self._held = self._held[:end], self._held[end:]
        part = self._part
        if mark:
            # A head may follow without the mark before it.
            self._held = self._held.removeprefix(mark) if mark in (END, CALL, RETURN) else self._held
            self._part = _Part.HEAD
        if not text or part is _Part.REST:
            return []
        text, self._separator = self._separator + text, ""
        self._begun.add(part)
        return [MessageDelta(reasoning=text) if part is _Part.REASONING else MessageDelta(content=text)]

    def _read_arguments(self, *, last: bool) -> list[MessageDelta]:
        """Read the JSON of a call, which no mark ends: its strings may have the names of marks."""
        if not self._has_arguments:
            self._held = self._held.lstrip()
            if self._held[:1] not in ("{", "") or (last and not self._held):
                self._part = _Part.REST
                return [self._part_of_arguments("{}")]
        text, num_read = self._arguments.read(self._held)
        self._held = self._held[num_read:]
        self._has_arguments = self._has_arguments or bool(text)
        if self._arguments.ended:
            self._part = _Part.REST
        return [self._part_of_arguments(text)] if text else []

    def _part_of_arguments(self, text: str) -> MessageDelta:
        return MessageDelta(tool_calls=(ToolCallDelta(index=self._num_calls - 1, arguments=text),))


def _may_be_head(text: str) -> bool:
    """Whether a text is the beginning of a head."""
    text = text.lstrip()
    return len(text) <= _MAX_HEAD and any(
        text.startswith(start) or start.startswith(text) for start in _HEAD_STARTS
    )
