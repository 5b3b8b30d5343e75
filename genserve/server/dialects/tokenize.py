"""Tokenize: text to token ids and back, as vLLM, llama.cpp and TGI write it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from fastapi.responses import Response
from pydantic import ConfigDict, Field

from genserve.errors import InvalidRequest
from genserve.prompt import MAX_CHAT_MESSAGES, MAX_TOOLS, Chat
from genserve.server.access.access_control import INFERENCE, METADATA
from genserve.server.dialects.generation_handler import AnswerResponse
from genserve.server.dialects.openai.chat_body import ChatMessage, chat_messages
from genserve.server.dialects.openai.chat_tools import ChatToolOffer, ChatTools
from genserve.server.error_formats import OPENAI_ERRORS
from genserve.server.http.request_body import Items, TolerantBody
from genserve.server.route import Router, rules
from genserve.server.services import SharedServices
from genserve.text.tokenizer import Tokenizer
from genserve.textmodel.text_model import TextModel

router = Router(tag="Tokens", errors=OPENAI_ERRORS)

T = TypeVar("T")

_TEXTS = ("prompt", "messages", "content", "inputs")
# Keys of tokenizer_config.json that name files of the machine where the model was made.
_PATHS = frozenset(
    {
        "_name_or_path",
        "merges_file",
        "name_or_path",
        "special_tokens_map_file",
        "tokenizer_file",
        "vocab_file",
    }
)


class TokenizeBody(TolerantBody):
    """Body of `POST /tokenize`: the text, under the name of one of the APIs."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"prompt": "What is the capital of Japan?"}]})

    model: str | None = Field(
        default=None, description="The name of a model; not needed if there is only one."
    )
    prompt: str | None = Field(default=None, description="vLLM's: the text.")
    messages: Items[ChatMessage] | None = Field(
        default=None, max_length=MAX_CHAT_MESSAGES, description="vLLM's: a chat, which the template renders."
    )
    content: str | None = Field(default=None, description="llama.cpp's: the text.")
    inputs: str | None = Field(default=None, description="TGI's: the text.")
    add_special_tokens: bool | None = Field(
        default=None,
        description="Begin with the token that begins every text; by default a `prompt` and `inputs` do.",
    )
    return_token_strs: bool | None = Field(
        default=None,
        description="With `prompt` or `messages`: the names of the tokens, too.",
        json_schema_extra={"default": False},
    )
    tools: ChatTools | None = Field(
        default=None, max_length=MAX_TOOLS, description="With `messages`: the functions of the chat."
    )
    add_generation_prompt: bool | None = Field(
        default=None,
        description="With `messages`: begin the assistant's turn; the default is to do so unless "
        "`continue_final_message`.",
    )
    continue_final_message: bool | None = Field(
        default=None,
        description="With `messages`: leave the last message open.",
        json_schema_extra={"default": False},
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        default=None, description="With `messages`: variables of the model's chat template."
    )
    add_special: bool | None = Field(
        default=None,
        description="With `content`: begin with the token that begins every text.",
        json_schema_extra={"default": False},
    )
    parse_special: bool | None = Field(
        default=None,
        description="With `content`: the names of special tokens are these tokens, not text.",
        json_schema_extra={"default": True},
    )
    with_pieces: bool | None = Field(
        default=None,
        description="With `content`: the text of each token, too.",
        json_schema_extra={"default": False},
    )

    def chat(self) -> Chat:
        """Return the chat; raises InvalidRequest."""
        return Chat(
            messages=chat_messages(self.messages or ()),
            tools=tuple(ChatToolOffer(self.tools or ()).tools),
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=bool(self.continue_final_message),
            template_kwargs=self.chat_template_kwargs or {},
        )


class DetokenizeBody(TolerantBody):
    """Body of `POST /detokenize`."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"tokens": [1, 2, 3]}]})

    model: str | None = Field(
        default=None, description="The name of a model; not needed if there is only one."
    )
    tokens: Items[int] = Field(description="The token ids.")
    skip_special_tokens: bool | None = Field(
        default=None,
        description="SGLang's: without the names of special tokens.",
        json_schema_extra={"default": False},
    )


@router.post("/tokenize")
@rules(INFERENCE)
async def tokenize(body: TokenizeBody, services: SharedServices) -> Response:
    """Return the token ids of a text or a chat, in the form of the API that has the name of its field."""
    given = [name for name in _TEXTS if getattr(body, name) is not None]
    if len(given) != 1:
        raise InvalidRequest(f"exactly one of {', '.join(_TEXTS)} must be given", field=(given or _TEXTS)[0])
    model = await services.text_model(body.model)
    answer = {"content": _of_llama_cpp, "inputs": _of_tgi}.get(given[0], _of_vllm)
    return await _run(model, lambda: AnswerResponse(answer(body, model)))


@router.post("/detokenize")
@rules(INFERENCE)
async def detokenize(body: DetokenizeBody, services: SharedServices) -> dict[str, str]:
    """Return the text of token ids, as vLLM's `prompt` and as llama.cpp's `content`."""
    model = await services.text_model(body.model)
    skip = bool(body.skip_special_tokens)
    text = await _run(model, lambda: model.decode(body.tokens, skip_special_tokens=skip))
    return {"prompt": text, "content": text}


@router.get("/tokenizer_info")
@rules(METADATA)
async def tokenizer_info(services: SharedServices, model: str | None = None) -> dict[str, Any]:
    """Return the tokenizer's configuration, and the chat template."""
    tokenizer = (await services.text_model(model)).tokenizer
    template = tokenizer.chat_template
    config = {name: value for name, value in tokenizer.config.items() if name not in _PATHS}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **config,
        "chat_template": template.source if template else None,
    }


async def _run(model: TextModel, work: Callable[[], T]) -> T:
    """Do what takes time in proportion to a text on a thread of the model."""
    return await asyncio.wrap_future(model.run_soon(work, compiles=False))


def _of_vllm(body: TokenizeBody, model: TextModel) -> dict[str, Any]:
    tokenizer = model.tokenizer
    prompt = body.chat() if body.prompt is None else body.prompt
    ids = model.encode(prompt, add_special_tokens=body.add_special_tokens)
    names = {"token_strs": [tokenizer.token(token_id) for token_id in ids]} if body.return_token_strs else {}
    return {"count": len(ids), "max_model_len": model.max_length, "tokens": list(ids), **names}


def _of_llama_cpp(body: TokenizeBody, model: TextModel) -> dict[str, Any]:
    tokenizer, text = model.tokenizer, body.content or ""
    if body.parse_special is False:
        begin = [] if tokenizer.bos_id is None or not body.add_special else [tokenizer.bos_id]
        ids = [*begin, *tokenizer.encode_plain(text)]
    else:
        ids = tokenizer.encode(text, add_special_tokens=bool(body.add_special))
    return {"tokens": _pieces(ids, tokenizer) if body.with_pieces else ids}


def _pieces(ids: Sequence[int], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Return the tokens with the texts that they add; with the bytes of a part of a character."""
    detokenizer = tokenizer.detokenizer(skip_special_tokens=False)
    pieces: list[dict[str, Any]] = []
    for token_id in ids:
        spelled = detokenizer.spell(token_id)
        detokenizer.push(token_id)
        try:
            pieces.append({"id": token_id, "piece": spelled.decode()})
        except UnicodeDecodeError:
            pieces.append({"id": token_id, "piece": [*spelled]})
    return pieces


def _of_tgi(body: TokenizeBody, model: TextModel) -> list[dict[str, Any]]:
    text = body.inputs or ""
    spans = model.tokenizer.encode_spans(text, add_special_tokens=body.add_special_tokens is not False)
    return [
        {"id": token_id, "text": text[start:stop], "start": start, "stop": stop}
        for token_id, start, stop in spans
    ]
