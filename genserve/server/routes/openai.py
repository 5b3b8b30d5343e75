"""OpenAI's dialect: `/v1/chat/completions` and `/v1/models`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BeforeValidator, ConfigDict, Field

from genserve.completion import Completion, Delta
from genserve.errors import InvalidRequest
from genserve.prompt import MAX_CHAT_MESSAGES, Chat, read_messages
from genserve.sampling.sampling_params import MAX_TOP_LOGPROBS, SamplingParams
from genserve.server.decoding_fields import parameter
from genserve.server.error_responses import OPENAI_ERRORS, ErrorFormats
from genserve.server.generation_handler import SubmittedRequest, handle_generation
from genserve.server.request_body import Body, StrictRoute
from genserve.server.routes.logprob_formats import ID_PREFIX, TokenScores, prompt_logprobs
from genserve.server.routes.openai_protocol import FINISH_REASONS, OpenAIBody, OpenAIFrames, choose, head
from genserve.server.services import SharedServices
from genserve.text.message_parser import MessageParser
from genserve.textmodel.text_model import TextModel

router = APIRouter(prefix="/v1", route_class=StrictRoute, tags=["OpenAI"])
ERRORS: ErrorFormats = {"/v1/": OPENAI_ERRORS}


class TextPart(Body):
    """A part of a message's content."""

    type: Literal["text"] = Field(description="The kind of the part.")
    text: str = Field(description="Its text.")


def _text_parts(content: Any) -> Any:
    if not isinstance(content, str | list):
        raise ValueError("must be text, or a list of text parts")  # noqa: TRY004  # pydantic expects a ValueError
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


class ChatMessage(Body):
    """One message; other fields, which answers of ours or of OpenAI have too, must be empty."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant"] = Field(
        description="Whose message it is; `developer` is OpenAI's newer word for `system`."
    )
    content: Annotated[
        list[TextPart], BeforeValidator(_text_parts, json_schema_input_type=str | list[TextPart])
    ] = Field(description="Its text, whole or in parts.")
    reasoning_content: str | None = Field(
        default=None, description="The reasoning before an answer of the assistant, for the template to show."
    )

    def text(self) -> str:
        """Return the content as one text."""
        return "".join(part.text for part in self.content)


class ChatBody(OpenAIBody):
    """Body of `POST /v1/chat/completions`."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "audio": (),
        "chat_template": (),
        "function_call": ("none", "auto"),
        "functions": ([],),
        "modalities": (["text"],),
        "moderation": (),
        "parallel_tool_calls": (True, False),
        "prediction": (),
        "reasoning_effort": ("none",),
        "tool_choice": ("none", "auto"),
        "tools": ([],),
        "verbosity": (),
        "web_search_options": (),
    }

    messages: list[ChatMessage] = Field(
        min_length=1, max_length=MAX_CHAT_MESSAGES, description="The chat so far, the oldest message first."
    )
    add_generation_prompt: bool | None = Field(
        default=None,
        description="Begin the assistant's turn; the default is to do so unless `continue_final_message`.",
    )
    continue_final_message: bool | None = Field(
        default=None,
        description="Leave the last message open, for the model to continue.",
        json_schema_extra={"default": False},
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        default=None, description="Variables of the model's chat template."
    )
    max_completion_tokens: int | None = parameter(
        "max_tokens", description="OpenAI's newer name of `max_tokens`."
    )
    logprobs: bool | None = parameter("logprobs")
    top_logprobs: int | None = parameter("top_logprobs", ge=0, le=MAX_TOP_LOGPROBS)
    separate_reasoning: bool | None = Field(    # SGLang's
        default=None,
        description="Return reasoning as `reasoning_content`; false leaves it in the content.",
        json_schema_extra={"default": True},
    )

    def names(self) -> dict[str, str]:
        """See `GenerationBody`."""
        return super().names() | {
            "prompt": "messages",
            "max_tokens": "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens",
        }

    def params(self) -> SamplingParams:
        """See `GenerationBody`."""
        newer = self.max_completion_tokens
        return self.sampling(
            max_tokens=self.max_tokens if newer is None else newer,
            logprobs=bool(self.logprobs),
            top_logprobs=self.top_logprobs or 0,
        )

    def prompts(self) -> list[Chat]:
        """See `GenerationBody`; there is one prompt."""
        for index, message in enumerate(self.messages):
            for name, value in (message.model_extra or {}).items():
                if value not in (None, [], {}):
                    field = f"messages[{index}].{name}"
                    raise InvalidRequest(f"{field} is not supported", field=field)
        messages = [
            {
                "role": "system" if message.role == "developer" else message.role,
                "content": message.text(),
                "reasoning_content": message.reasoning_content or "",
            }
            for message in self.messages
        ]
        chat = Chat(
            messages=read_messages(messages),
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=bool(self.continue_final_message),
            template_kwargs=self.chat_template_kwargs or {},
        )
        return [chat]


@router.post("/chat/completions")
async def chat_completions(body: ChatBody, services: SharedServices, request: Request) -> Response:
    """Answer a chat, whole or as server-sent events."""
    return await handle_generation(body, services, request, frames=ChatFrames, answer=_answer)


@router.get("/models")
async def models(services: SharedServices) -> dict[str, Any]:
    """List the models that generate text."""
    return {"object": "list", "data": [_model(model) for model in services.repository.text_models]}


@router.get("/models/{name:path}")
async def model(name: str, services: SharedServices) -> dict[str, Any]:
    """Describe one model."""
    return _model(services.repository.text_model(name))


class ChatFrames(OpenAIFrames):
    """The chunks of a streamed chat."""

    def __init__(self, submitted: SubmittedRequest, body: ChatBody) -> None:
        self._token_ids = bool(body.return_token_ids)
        self._prompt_ids = _prompt_ids(submitted, body)
        self._scores = [_scores(submitted, body) for _ in range(body.num_choices)]
        self._parsers = [_message_parser(submitted, body) for _ in range(body.num_choices)]
        super().__init__(submitted, body, kind="chat.completion.chunk", id_prefix="chatcmpl")

    def start(self) -> bytes:
        """See `Frames`."""
        role = '{"role": "assistant", "content": ""}'
        top_fields = "".join(f', "{name}": {ids}' for name, ids in self._prompt_ids.items())
        chunks = (self._chunk(choice, role, top_fields=top_fields) for choice in range(len(self._scores)))
        return b"".join(chunks)

    def delta(self, delta: Delta) -> bytes:
        """See `Frames`."""
        extra = f', "token_ids": {list(delta.token_ids)}' if self._token_ids else ""
        scores, chunks, logprobs = self._scores[delta.choice], b"", "null"
        if scores is not None:
            logprobs = json.dumps(_logprobs(scores, delta))
        parts = _message_parts(self._parsers[delta.choice], delta)
        for field, text in parts or ([("content", "")] if extra or scores is not None else []):
            added = f'{{"{field}": {json.dumps(text)}}}'
            chunks += self._chunk(delta.choice, added, logprobs=logprobs, extra=extra)
            logprobs, extra = "null", ""    # only in the first chunk of a delta
        if delta.finish_reason is not None:
            reason = FINISH_REASONS[delta.finish_reason]
            ending = f'"{reason}", "stop_reason": {json.dumps(delta.stop_reason)}'
            chunks += self._chunk(delta.choice, "{}", finish_reason=ending)
            chunks += self.ending(delta)
        return chunks

    def _chunk(
        self,
        choice: int,
        delta: str,
        *,
        logprobs: str = "null",
        finish_reason: str = "null",
        extra: str = "",
        top_fields: str = "",
    ) -> bytes:
        fields = f'"delta": {delta}, "logprobs": {logprobs}, "finish_reason": {finish_reason}{extra}'
        return self.chunk(choice, fields, top_fields=top_fields)


def _answer(submitted: SubmittedRequest, body: ChatBody, deltas: list[Delta]) -> Response:
    completions, usage = choose(body, deltas)
    choices = [_choice(index, completion, submitted, body) for index, completion in enumerate(completions)]
    answer = head(submitted, "chat.completion", id_prefix="chatcmpl") | {"choices": choices, "usage": usage}
    if body.prompt_logprobs is not None:
        scores = completions[0].prompt_logprobs
        answer["prompt_logprobs"] = prompt_logprobs(submitted.model.tokenizer, submitted.prompts[0], scores)
    return JSONResponse(answer | _prompt_ids(submitted, body))


def _prompt_ids(submitted: SubmittedRequest, body: ChatBody) -> dict[str, list[int]]:
    return {"prompt_token_ids": list(submitted.prompts[0])} if body.return_token_ids else {}


def _choice(
    index: int, completion: Completion, submitted: SubmittedRequest, body: ChatBody
) -> dict[str, Any]:
    scores = _scores(submitted, body)
    parts = _message_parts(_message_parser(submitted, body), completion)
    token_ids = {"token_ids": list(completion.token_ids)} if body.return_token_ids else {}
    return {
        "index": index,
        "message": {"role": "assistant", "content": "", **dict(parts)},
        "logprobs": None if scores is None else _logprobs(scores, completion),
        "finish_reason": FINISH_REASONS[completion.finish_reason],
        "stop_reason": completion.stop_reason,
        **token_ids,
    }


def _message_parser(submitted: SubmittedRequest, body: ChatBody) -> MessageParser | None:
    return None if body.separate_reasoning is False else submitted.message_parser()


def _message_parts(parser: MessageParser | None, part: Delta | Completion) -> list[tuple[str, str]]:
    """Return the text that a delta, or a whole answer, adds to each field of the message."""
    if parser is None:
        return [("content", part.text)] if part.text else []
    read = parser.push(part.text, last=part.finish_reason is not None)
    fields = (("reasoning_content", read.reasoning), ("content", read.content))
    return [(field, text) for field, text in fields if text]


def _scores(submitted: SubmittedRequest, body: ChatBody) -> TokenScores | None:
    by_id = bool(body.return_tokens_as_token_ids)
    return TokenScores(body.detokenizer(submitted.model.tokenizer), by_id=by_id) if body.logprobs else None


def _logprobs(scores: TokenScores, part: Delta | Completion) -> dict[str, Any]:
    entries = [
        _token(token.name, token.logprob) | {"top_logprobs": [_token(*one) for one in token.top]}
        for token in scores.answer(part)
    ]
    return {"content": entries, "refusal": None}


def _token(text: str, logprob: float | None) -> dict[str, Any]:
    spelled = None if text.startswith(ID_PREFIX) else list(text.encode())
    return {"token": text, "logprob": logprob, "bytes": spelled}


def _model(model: TextModel) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": int(model.loaded_s),
        "owned_by": "genserve",
        "max_model_len": model.max_length,
        **model.plugins.described(),
    }
