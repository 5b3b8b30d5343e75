"""Response request: one request of the Responses API, with the conversation that it continues."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from genserve.prompt import Chat
from genserve.sampling.sampling_params import SamplingParams
from genserve.server.generation_handler import SubmittedRequest
from genserve.server.request_body import BodyTooLarge
from genserve.server.response_store import PreviousResponseNotFound, ResponseNotFound, ResponseStore
from genserve.server.routes.response_items import Item, is_unfinished, messages_of, read_items
from genserve.server.routes.responses_body import ResponsesBody

# Fields of OpenAI's for what this server does not have.
_NOTHING: Mapping[str, None] = dict.fromkeys(
    (
        "access_programs",
        "conversation",
        "image",
        "input_transformations",
        "moderation",
        "prompt",
        "prompt_cache_diagnostics",
        "prompt_cache_options",
        "prompt_cache_retention",
        "tool_usage",
    )
)


@dataclass(slots=True, kw_only=True)
class ResponseRequest:
    """One request, as `GenerationBody`: the body, and the conversation that it continues."""

    body: ResponsesBody
    store: ResponseStore
    max_bytes: int              # of the conversation
    id: str = field(default_factory=lambda: f"resp_{uuid.uuid4().hex}")
    created_s: int = field(default_factory=lambda: int(time.time()))
    inputs: list[Item] = field(default_factory=list)    # set by `prompts`
    num_earlier: int = 0                                # how many of them are of earlier responses
    num_choices: int = 1

    @property
    def model_name(self) -> str | None:
        """See `GenerationBody`."""
        return self.body.model_name

    @property
    def stream(self) -> bool | None:
        """See `GenerationBody`."""
        return self.body.stream

    def check(self) -> None:
        """See `GenerationBody`."""
        self.body.check()

    def prompts(self) -> list[Chat]:
        """See `GenerationBody`; there is one prompt."""
        body = self.body
        earlier = self._earlier()
        self.inputs = [*earlier, *read_items(body.input or (), earlier=earlier, find=self.store.item)]
        self.num_earlier = len(earlier)
        chat = Chat(
            messages=messages_of(self.inputs, instructions=body.instructions),
            **body.tool_fields(),
            continue_final_message=is_unfinished(self.inputs),
            template_kwargs=body.chat_template_kwargs or {},
        )
        return [chat]

    def _earlier(self) -> list[Item]:
        """Return the conversation that the request continues."""
        previous_id, field = self.body.previous_response_id, "previous_response_id"
        if previous_id is None:
            return []
        try:
            previous = self.store.get(previous_id)
        except ResponseNotFound as error:
            raise PreviousResponseNotFound(error.message, field=field, remedy=error.remedy) from None
        if previous.num_bytes > self.max_bytes:
            message = f"the conversation before it is larger than {self.max_bytes} bytes"
            raise BodyTooLarge(f"{field}: {message}", field=field, remedy="begin a new conversation")
        return previous.items()

    def params(self) -> SamplingParams:
        """See `GenerationBody`."""
        return self.body.params()

    def names(self) -> Mapping[str, str]:
        """See `GenerationBody`."""
        return self.body.names()

    def ignored(self, params: SamplingParams) -> list[str]:
        """See `GenerationBody`."""
        return self.body.ignored(params)

    def response(self, submitted: SubmittedRequest) -> dict[str, Any]:
        """Return the response object at its beginning."""
        body, params = self.body, submitted.params
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created_s,
            "status": "in_progress",
            "background": False,
            "completed_at": None,
            "error": None,
            "frequency_penalty": params.frequency_penalty,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "model": submitted.model.name,
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "presence_penalty": params.presence_penalty,
            "previous_response_id": body.previous_response_id,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": {"effort": None, "summary": None} | _given(body.reasoning),
            "safety_identifier": body.safety_identifier,
            "service_tier": "default",
            "store": self.stores,
            "temperature": params.temperature,
            "text": {"format": {"type": "text"}} | _given(body.text),
            "tool_choice": body.tool_choice or "auto",
            "tools": [tool.as_dict() for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": body.truncation or "disabled",
            "usage": None,
            "user": body.user,
            "metadata": body.metadata or {},
            **_NOTHING,
        }

    @property
    def stores(self) -> bool:
        """Whether the response is stored."""
        return self.body.store is not False and self.store.max_bytes > 0

    def save(self, response: Mapping[str, Any]) -> None:
        """Store the response at its end, if the request asks for it."""
        if self.stores:
            self.store.add(response, inputs=self.inputs, num_earlier=self.num_earlier)


def _given(options: BaseModel | None) -> dict[str, Any]:
    return options.model_dump(exclude_none=True) if options else {}
