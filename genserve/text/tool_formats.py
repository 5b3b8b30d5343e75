"""Tool formats: how models write tool calls in their answers, and which one a chat template teaches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """The text of the tool calls in an answer: text and names of special tokens.

    `before_name NAME before_arguments ARGUMENTS after_arguments` is a call. An answer with calls is some
    content, `begin`, `opening`, calls with `separator` between them, and `closing`. Parsers ignore whitespace
    except in the arguments; the grammar writes it as it is here, since models were trained on it.
    """

    begin: str                      # the mark that begins the calls; no content contains it
    begin_is_optional: bool = False     # an answer that begins with a call needs no mark
    opening: str = ""
    before_name: str = '{"name": "'
    before_arguments: str = '", "arguments": '
    after_arguments: str = "}"
    separator: str | None = None    # None: the model makes one call at a time
    closing: str = ""
    has_short_ids: bool = False     # ids of calls are 9 letters and digits: the template rejects others

    def __post_init__(self) -> None:
        texts = (field.name for field in fields(self) if not isinstance(field.default, bool))
        for name in texts:
            value = getattr(self, name)
            if not isinstance(value, str) and not (name == "separator" and value is None):
                raise TypeError(f"{name} is not text")
        if not self.begin.strip() or " " in self.begin.strip():
            raise ValueError("begin must be a mark without spaces")

    @property
    def marks(self) -> str:
        """All parts as one text, to find special tokens in."""
        return self.written([("", ""), ("", "")])

    def written(self, calls: Sequence[tuple[str, str]]) -> str:
        """Return the text of some calls: their names and arguments."""
        around = (
            f"{self.before_name}{name}{self.before_arguments}{arguments}{self.after_arguments}"
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

# By the name that `tool_format` in config.pbtxt may have.
TOOL_FORMATS: Mapping[str, ToolFormat] = MappingProxyType(
    {
        "hermes": HERMES,
        "llama3_json": ToolFormat(
            begin="<|python_tag|>", begin_is_optional=True, before_arguments='", "parameters": '
        ),
        "mistral": ToolFormat(
            begin="[TOOL_CALLS]", opening=" [", separator=", ", closing="]", has_short_ids=True
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
    }
)

# Parts of templates that show their formats, the first that is found counts.
_SIGNS = (
    ("[ARGS]", "mistral_args"),
    ("[TOOL_CALLS]", "mistral"),
    ("<tool_call>", "hermes"),
    ('"parameters":', "llama3_json"),
    ("<|python_tag|>", "llama3_json"),
)


def format_of_template(source: str) -> ToolFormat:
    """Return the format that a chat template with tools shows to the model; Hermes' if it shows none."""
    name = next((name for sign, name in _SIGNS if sign in source), "hermes")
    return TOOL_FORMATS[name]
