"""Message blocks: the content of turns in the Messages API, and the messages that the model reads.

Blocks that other servers have written, such as `server_tool_use`, are left out: a client sends them in each
later request, so to reject them would end its session.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Discriminator, Field, Tag

from genserve.errors import InvalidRequest
from genserve.prompt import Message, Role, Tool, ToolCall
from genserve.server.dialects.content_parts import placeholder, unreadable_part
from genserve.server.dialects.tool_offers import announced
from genserve.server.http.request_body import Items, TolerantBody, text_parts

# Begins the first line of Claude Code's system prompt, a block of its own or in front of other text. The line
# changes with each request, and would spoil the prefix cache for all that follows.
_BILLING_HEADER = "x-anthropic-billing-header:"
# Begins what Claude Code adds to the results of tools, in blocks of its own. As turns of the user these texts
# would be questions, before which some templates leave out the reasoning between the calls.
_REMINDER = "<system-reminder>"
_OTHER = "other"


class TextBlock(TolerantBody):
    """Text."""

    type: Literal["text"] = Field(description="The kind of the block.")
    text: str = Field(description="Its text.")


class OtherBlock(TolerantBody):
    """A block of another type; it is left out, or a placeholder takes its place."""

    type: str = Field(description="The kind of the block.")


class ThinkingBlock(TolerantBody):
    """The reasoning in an earlier answer."""

    type: Literal["thinking"] = Field(description="The kind of the block.")
    thinking: str = Field(description="The reasoning; the chat template decides what the model sees of it.")


class CompactionBlock(TolerantBody):
    """What a server has written in place of earlier turns."""

    type: Literal["compaction"] = Field(description="The kind of the block.")
    content: str | None = Field(default=None, description="The summary of these turns.")


class ToolUseBlock(TolerantBody):
    """A tool call in an earlier answer."""

    type: Literal["tool_use"] = Field(description="The kind of the block.")
    id: str = Field(description="The id that the answer gave to the call.")
    name: str = Field(description="The name of the tool.")
    input: dict[str, Any] = Field(description="The arguments.")


class ToolReferenceBlock(TolerantBody):
    """A tool that may be called from now on."""

    type: Literal["tool_reference"] = Field(description="The kind of the block.")
    tool_name: str = Field(description="The name of the tool.")


def _discriminator(*known: str) -> Discriminator:
    """Return what tells the tag of a block: its type, if that is known."""

    def tag(block: Any) -> str:
        kind = block.get("type") if isinstance(block, dict) else getattr(block, "type", None)
        return kind if isinstance(kind, str) and kind in known else _OTHER

    return Discriminator(tag)


_Text: TypeAlias = Annotated[TextBlock, Tag("text")]
_Other: TypeAlias = Annotated[OtherBlock, Tag(_OTHER)]
_Part: TypeAlias = Annotated[_Text | _Other, _discriminator("text")]
_Parts: TypeAlias = Annotated[
    Items[_Part], BeforeValidator(text_parts, json_schema_input_type=str | list[TextBlock])
]


class DocumentSource(TolerantBody):
    """Where the text of a document is."""

    type: str = Field(description="`text` or `content`; other sources cannot be read.")
    data: str | None = Field(default=None, description="The text of a source of the type `text`.")
    content: _Parts | None = Field(default=None, description="The text of one of the type `content`.")


class DocumentBlock(TolerantBody):
    """A document."""

    type: Literal["document"] = Field(description="The kind of the block.")
    title: str | None = Field(default=None, description="Its title.")
    context: str | None = Field(default=None, description="What the model should know about it.")
    source: DocumentSource = Field(description="Its text.")

    def text(self) -> str | None:
        """Return what the model reads; None: it cannot read the document."""
        match self.source.type:
            case "text":
                text = self.source.data
            case "content" if self.source.content is not None:
                text = "\n".join(map(_part_text, self.source.content))
            case _:
                text = None
        return text and "\n".join(part for part in (self.title, self.context, text) if part)


class SearchResultBlock(TolerantBody):
    """Something that a search has found."""

    type: Literal["search_result"] = Field(description="The kind of the block.")
    source: str = Field(description="Where it was found.")
    title: str | None = Field(default=None, description="Its title.")
    content: _Parts = Field(description="Its text.")

    def text(self) -> str:
        """Return what the model reads."""
        return "\n".join(part for part in (self.title, self.source, *map(_part_text, self.content)) if part)


def _part_text(part: TextBlock | OtherBlock) -> str:
    return part.text if isinstance(part, TextBlock) else placeholder(part.type)


_Document: TypeAlias = Annotated[DocumentBlock, Tag("document")]
_SearchResult: TypeAlias = Annotated[SearchResultBlock, Tag("search_result")]
_ResultBlock: TypeAlias = Annotated[
    _Text | Annotated[ToolReferenceBlock, Tag("tool_reference")] | _Document | _SearchResult | _Other,
    _discriminator("text", "tool_reference", "document", "search_result"),
]


class ToolResultBlock(TolerantBody):
    """The result of a tool call."""

    type: Literal["tool_result"] = Field(description="The kind of the block.")
    tool_use_id: str = Field(description="The id of the call.")
    content: Annotated[
        Items[_ResultBlock] | None,
        BeforeValidator(text_parts, json_schema_input_type=str | list[_ResultBlock] | None),
    ] = Field(
        default=None,
        description="What the tool has returned: text, or blocks of text, documents, search results and "
        "references to tools. A placeholder takes the place of images.",
    )
    is_error: bool | None = Field(default=None, description="Whether the tool has failed.")


_Block: TypeAlias = Annotated[
    _Text
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[CompactionBlock, Tag("compaction")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")]
    | _Document
    | _SearchResult
    | _Other,
    _discriminator(
        "text", "thinking", "compaction", "tool_use", "tool_result", "document", "search_result"
    ),
]


class MessageFields(TolerantBody):
    """One turn."""

    role: Literal["user", "assistant", "system"] = Field(description="Whose turn it is.")
    content: Annotated[
        Items[_Block], BeforeValidator(text_parts, json_schema_input_type=str | list[_Block])
    ] = Field(
        description="Text, or blocks of text, reasoning, tool calls and their results, documents and search "
        "results. Blocks of other types, which servers of Anthropic have written, are left out."
    )


def _only_text(block: Any) -> Any:
    kind = block.get("type") if isinstance(block, dict) else None
    if isinstance(kind, str) and kind != "text":
        raise ValueError(f"blocks of the type {kind[:64]!r} are not supported here: send text")
    return block


SystemBlocks: TypeAlias = Annotated[
    Items[Annotated[TextBlock, BeforeValidator(_only_text)]],
    BeforeValidator(text_parts, json_schema_input_type=str | list[TextBlock]),
]


_LEFT_OUT_OF_ANSWERS = (OtherBlock, DocumentBlock, SearchResultBlock)


def left_out_kinds(turns: Iterable[MessageFields]) -> list[str]:
    """Return the types of the blocks that the model does not see."""
    kinds = (
        block.type
        for turn in turns
        for block in turn.content
        if isinstance(block, _LEFT_OUT_OF_ANSWERS if turn.role == "assistant" else OtherBlock)
    )
    return list(dict.fromkeys(kinds))


def referenced_tools(turns: Iterable[MessageFields]) -> list[str]:
    """Return the names of the tools to which results of tools refer, in their order."""
    results = (block for turn in turns for block in turn.content if isinstance(block, ToolResultBlock))
    blocks = (block for result in results for block in result.content or ())
    return [block.tool_name for block in blocks if isinstance(block, ToolReferenceBlock)]


def called_tools(turns: Iterable[MessageFields]) -> list[str]:
    """Return the names of the called tools, in their order."""
    blocks = (block for turn in turns for block in turn.content)
    return [block.name for block in blocks if isinstance(block, ToolUseBlock)]


def messages_of(
    turns: Sequence[MessageFields],
    *,
    system: Iterable[TextBlock],
    described: Mapping[str, Tool],
    offered: Collection[str],
) -> list[Message]:
    """Return the messages of a conversation.

    Results of tools are messages of their own; successive turns of the user, or of the assistant, are one.

    Args:
        turns: the conversation.
        system: the system prompt.
        described: the tools that results of tools describe, where they refer to one for the first time.
        offered: the names of all tools that may be called.

    Raises:
        InvalidRequest: a turn has a block that belongs to another role, or an image of the user.
    """
    reader = _Reader(described, offered)
    read = (message for index, turn in enumerate(turns) for message in reader.read(turn, index))
    return [*_named_results([*_system(system), *_joined(read)])]


class _Reader:
    def __init__(self, described: Mapping[str, Tool], offered: Collection[str]) -> None:
        self._to_describe = dict(described)
        self._offered = offered

    def read(self, turn: MessageFields, index: int) -> Iterator[Message]:
        """Yield the messages of a turn, which is the one with this index."""
        if turn.role == "assistant":
            yield from _answered(turn, index)
            return
        texts: list[str] = []
        result: tuple[str, list[str]] | None = None     # the id of its call, and its texts
        for number, block in enumerate(turn.content):
            if isinstance(block, ToolResultBlock) and turn.role == "user":
                yield from _asked("user", texts, result)
                texts, result = [], (block.tool_use_id, [self._result(block)])
            elif (text := _given_text(block, turn, f"messages[{index}]", number)) is not None:
                is_of_result = result and not texts and text.startswith(_REMINDER)
                (result[1] if result and is_of_result else texts).append(text)
        yield from _asked(turn.role, texts, result)

    def _result(self, result: ToolResultBlock) -> str:
        content = "\n".join(map(self._result_text, result.content or ()))
        return f"Error: {content}" if result.is_error else content

    def _result_text(self, block: Any) -> str:
        match block:
            case TextBlock():
                return block.text
            case ToolReferenceBlock(tool_name=name) if name not in self._offered:
                return f"The tool {name} cannot be called."
            case ToolReferenceBlock():
                return announced(block.tool_name, self._to_describe.pop(block.tool_name, None))
            case SearchResultBlock():
                return block.text()
            case DocumentBlock():
                return block.text() or placeholder(block.type)
        return placeholder(block.type)


def _asked(role: Role, texts: Sequence[str], result: tuple[str, list[str]] | None) -> Iterator[Message]:
    """Yield the message of a result, if there is one, and that of the texts behind it."""
    if result is not None:
        content = "\n\n".join(text for text in result[1] if text)
        yield Message(role="tool", content=content, tool_call_id=result[0])
    if texts:
        yield Message(role=role, content="\n".join(texts))


def _given_text(block: Any, turn: MessageFields, place: str, number: int) -> str | None:
    """Return the text of a block in a turn of the user or the system; None: it is left out."""
    match block:
        case TextBlock():
            return block.text
        case SearchResultBlock():
            return block.text()
        case DocumentBlock() if (text := block.text()) is not None:
            return text
        case DocumentBlock() | OtherBlock(type="image"):
            raise unreadable_part(block.type, field=f"{place}.content[{number}]")
        case OtherBlock():
            return None
    raise _misplaced(block, turn, place)


def _answered(turn: MessageFields, index: int) -> Iterator[Message]:
    """Yield the message of an answer, unless nothing of it is left."""
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[ToolCall] = []
    for block in turn.content:
        match block:
            case TextBlock():
                texts.append(block.text)
            case CompactionBlock():
                texts.append(block.content or "")
            case ThinkingBlock():
                reasoning.append(block.thinking)
            case ToolUseBlock():
                written = json.dumps(block.input, ensure_ascii=False)
                calls.append(ToolCall(id=block.id, name=block.name, arguments=written))
            case OtherBlock() | DocumentBlock() | SearchResultBlock():
                pass    # see _LEFT_OUT_OF_ANSWERS
            case _:
                raise _misplaced(block, turn, f"messages[{index}]")
    text = "".join(texts)   # parts of one answer
    if text or reasoning or calls:
        yield Message(
            role="assistant", content=text, reasoning_content="".join(reasoning), tool_calls=tuple(calls)
        )


def _misplaced(block: Any, turn: MessageFields, field: str) -> InvalidRequest:
    problem = f"a turn of the {turn.role} cannot have blocks of the type {block.type!r}"
    return InvalidRequest(f"{field}: {problem}", field=field)


def _system(blocks: Iterable[TextBlock]) -> list[Message]:
    """Return the system message, without the line of billing; none, if there is no other text."""
    texts = (
        block.text.partition("\n")[2] if block.text.startswith(_BILLING_HEADER) else block.text
        for block in blocks
    )
    content = "\n".join(text for text in texts if text)
    return [Message(role="system", content=content)] if content else []


def _joined(messages: Iterable[Message]) -> Iterator[Message]:
    """Yield the messages with successive ones of the user, or of the assistant, joined to one turn."""
    for role, group in groupby(messages, key=lambda message: message.role):
        turns = [*group]
        if role not in ("user", "assistant") or len(turns) == 1:
            yield from turns
            continue
        between = "\n" if role == "user" else ""
        yield Message(
            role=role,
            content=between.join(turn.content for turn in turns),
            reasoning_content="".join(turn.reasoning_content for turn in turns),
            tool_calls=tuple(call for turn in turns for call in turn.tool_calls),
        )


def _named_results(messages: Iterable[Message]) -> Iterator[Message]:
    """Yield the messages with the names of the tools in their results, which some templates show."""
    names: dict[str, str] = {}
    for message in messages:
        names |= {call.id: call.name for call in message.tool_calls}
        is_result = message.role == "tool"
        yield replace(message, name=names.get(message.tool_call_id, "")) if is_result else message
