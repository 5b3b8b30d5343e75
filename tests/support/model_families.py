"""Model families: how each writes a turn of the assistant, and random turns for it to write.

`tests/text/templates/README.md` says where the templates come from.
"""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from transformers.utils.chat_template_utils import render_jinja_template

from genserve.engine.generation_request import GenerationRequest
from genserve.engine.token_sequence import TokenSequence
from genserve.prompt import Chat, Message, Tool, read_messages
from genserve.sampling.grammar_bitmask import StructuredOutputGrammar
from genserve.sampling.sampling_params import sampling_params
from genserve.text.chat_template import ChatTemplate, map_strings
from genserve.text.message_parser import MessageParser
from genserve.text.tokenizer import Tokenizer
from genserve.text.tokenizer_files import TokenizerFiles
from genserve.textmodel.decoder_plugins import Plugins
from genserve.textmodel.decoder_stage import Decoding
from genserve.textmodel.sequence_builder import SequenceBuilder
from genserve.textmodel.tool_calling import ToolCalling
from tests.support.tiny_llama import SPECIAL_TOKENS, tiny_tokenizer

__all__ = [
    "FAMILIES",
    "PUBLISHED",
    "TOOLS",
    "Answer",
    "Family",
    "FamilyModel",
    "Turn",
    "random_turn",
    "tokenizer_of_family",
]

FOLDER = Path(__file__).parents[1] / "text" / "templates"
# A folder with the families' own templates, by the names in `Family.published`.
VOCAB_SIZE = 320
SPELLED = "\u2188"      # in a mark that is spelled out, as models write marks in texts
PUBLISHED = os.environ.get("PUBLISHED_TEMPLATES")
QWEN_MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
GLM_MARKS = (*QWEN_MARKS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
DEEPSEEK_MARKS = tuple(
    f"<\uff5ctool\u2581{part}\uff5c>"
    for part in ("calls\u2581begin", "call\u2581begin", "sep", "call\u2581end", "calls\u2581end")
)
DEEPSEEK_END = "<\uff5cend\u2581of\u2581sentence\uff5c>"
DSML = "\uff5cDSML\uff5c"


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A family of models whose chat templates write an assistant's turn in the same way."""

    name: str                               # of its template in `FOLDER`
    published: tuple[str, ...] = ()         # models, which have templates of their own
    tool_format: str                        # what its templates show
    marks: tuple[str, ...]                  # that are tokens of the vocabulary
    ends: tuple[str, ...]                   # the tokens that end an answer
    thought: tuple[str, str] | None = ("<think>", "</think>")
    # The template's variables for an answer with a thought, and for one without.
    thinking: Mapping[str, Any] = field(default_factory=dict)
    plain: Mapping[str, Any] = field(default_factory=dict)
    # What the template does not write.
    drops_thoughts: bool = False            # the tests write them, before what the template writes
    drops_content_with_calls: bool = False
    drops_thoughts_without_calls: bool = False
    max_calls: int = 3
    thoughts_have_marks: bool = True        # other marks than those of thoughts
    forgotten: str = ""                     # what a model may leave out after a thought; empty: its mark
    unwritable: tuple[str, ...] = ()        # texts in arguments that end them, since nothing escapes them


def _qwen(name: str, *published: str, **changes: Any) -> Family:
    given: dict[str, Any] = {"tool_format": "hermes", "marks": QWEN_MARKS, "ends": ("<|im_end|>",)}
    return Family(name=name, published=published, **given | changes)


def _mistral(name: str, *published: str, **changes: Any) -> Family:
    given: dict[str, Any] = {"tool_format": "mistral_nemo", "ends": ("</s>",), "thought": None}
    return Family(name=name, published=published, **given | {"drops_content_with_calls": True} | changes)


def _glm(name: str, *published: str, **changes: Any) -> Family:
    given: dict[str, Any] = {"marks": GLM_MARKS, "ends": ("<|user|>", "<|observation|>")}
    given |= {"unwritable": ("</arg_value>",)}
    return Family(name=name, published=published, **given | changes)


def _deepseek(name: str, *published: str, **changes: Any) -> Family:
    given: dict[str, Any] = {"tool_format": "deepseek_v3", "ends": (DEEPSEEK_END,)}
    given |= {"marks": (*DEEPSEEK_MARKS, "<think>", "</think>"), "thinking": {"thinking": True}}
    return Family(name=name, published=published, **given | changes)


FAMILIES = (
    _qwen("hermes3", "NousResearch-Hermes-3-Llama-3.1-8B-tool_use", marks=(), thought=None,
          drops_content_with_calls=True),
    _qwen("qwen2_5", "Qwen-Qwen2.5-7B-Instruct", marks=QWEN_MARKS[:2], thought=None),
    _qwen("qwen3", "Qwen-Qwen3-0.6B", plain={"enable_thinking": False}),
    _qwen("smollm3", "HuggingFaceTB-SmolLM3-3B", drops_thoughts=True),
    _qwen("granite4", "ibm-granite-granite-4.0", "ibm-granite-granite-4.1", ends=("<|end_of_text|>",),
          marks=QWEN_MARKS[:2], thought=None),
    _qwen("qwen3_coder", "Qwen3-Coder", tool_format="qwen3_coder", thought=None, marks=QWEN_MARKS[:2],
          unwritable=("</parameter>",)),
    _qwen("qwen3_5", "Qwen3.5-4B", tool_format="qwen3_coder", unwritable=("</parameter>",)),
    Family(
        name="seed_oss",
        published=("ByteDance-Seed-OSS",),
        tool_format="seed_oss",
        marks=("<seed:tool_call>", "</seed:tool_call>", "<seed:think>", "</seed:think>"),
        ends=("<seed:eos>",),
        thought=("<seed:think>", "</seed:think>"),
        unwritable=("</parameter>",),
    ),
    Family(
        name="nemotron_nano_2",             # its own template writes a newline before the end
        tool_format="nemotron_json",
        marks=("<TOOLCALL>", "</TOOLCALL>", "<think>", "</think>"),
        ends=("<SPECIAL_12>",),
        drops_thoughts=True,
    ),
    Family(
        name="llama3_1",
        published=("meta-llama-Llama-3.1-8B-Instruct", "meta-llama-Llama-3.2-3B-Instruct",
                   "meta-llama-Llama-3.3-70B-Instruct"),
        tool_format="llama3_json",
        marks=("<|python_tag|>",),
        ends=("<|eot_id|>", "<|eom_id|>"),
        thought=None,
        drops_content_with_calls=True,
        max_calls=1,
    ),
    _mistral("mistral_nemo", "mistralai-Mistral-Nemo-Instruct-2407", marks=("[TOOL_CALLS]",)),
    _mistral("mistral_small_3_2", "Mistral-Small-3.2-24B-Instruct-2506", tool_format="mistral_ids",
             marks=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")),
    _mistral("ministral3", "mistralai-Ministral-3-14B-Reasoning-2512", tool_format="mistral_args",
             marks=("[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"), thought=("[THINK]", "[/THINK]"),
             drops_content_with_calls=False),
    Family(
        name="granite3",
        published=("ibm-granite-granite-3.3-2B-Instruct",),
        tool_format="granite",
        marks=("<|tool_call|>",),
        ends=("<|end_of_text|>",),
        thought=None,
    ),
    Family(
        name="phi4_mini",
        published=("microsoft-Phi-4-mini-instruct",),
        tool_format="phi4_mini",
        marks=("<|tool_call|>", "<|/tool_call|>"),
        ends=("<|end|>",),
        thought=None,
    ),
    _glm("glm4_6", "GLM-4.6", "zai-org-GLM-4.5", tool_format="glm45"),
    _glm("glm4_7", "zai-org-GLM-4.7", tool_format="glm47", plain={"enable_thinking": False}),
    _deepseek("deepseek_v3", "deepseek-ai-DeepSeek-V3-0324", thought=None, thinking={}),
    _deepseek("deepseek_r1", "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", drops_thoughts=True,
              drops_content_with_calls=True, thinking={"enable_thinking": True},
              plain={"enable_thinking": True}),
    _deepseek("deepseek_v3_1", "deepseek-ai-DeepSeek-V3.1", tool_format="deepseek_v31", drops_thoughts=True),
    # Without thinking, the published prompt has an empty thought, of which no history has the beginning.
    _deepseek("deepseek_v3_2", "deepseek-ai-DeepSeek-V3.2", tool_format="deepseek_v32",
              plain={"thinking": True},
              marks=(DSML, "<think>", "</think>"), unwritable=(f"</{DSML}parameter>",)),
    Family(
        name="minimax_m2",
        published=("MiniMaxAI-MiniMax-M2",),
        tool_format="minimax_m2",
        marks=("<minimax:tool_call>", "</minimax:tool_call>", "<think>", "</think>"),
        ends=("[e~[",),
        unwritable=("</parameter>",),
    ),
    Family(
        name="gemma4",
        published=("google-gemma-4-31B-it",),
        tool_format="gemma4",
        marks=("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>"),
        ends=("<turn|>", "<|tool_response>"),
        thought=("<|channel>thought", "<channel|>"),
        thinking={"enable_thinking": True},
        plain={"enable_thinking": True},    # without, the prompt has an empty thought, but no history has
        drops_content_with_calls=True,      # or writes it behind the calls
        drops_thoughts_without_calls=True,
        unwritable=('<|"|>',),
    ),
    Family(
        name="lfm2_5",
        published=("LFM2.5-8B-A1B",),
        tool_format="lfm2",
        marks=("<|tool_call_start|>", "<|tool_call_end|>", *QWEN_MARKS[2:]),
        ends=("<|im_end|>",),
        unwritable=("'", "\\"),
    ),
    Family(
        name="lfm2",
        published=("LFM2-8B-A1B",),
        tool_format="lfm2",
        marks=("<|tool_call_start|>", "<|tool_call_end|>"),
        ends=("<|im_end|>",),
        thought=None,
    ),
    Family(
        name="gpt_oss",
        published=("openai-gpt-oss-120b",),
        tool_format="harmony",
        marks=("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>"),
        ends=("<|return|>", "<|call|>"),
        thought=("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
        drops_content_with_calls=True,      # or writes it as a thought
        max_calls=1,
        thoughts_have_marks=False,
        forgotten="<|end|>",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What an assistant says."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[tuple[str, Mapping[str, Any]], ...] = ()   # names and arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A turn as a model writes it."""

    text: str           # without the end of the turn
    begun: bool         # the prompt has begun the thought
    token_ids: tuple[int, ...]


TOOLS = (
    Tool(
        name="edit",
        description="Edits.",
        parameters={
            "type": "object",
            # In the order of the alphabet, in which some templates write arguments.
            "properties": {
                "at": {
                    "type": "object",
                    "properties": {
                        "deep": {
                            "type": "object",
                            "properties": {"label": {"type": "string"}, "on": {"type": "boolean"}},
                        },
                        "line": {"type": "integer"},
                    },
                    "additionalProperties": False,
                },
                "count": {"type": "integer"},
                "force": {"type": "boolean"},
                "mode": {"type": "string", "enum": ["r", "w"]},
                "numbers": {"type": "array", "items": {"type": "integer"}},
                "path": {"type": "string"},
                "ratio": {"type": "number"},
                "tags": {"type": "array", "items": {"type": "string"}},
                "text": {"type": "string"},
            },
        },
    ),
    Tool(
        name="mcp__notes.list-all",
        description="Lists.",
        parameters={"type": "object", "properties": {}},
    ),
    Tool(
        name="say",
        description="Says.",
        parameters={"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
    ),
)
CHAT = Chat(messages=(Message(role="user", content="Go on."),), tools=TOOLS)
# Beginnings of marks, and marks of other families: text, wherever they are.
HALF_MARKS = ("<tool", "</", "<|", "[", "[TOOL", "<think", "call:", "{", "```", "<\uff5c", "to=functions.")
WORDS = (
    "a", "Paris", " ", "  ", "\n", "\n\n", "\t", '"', "'", "\\", "\\n", "\\u00e9", "{}", '{"a": 1}', "[1, 2]",
    "0.5", "true", "null", "&lt;", "<b>", "</p>", ", ", "caf\u00e9", "e\u0301", "\u4e16\u754c",
    "\N{GRINNING FACE}\U0001f3fd",
)


def random_turn(family: Family, draw: random.Random) -> Turn:
    """A turn that the family's template can write."""
    num_calls = draw.choice([0, 1, 1, 2, family.max_calls])
    calls = tuple(_call(family, draw) for _ in range(min(num_calls, family.max_calls)))
    has_content = draw.random() < (0.5 if calls else 1) and not (calls and family.drops_content_with_calls)
    reasons = draw.random() < 0.6 and family.thought is not None
    if not calls and family.drops_thoughts_without_calls:
        reasons = False
    return Turn(
        reasoning=_words(draw, _marks_in_thoughts(family)) if reasons else "",
        content=_words(draw, HALF_MARKS) if has_content else "",
        calls=calls,
    )


def _marks_in_thoughts(family: Family) -> Sequence[str]:
    marks = family.marks if family.thoughts_have_marks else ()
    return [*HALF_MARKS, *(mark for mark in marks if mark not in (family.thought or ()))]


def _words(draw: random.Random, more: Sequence[str]) -> str:
    """Some words, without whitespace around them."""
    words = [draw.choice(WORDS if draw.random() < 0.7 else more) for _ in range(draw.randint(1, 12))]
    return "I" + "".join(words) + "."


def _call(family: Family, draw: random.Random) -> tuple[str, dict[str, Any]]:
    tool = draw.choice(TOOLS)
    properties = tool.parameters["properties"]
    required = tool.parameters.get("required", ())
    names = [name for name in properties if name in required or draw.random() < 0.4]
    return tool.name, {name: _value(family, properties[name], draw) for name in names}


def _value(family: Family, schema: Mapping[str, Any], draw: random.Random) -> Any:
    if "enum" in schema:
        return draw.choice(schema["enum"])
    match schema["type"]:
        case "integer":
            return draw.choice([0, 1, -7, 42, 10**12])
        case "number":
            return draw.choice([0.5, -3.25, 1e-07, 12, 0, 6.02e23])
        case "boolean":
            return draw.random() < 0.5
        case "array":
            return [_value(family, schema["items"], draw) for _ in range(draw.randint(0, 3))]
        case "object":
            properties = schema["properties"].items()
            return {name: _value(family, of, draw) for name, of in properties if draw.random() < 0.6}
    pieces = (*WORDS, *family.marks, *HALF_MARKS, *family.ends, *FAMILIES_MARKS)
    text = "".join(draw.choice(pieces) for _ in range(draw.randint(0, 8)))
    for end in family.unwritable:
        text = text.replace(end, "")
    return text


FAMILIES_MARKS = tuple(sorted({mark for family in FAMILIES for mark in family.marks}))


def source_of(family: Family, published: str | None = None) -> str:
    """The family's short template, or one of its models' own."""
    if published is None:
        return (FOLDER / f"{family.name}.jinja").read_text()
    assert PUBLISHED is not None
    return (Path(PUBLISHED) / f"{published}.jinja").read_text()


def tokenizer_of_family(family: Family, source: str, *, special: bool) -> Tokenizer:
    """A small tokenizer with the family's marks as tokens, which are special tokens or others."""
    added = {*family.ends, *family.marks} - set(SPECIAL_TOKENS)
    backend = tiny_tokenizer(vocab_size=VOCAB_SIZE - len(added))
    backend.add_special_tokens([AddedToken(end, special=True, normalized=False) for end in family.ends])
    for mark in family.marks:
        token = AddedToken(mark, special=special, normalized=False)
        backend.add_special_tokens([token]) if special else backend.add_tokens([token])
    special_tokens = {"bos_token": "<|endoftext|>", "eos_token": family.ends[0]}
    return Tokenizer(
        TokenizerFiles(
            backend=backend,
            special_tokens=special_tokens,
            add_bos_token=False,
            eos_token_ids=frozenset(backend.token_to_id(end) for end in family.ends),
            chat_template=ChatTemplate(source, special_tokens=special_tokens, name=family.name),
        )
    )


def answer_of(family: Family, tokenizer: Tokenizer, turn: Turn) -> Answer:
    """The turn as the family's template writes it in a history."""
    marks = re.compile("|".join(map(re.escape, sorted(family.marks + family.ends, key=len, reverse=True))))
    spelled = partial(map_strings, change=partial(marks.sub, lambda mark: mark[0][0] + SPELLED + mark[0][1:]))
    variables = family.thinking if turn.reasoning else family.plain
    user = {"role": "user", "content": "Go on."}
    prompt = _rendered(tokenizer, [user], variables)
    whole = _rendered(tokenizer, [user, _message(family, turn, spelled)], variables)
    begun = False
    if family.thought is not None:
        before, mark, rest = prompt.rpartition(family.thought[0])
        begun = bool(mark) and not rest.strip()
        if begun and not whole.startswith(prompt):
            prompt, begun = before, False
    assert whole.startswith(prompt), (prompt, whole)
    text = whole[len(prompt) :]
    ended = max(text.rfind(end) for end in family.ends)
    text = text[:ended] if ended >= 0 else text     # the next message ends the turn
    for end in family.ends:
        text = text.removesuffix(end)   # before the end of the text
    if family.thought is not None and family.drops_thoughts and turn.reasoning:
        start, end = family.thought
        text = ("" if begun else start) + spelled(turn.reasoning) + end + text.removeprefix(end)
    token_ids: list[int] = []
    for part in re.split(f"({marks.pattern}|{SPELLED})", text):
        token_ids += tokenizer.encode(part, add_special_tokens=False) if part != SPELLED else []
    return Answer(text=text.replace(SPELLED, ""), begun=begun, token_ids=tuple(token_ids))


def _message(family: Family, turn: Turn, spelled: Callable[[Any], Any]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": spelled(turn.content)}
    if turn.reasoning and not family.drops_thoughts:
        message["reasoning_content"] = spelled(turn.reasoning)
    if turn.calls:
        functions = [
            {"name": name, "arguments": json.dumps(spelled(arguments), ensure_ascii=False)}
            for name, arguments in turn.calls
        ]
        message["tool_calls"] = [
            {"id": f"call{index:05}", "type": "function", "function": function}
            for index, function in enumerate(functions)
        ]
    return message


def _rendered(tokenizer: Tokenizer, messages: list[dict[str, Any]], variables: Mapping[str, Any]) -> str:
    """A chat as transformers renders it, after what this server changes for templates that know no calls."""
    template = tokenizer.chat_template
    assert template is not None
    chat = Chat(messages=read_messages(messages), tools=TOOLS)
    chat = ToolCalling(tokenizer, tool_format=None).rendered(chat)
    given = template.values(chat)
    own = {name: value for name, value in variables.items() if name in template.variables}
    [[text], _] = render_jinja_template(
        conversations=[given.pop("messages")],
        chat_template=template.source,
        **given | own | {"add_generation_prompt": messages[-1]["role"] == "user"},
        bos_token=tokenizer.bos_token,
        eos_token=tokenizer.eos_token,
    )
    return text


@dataclass(frozen=True, slots=True)
class Figures:
    """The sizes of a model that has room for any answer."""

    vocab_size: int
    max_num_seqs: int = 1
    max_length: int = 1 << 20
    block_size: int = 16
    num_blocks: int = 1 << 20
    kv_cache_bytes: int = 0
    metadata: tuple[()] = ()


class FamilyModel:
    """What a text model makes for the requests to one family's model, without the model."""

    def __init__(self, family: Family, published: str | None, *, special: bool) -> None:
        self.family = family
        self.tokenizer = tokenizer_of_family(family, source_of(family, published), special=special)
        self.builder = SequenceBuilder(
            name=family.name,
            tokenizer=self.tokenizer,
            decoding=Decoding(decode=None, is_default_loop=True, plugins=Plugins(), tool_format=None),
            logits=Figures(self.tokenizer.vocab_size),
        )

    def answer(self, turn: Turn) -> Answer:
        return answer_of(self.family, self.tokenizer, turn)

    def parser(self, *, begun: bool) -> MessageParser:
        parser = self.builder.message_parser(CHAT, sampling_params({}), begun=begun)
        assert parser is not None
        return parser

    def texts(self, token_ids: Sequence[int]) -> list[str]:
        """The text of each token, as a client without a parser would get it."""
        detokenizer = self.builder.detokenizer(CHAT, sampling_params({}), token_ids=())
        texts = [detokenizer.push(token_id) for token_id in token_ids]
        return [*texts[:-1], texts[-1] + detokenizer.flush()] if texts else []

    def sequence(self, prompt: Sequence[int], *, begun: bool) -> TokenSequence:
        """The sequence of a greedy answer."""
        request = GenerationRequest(
            prompt=CHAT,
            prompt_token_ids=tuple(prompt),
            params=sampling_params({"temperature": 0}),
            seeds=(0,),
            begins_reasoning=begun,
        )
        [sequence] = self.builder.sequences(request)
        return sequence

    def grammar(self, *, begun: bool) -> StructuredOutputGrammar | None:
        return self.sequence((1,), begun=begun).sampling.grammar
