"""Tool formats: how models write tool calls in their answers, and which one a chat template teaches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any, Self

from genserve.text.argument_syntax import JSON, ArgumentSyntax, JsonArguments, TaggedArguments
from genserve.text.literal_arguments import LiteralArguments


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """How tool calls are written in an answer, as text and names of special tokens.

    `before_name NAME before_arguments ARGUMENTS after_arguments` is a call, with `before_id ID` after the
    name if the model writes ids. An answer with calls is some content, `begin`, `opening`, calls with
    `separator` between them, and `closing`. Parsers ignore whitespace except in the arguments; the grammar
    writes it as it is here, since models were trained on it.

    A new format is an entry of `TOOL_FORMATS` and of `_SIGNS`. Only arguments in a syntax of their own need
    code: a class in `argument_syntax.py`, and its rules in `structured_output/argument_grammar.py`.
    """

    begin: str                      # the mark that begins the calls; no content contains it
    begin_is_optional: bool = False     # an answer that begins with a call needs no mark
    opening: str = ""
    before_name: str = '{"name": "'
    before_id: str = ""             # between the name and the id that the model writes; empty: it writes none
    before_arguments: str = '", "arguments": '
    arguments: ArgumentSyntax = JSON
    after_arguments: str = "}"
    separator: str | None = None    # None: the model makes one call at a time
    closing: str = ""
    has_short_ids: bool = False     # ids of calls are 9 letters and digits: the template rejects others

    def __post_init__(self) -> None:
        texts = (each.name for each in fields(self) if not isinstance(each.default, bool | JsonArguments))
        for name in texts:
            value = getattr(self, name)
            if not isinstance(value, str) and not (name == "separator" and value is None):
                raise TypeError(f"{name} is not text")
        if not self.begin.strip() or " " in self.begin.strip():
            raise ValueError("begin must be a mark without spaces")
        if self.arguments != JSON and not self.after_arguments.strip():
            raise ValueError("after_arguments must not be empty unless arguments are JSON")

    @classmethod
    def declared(cls, parts: Mapping[str, Any]) -> Self:
        """Return the format that a model.py declares; `arguments` are the fields of `TaggedArguments`.

        Raises:
            TypeError, ValueError: it has an unknown or invalid part.
        """
        parts = dict(parts)
        if "arguments" in parts:
            parts["arguments"] = TaggedArguments(**dict(parts["arguments"]))
        return cls(**parts)

    @property
    def has_last_ids(self) -> bool:
        """Whether a call, a JSON object, may end with its id."""
        return self.has_short_ids and self.after_arguments == "}"

    @property
    def marks(self) -> str:
        """All parts as one text, to search for special tokens."""
        before = f"{self.before_name}{self.before_id}{self.before_arguments}"
        empty = f"{before}{self.arguments.marks}{self.after_arguments}"
        return f"{self.begin}{self.opening}{empty}{self.separator or ''}{self.closing}"

    def written(self, calls: Sequence[tuple[str, str]]) -> str:
        """Return the text of some calls, each a name and its arguments as JSON."""
        around = (
            f"{self.before_name}{name}{self.before_arguments}{self.arguments.written(arguments)}"
            f"{self.after_arguments}"
            for name, arguments in calls
        )
        return f"{self.begin}{self.opening}{(self.separator or '').join(around)}{self.closing}"


HERMES = ToolFormat(
    begin="<tool_call>",
    opening="\n",
    separator="\n</tool_call>\n<tool_call>\n",
    closing="\n</tool_call>",
)
SMOLLM2 = ToolFormat(begin="<tool_call>", opening="[", separator=", ", closing="]</tool_call>")

# gpt-oss; its answers have a parser and a grammar of their own, in `harmony.py` and `harmony_grammar.py`.
HARMONY = ToolFormat(
    begin="<|channel|>",
    before_name="commentary to=functions.",
    before_arguments=" <|constrain|>json<|message|>",
    after_arguments="<|call|>",
)


def _tags(before_key: str, before_value: str, after_value: str) -> TaggedArguments:
    return TaggedArguments(
        before_key=before_key, before_text=before_value, before_json=before_value, after_value=after_value
    )


def _functions(mark: str, arguments: TaggedArguments) -> ToolFormat:
    """Return a format that has each call in the tag `mark`, as `<function=NAME>` and its arguments."""
    return ToolFormat(
        begin=f"<{mark}>",
        opening="\n",
        before_name="<function=",
        before_arguments=">\n",
        arguments=arguments,
        after_arguments="</function>",
        separator=f"\n</{mark}>\n<{mark}>\n",
        closing=f"\n</{mark}>",
    )


# A value of unknown type is a string only if it is no JSON.
_ANY_TYPE = ("null", "boolean", "number", "array", "object", "string")
_BAR, _SPACE = "\uff5c", "\u2581"     # in the marks of DeepSeek
_CALLS, _CALL, _CALL_NAME, _CALL_END, _CALLS_END = (
    f"<{_BAR}tool{_SPACE}{part}{_BAR}>"
    for part in (f"calls{_SPACE}begin", f"call{_SPACE}begin", "sep", f"call{_SPACE}end", f"calls{_SPACE}end")
)
_DSML = f"{_BAR}DSML{_BAR}"

# The formats by the name that `tool_format` in config.pbtxt may have; vLLM's parsers have the same names.
TOOL_FORMATS: Mapping[str, ToolFormat] = MappingProxyType(
    {
        "hermes": HERMES,
        "llama3_json": ToolFormat(
            begin="<|python_tag|>", begin_is_optional=True, before_arguments='", "parameters": '
        ),
        "mistral": ToolFormat(
            begin="[TOOL_CALLS]", opening=" [", separator=", ", closing="]", has_short_ids=True
        ),
        "mistral_nemo": ToolFormat(
            begin="[TOOL_CALLS]", opening="[", separator=", ", closing="]", has_short_ids=True
        ),
        "mistral_ids": ToolFormat(
            begin="[TOOL_CALLS]",
            separator="[TOOL_CALLS]",
            before_name="",
            before_id="[CALL_ID]",
            before_arguments="[ARGS]",
            after_arguments="",
            has_short_ids=True,
        ),
        "mistral_args": ToolFormat(
            begin="[TOOL_CALLS]",
            separator="[TOOL_CALLS]",
            before_name="",
            before_arguments="[ARGS]",
            after_arguments="",
            has_short_ids=True,
        ),
        "smollm2": SMOLLM2,
        "harmony": HARMONY,
        # https://ai.google.dev/gemma/docs/core/function_calling
        "gemma4": ToolFormat(
            begin="<|tool_call>",
            before_name="call:",
            before_arguments="{",
            arguments=LiteralArguments(
                quotes=('<|"|>',),
                assign=":",
                separator=",",
                nested_assign=":",
                has_escapes=False,
                is_sorted=True,
            ),
            after_arguments="}",
            separator="<tool_call|><|tool_call>",
            closing="<tool_call|>",
        ),
        # https://docs.liquid.ai/lfm/key-concepts/tool-use
        "lfm2": ToolFormat(
            begin="<|tool_call_start|>",
            opening="[",
            before_name="",
            before_arguments="(",
            arguments=LiteralArguments(
                quotes=('"', "'"), assign="=", separator=", ", nested_assign=": ", has_escapes=True
            ),
            after_arguments=")",
            separator=", ",
            closing="]<|tool_call_end|>",
        ),
        "granite": ToolFormat(begin="<|tool_call|>", opening="[", separator=", ", closing="]"),
        # https://huggingface.co/nvidia/NVIDIA-Nemotron-Nano-9B-v2/blob/main/tokenizer_config.json
        "nemotron_json": ToolFormat(begin="<TOOLCALL>", opening="[", separator=", ", closing="]</TOOLCALL>"),
        # https://huggingface.co/microsoft/Phi-4-mini-instruct#tool-enabled-function-calling-format
        "phi4_mini": ToolFormat(
            begin="<|tool_call|>", opening="[", separator=", ", closing="]<|/tool_call|>"
        ),
        # https://huggingface.co/Qwen/Qwen3-Coder-30B-A3B-Instruct/blob/main/qwen3coder_tool_parser.py
        "qwen3_coder": _functions("tool_call", _tags("<parameter=", ">\n", "\n</parameter>\n")),
        # https://huggingface.co/ByteDance-Seed/Seed-OSS-36B-Instruct/blob/main/chat_template.jinja
        "seed_oss": _functions("seed:tool_call", _tags("<parameter=", ">", "</parameter>\n")),
        # https://huggingface.co/zai-org/GLM-4.6/blob/main/chat_template.jinja
        "glm45": ToolFormat(
            begin="<tool_call>",
            before_name="",
            before_arguments="\n",
            arguments=replace(
                _tags("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"), untyped=_ANY_TYPE
            ),
            after_arguments="</tool_call>",
            separator="\n<tool_call>",
        ),
        # https://huggingface.co/zai-org/GLM-4.7/blob/main/chat_template.jinja
        "glm47": ToolFormat(
            begin="<tool_call>",
            before_name="",
            before_arguments="",
            arguments=replace(
                _tags("<arg_key>", "</arg_key><arg_value>", "</arg_value>"), untyped=_ANY_TYPE
            ),
            after_arguments="</tool_call>",
            separator="<tool_call>",
        ),
        # https://huggingface.co/MiniMaxAI/MiniMax-M2/blob/main/docs/tool_calling_guide.md
        "minimax_m2": ToolFormat(
            begin="<minimax:tool_call>",
            opening="\n",
            before_name='<invoke name="',
            before_arguments='">\n',
            arguments=_tags('<parameter name="', '">', "</parameter>\n"),
            after_arguments="</invoke>",
            separator="\n",
            closing="\n</minimax:tool_call>",
        ),
        # https://huggingface.co/deepseek-ai/DeepSeek-V3-0324/blob/main/tokenizer_config.json, and R1
        "deepseek_v3": ToolFormat(
            begin=_CALLS,
            before_name=f"{_CALL}function{_CALL_NAME}",
            before_arguments="\n```json\n",
            after_arguments=f"\n```{_CALL_END}",
            separator="\n",
            closing=_CALLS_END,
        ),
        # https://huggingface.co/deepseek-ai/DeepSeek-V3.1#toolcall
        "deepseek_v31": ToolFormat(
            begin=_CALLS,
            before_name=_CALL,
            before_arguments=_CALL_NAME,
            after_arguments=_CALL_END,
            separator="",
            closing=_CALLS_END,
        ),
        # https://huggingface.co/deepseek-ai/DeepSeek-V3.2/blob/main/encoding/encoding_dsv32.py
        "deepseek_v32": ToolFormat(
            begin=f"<{_DSML}function_calls>",
            opening="\n",
            before_name=f'<{_DSML}invoke name="',
            before_arguments='">\n',
            arguments=TaggedArguments(
                before_key=f'<{_DSML}parameter name="',
                before_text='" string="true">',
                before_json='" string="false">',
                after_value=f"</{_DSML}parameter>\n",
                untyped=_ANY_TYPE,
            ),
            after_arguments=f"</{_DSML}invoke>",
            separator="\n",
            closing=f"\n</{_DSML}function_calls>",
        ),
    }
)

# Parts of templates that together reveal a format; the first format whose parts are all found counts.
_SIGNS = (
    (("<|channel|>commentary",), "harmony"),
    (("<|tool_call>call:",), "gemma4"),
    (("<|tool_call_start|>",), "lfm2"),
    (("<|tool_list_start|>",), "lfm2"),
    (("<seed:tool_call>",), "seed_oss"),
    (("<parameter=",), "qwen3_coder"),
    (("</arg_key><arg_value>",), "glm47"),
    (("<arg_key>",), "glm45"),
    (("<minimax:tool_call>",), "minimax_m2"),
    ((_DSML,), "deepseek_v32"),
    ((_CALL_NAME, "```json"), "deepseek_v3"),
    ((_CALL_NAME,), "deepseek_v31"),
    (("[CALL_ID]",), "mistral_ids"),
    (("[ARGS]",), "mistral_args"),
    (("[TOOL_CALLS][",), "mistral_nemo"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<TOOLCALL>",), "nemotron_json"),
    (("<|/tool|>",), "phi4_mini"),
    (("<|tool_call|>",), "granite"),
    (("<tool_call>",), "hermes"),
    (('"parameters":',), "llama3_json"),
    (("<|python_tag|>",), "llama3_json"),
)


def format_of_template(source: str) -> ToolFormat:
    """Return the format that a chat template with tools shows to the model; Hermes' if it shows none."""
    found = (name for signs, name in _SIGNS if all(sign in source for sign in signs))
    return TOOL_FORMATS[next(found, "hermes")]
