"""Messages body: the fields of Anthropic's `POST /v1/messages`, and the chat that they describe."""

from __future__ import annotations

from functools import cached_property
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from genserve.errors import InvalidRequest, require
from genserve.prompt import MAX_CHAT_MESSAGES, MAX_TOOLS, Chat, Reasoning, only_tool
from genserve.sampling.param_table import Range
from genserve.sampling.sampling_params import SamplingParams, sampling_params, unused_parameters
from genserve.server.dialects.anthropic.message_blocks import (
    MessageFields,
    SystemBlocks,
    called_tools,
    left_out_kinds,
    messages_of,
    referenced_tools,
)
from genserve.server.dialects.anthropic.message_tools import ToolOffer, Tools
from genserve.server.dialects.decoding_fields import COMMON, DecodingFields, Texts, parameter
from genserve.server.dialects.generation_handler import SubmittedRequest
from genserve.server.dialects.reasoning_fields import ReasoningEffort, joined_reasoning
from genserve.server.http.request_body import Items, TolerantBody


class ToolChoiceFields(TolerantBody):
    """Whether, and which, tools are called."""

    type: Literal["auto", "any", "tool", "none"] = Field(
        description="`auto`: the model decides. `any`: it calls a tool. `tool`: it calls the one named. "
        "`none`: it calls none."
    )
    name: str | None = Field(default=None, description="The name of the tool, for the type `tool`.")
    disable_parallel_tool_use: bool | None = Field(default=None, description="At most one call per answer.")


class ThinkingFields(TolerantBody):
    """Whether the model reasons before it answers."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"] = Field(
        description="`disabled` turns reasoning off, if the model's chat template can do that."
    )
    budget_tokens: int | None = parameter("thinking_token_budget", ge=0, le=2**31 - 1)
    display: str | None = Field(
        default=None,
        description="`omitted`: the text of the reasoning is left out of the answer. Others have no effect.",
    )


class FormatFields(TolerantBody):
    """The form of the answer."""

    type: Literal["json_schema"] = Field(description="The kind of the form.")
    # An alias, as pydantic's models have a method of this name.
    schema_: dict[str, Any] = Field(alias="schema", description="The JSON schema of the answer.")


class OutputFields(TolerantBody):
    """Options of the answer."""

    format: FormatFields | None = Field(default=None, description="The form of the answer.")
    effort: ReasoningEffort = None


class PromptFields(TolerantBody):
    """The fields that the prompt consists of; `POST /v1/messages/count_tokens` has no others."""

    model: str | None = Field(
        default=None,
        description="The name of the model; may be left out if there is only one.",
        json_schema_extra=COMMON,
    )
    messages: Items[MessageFields] = Field(
        min_length=1,
        max_length=MAX_CHAT_MESSAGES,
        description="The chat so far, the oldest turn first. A last turn of the assistant is continued.",
    )
    system: SystemBlocks | None = Field(default=None, description="Instructions to the model.")
    tools: Tools | None = Field(
        default=None, max_length=MAX_TOOLS, description="The tools that the model may call."
    )
    tool_choice: ToolChoiceFields | None = Field(
        default=None, description="Whether tools are called; by default the model decides."
    )
    thinking: ThinkingFields | None = Field(
        default=None, description="Whether the model reasons first; by default as its template has it."
    )
    output_config: OutputFields | None = Field(default=None, description="Options of the answer.")
    output_format: FormatFields | None = Field(
        default=None, description="The older name of `output_config.format`."
    )

    @property
    def form(self) -> FormatFields | None:
        """The form of the answer; None: any text."""
        newer = self.output_config.format if self.output_config else None
        return newer or self.output_format

    def chat(self) -> Chat:
        """Return the chat.

        Raises:
            InvalidRequest: the last turn calls a tool, or what `Chat` raises.
        """
        offer = self.tool_offer
        messages = messages_of(
            self.messages,
            system=self.system or (),
            described=offer.described,
            offered={tool.name for tool in offer.tools},
        )
        begun = messages[-1] if messages and messages[-1].role == "assistant" else None
        if begun is not None:
            require(not begun.tool_calls, "messages", "must end with the results of the tool calls")
            if not begun.content:
                messages.pop()
        choice = self._choice()
        if choice.get("tool_choice") != "none":
            offer.require_some()
        return Chat(
            messages=tuple(messages),
            tools=offer.tools,
            continue_final_message=begun is not None and begun.content != "",
            reasoning=self.reasoning,
            **choice,
        )

    @cached_property
    def tool_offer(self) -> ToolOffer:
        """The tools of the request; raises InvalidRequest."""
        return ToolOffer(
            self.tools or (),
            referenced=referenced_tools(self.messages),
            called=called_tools(self.messages),
            choice=self.tool_choice.name if self.tool_choice and self.tool_choice.type == "tool" else None,
        )

    def asked_reasoning(self) -> dict[str, Reasoning]:
        """Return what each field asks for about reasoning."""
        asked = {}
        if self.thinking is not None:
            enabled = self.thinking.type != "disabled"
            budget = self.thinking.budget_tokens if enabled else None
            asked["thinking"] = Reasoning(enabled=enabled, budget=budget)
        if self.output_config is not None:
            asked["output_config.effort"] = Reasoning(effort=self.output_config.effort)
        return asked

    @property
    def reasoning(self) -> Reasoning:
        """How the model is to reason."""
        return joined_reasoning(self.asked_reasoning(), has_form=self.form is not None)

    def _choice(self) -> dict[str, Any]:
        """Return the fields of `Chat` for the choice among tools."""
        choice = self.tool_choice
        if choice is None:
            return {}
        parallel = not choice.disable_parallel_tool_use
        match choice.type:
            case "tool":
                if choice.name is None:
                    raise InvalidRequest("tool_choice.name is missing", field="tool_choice.name")
                return only_tool(choice.name)
            case "any":
                return {"tool_choice": "required", "parallel_tool_calls": parallel}
            case mode:
                return {"tool_choice": mode, "parallel_tool_calls": parallel}


class MessagesBody(PromptFields, DecodingFields):
    """Body of `POST /v1/messages`; extras beyond Anthropic's have vLLM's names."""

    model_config = ConfigDict(
        extra="allow",
        json_schema_extra={
            "examples": [
                {
                    "messages": [{"role": "user", "content": "What is the capital of Japan?"}],
                    "max_tokens": 32,
                    "temperature": 0,
                    "stream": True,
                }
            ]
        },
    )

    max_tokens: int = Field(
        ge=1, description="This number of tokens ends the answer.", json_schema_extra=COMMON
    )
    stop_sequences: Texts = parameter("stop")
    stream: bool | None = Field(
        default=None,
        description="Send the answer as server-sent events while it is generated.",
        json_schema_extra=COMMON | {"default": False},
    )
    temperature: float | None = parameter("temperature", default=1.0)
    top_k: int | None = parameter("top_k", bounds=Range(-1, 2**31 - 1))
    seed: int | None = parameter("seed")

    num_choices: ClassVar[int] = 1

    @property
    def model_name(self) -> str | None:
        """See `GenerationBody`."""
        return self.model

    @property
    def hides_thinking(self) -> bool:
        """Whether the text of the reasoning is left out of the answer."""
        return self.thinking is not None and self.thinking.display == "omitted"

    def check(self) -> None:
        """See `GenerationBody`."""

    def prompts(self) -> list[Chat]:
        """See `GenerationBody`; there is one prompt."""
        return [self.chat()]

    def params(self) -> SamplingParams:
        """See `GenerationBody`."""
        form = None if self.form is None else {"json": self.form.schema_}
        own: dict[str, Any] = {
            "max_tokens": self.max_tokens,
            "stop": self.stop_sequences,
            "structured_outputs": self.form_or(form, field="output_config.format"),
        }
        defaults = {} if self.use_beam_search else {"temperature": 1.0}
        return sampling_params(self.given() | own, defaults=defaults)

    def ignored(self, submitted: SubmittedRequest) -> list[str]:
        """See `GenerationBody`."""
        reasoning = submitted.unused_reasoning(self.asked_reasoning())
        return [*self.unused(), *reasoning, *unused_parameters(submitted.params)]

    def unused(self) -> list[str]:
        """Return the fields without effect, whatever the model is."""
        extra = self.model_extra or {}
        # Servers by URL, whose tools the model does not see.
        names = [f"{name}=url" if name == "mcp_servers" and extra[name] else name for name in extra]
        options = self.output_config.model_extra if self.output_config else None
        names += (f"output_config.{name}" for name in options or {})
        if self.thinking is not None and self.thinking.display not in (None, "omitted", "summarized"):
            names.append("thinking.display")
        names += self.tool_offer.left_out
        return [*names, *(f"messages={kind}" for kind in left_out_kinds(self.messages))]

    def names(self) -> dict[str, str]:
        """See `GenerationBody`."""
        return {
            **{f"tools[{index}]": place for index, place in enumerate(self.tool_offer.places)},
            "prompt": "messages",
            "stop": "stop_sequences",
            ".function.parameters": ".input_schema",
            **({} if self.form is None else {"structured_outputs": "output_config.format.schema"}),
        }
