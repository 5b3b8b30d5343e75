"""API calls: for each method of the clients, the request to send and a reader of the reply; no I/O."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from genserve.client import openai_dialect, tgi_dialect
from genserve.client.reply_errors import unknown_reply
from genserve.client.sse_decoder import DeltaDecoder
from genserve.completion import Completion
from genserve.errors import InvalidRequest
from genserve.prompt import Chat, Messages, Prompts, read_chat, read_prompt, read_prompts
from genserve.sampling.sampling_options import SamplingOptions
from genserve.sampling.sampling_params import SamplingParams, sampling_params

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """A model, as its server describes it."""

    max_length: int | None      # the context length in tokens; None: the server does not report it
    default_sampling_params: SamplingOptions    # the options that the model recommends


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The answer to a typed question; see `Client.decide`.

    Attributes:
        value: the likeliest option of a choice, the probability of yes of a noul, or the expected level of
            a score, a number between the levels.
        probabilities: by option; a noul has "true" and "false", a score "0", "1" and so on.
        confidence: how far the probabilities of a choice or a score are from chance, 0 to 1; None: a noul.
        calibrated: whether `genserve calibrate` has fitted `temperature`, by which log-probabilities are
            divided.
        temperature: 1 without a calibration.
    """

    value: str | float
    probabilities: Mapping[str, float]
    confidence: float | None
    calibrated: bool
    temperature: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiRequest:
    """An HTTP request of the API."""

    method: Literal["GET", "POST"]
    path: str                   # begins with /
    body: bytes = b""           # JSON, or empty


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiCall(Generic[Answer]):
    """A request, and a function that reads the reply from headers (names in lower case) and body."""

    request: ApiRequest
    read: Callable[[Mapping[str, str], bytes], Answer]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamingApiCall:
    """A request with a streamed reply; `decoder` returns a new decoder of its bytes."""

    request: ApiRequest
    decoder: Callable[[], DeltaDecoder]


def generate(prompt: str, *, model: str | None, options: Mapping[str, Any]) -> ApiCall[Completion]:
    """Complete a prompt.

    Raises:
        InvalidRequest: an option is unknown or out of range.
    """
    params = _generate_params(options)
    body = tgi_dialect.request_body(read_prompt(prompt), model=model, params=params)

    def read(headers: Mapping[str, str], reply: bytes) -> Completion:
        with unknown_reply():
            return tgi_dialect.read_completion(
                json.loads(reply),
                prompt_tokens=int(headers["x-prompt-tokens"]),
                cached_tokens=int(headers.get("x-cached-tokens", 0)),
                params=params,
            )

    return ApiCall(request=_post("/generate", body), read=read)


def generate_stream(prompt: str, *, model: str | None, options: Mapping[str, Any]) -> StreamingApiCall:
    """Complete a prompt, delta by delta. Raises the errors of `generate`."""
    params = _generate_params(options)
    body = tgi_dialect.request_body(read_prompt(prompt), model=model, params=params)
    return StreamingApiCall(
        request=_post("/generate_stream", body),
        decoder=lambda: DeltaDecoder(tgi_dialect.GenerateEvents(params)),
    )


def chat(chat: Chat, *, model: str | None, options: Mapping[str, Any]) -> ApiCall[Completion]:
    """Answer a chat.

    Raises:
        InvalidRequest: an option is unknown or out of range.
    """
    params, body = _chat_body(chat, model=model, options=options)

    def read(headers: Mapping[str, str], reply: bytes) -> Completion:
        with unknown_reply():
            return openai_dialect.read_completion(json.loads(reply), params=params)

    return ApiCall(request=_post("/v1/chat/completions", body), read=read)


def chat_stream(
    chat: Chat, *, model: str | None, return_progress: bool, options: Mapping[str, Any]
) -> StreamingApiCall:
    """Answer a chat, delta by delta. Raises the errors of `chat`."""
    params, body = _chat_body(chat, model=model, options=options)
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    body |= {"return_progress": True} if return_progress else {}
    return StreamingApiCall(
        request=_post("/v1/chat/completions", body),
        decoder=lambda: DeltaDecoder(openai_dialect.ChatChunks(params)),
    )


def complete(
    prompts: Prompts, *, n: int, model: str | None, options: Mapping[str, Any]
) -> ApiCall[tuple[Completion, ...]]:
    """Complete prompts, `n` times each.

    Raises:
        InvalidRequest: a prompt is not valid, or an option is unknown or out of range.
    """
    params = sampling_params(options)
    body = openai_dialect.completions_body(read_prompts(prompts), n=n, model=model, params=params)

    def read(headers: Mapping[str, str], reply: bytes) -> tuple[Completion, ...]:
        with unknown_reply():
            return openai_dialect.read_completions(json.loads(reply), params=params)

    return ApiCall(request=_post("/v1/completions", body), read=read)


def tokenize(
    prompt: Messages, *, model: str | None, add_special_tokens: bool
) -> ApiCall[tuple[int, ...]]:
    """Return the token ids of a text or of a chat.

    Raises:
        InvalidRequest: a message is not valid.
    """
    body: dict[str, Any] = {} if model is None else {"model": model}
    if isinstance(prompt, str):
        body |= {"prompt": prompt, "add_special_tokens": add_special_tokens}
    else:
        body |= openai_dialect.template_body(read_chat(prompt))

    def read(headers: Mapping[str, str], reply: bytes) -> tuple[int, ...]:
        with unknown_reply():
            return tuple(map(int, json.loads(reply)["tokens"]))

    return ApiCall(request=_post("/tokenize", body), read=read)


def detokenize(
    token_ids: Sequence[int], *, model: str | None, skip_special_tokens: bool
) -> ApiCall[str]:
    """Return the text of token ids."""
    body = {"tokens": list(token_ids), "skip_special_tokens": skip_special_tokens}

    def read(headers: Mapping[str, str], reply: bytes) -> str:
        with unknown_reply():
            return str(json.loads(reply)["prompt"])

    return ApiCall(request=_post("/detokenize", body | ({"model": model} if model else {})), read=read)


def embed(
    texts: str | Sequence[str], *, model: str | None, dimensions: int | None, prompt_name: str | None
) -> ApiCall[tuple[tuple[float, ...], ...]]:
    """Return the vectors of texts."""
    body: dict[str, Any] = {"input": [texts] if isinstance(texts, str) else list(texts)}
    body |= {"dimensions": dimensions} if dimensions is not None else {}
    body |= {"prompt_name": prompt_name} if prompt_name is not None else {}

    def read(headers: Mapping[str, str], reply: bytes) -> tuple[tuple[float, ...], ...]:
        with unknown_reply():
            return tuple(tuple(map(float, item["embedding"])) for item in json.loads(reply)["data"])

    return ApiCall(request=_post("/v1/embeddings", body | ({"model": model} if model else {})), read=read)


def score(query: str, texts: str | Sequence[str], *, model: str | None) -> ApiCall[tuple[float, ...]]:
    """Return the scores of texts for a query."""
    body = {"text_1": query, "text_2": [texts] if isinstance(texts, str) else list(texts)}

    def read(headers: Mapping[str, str], reply: bytes) -> tuple[float, ...]:
        with unknown_reply():
            return tuple(float(item["score"]) for item in json.loads(reply)["data"])

    return ApiCall(request=_post("/v1/score", body | ({"model": model} if model else {})), read=read)


def rerank(
    query: str, documents: Sequence[str], *, model: str | None, top_n: int | None
) -> ApiCall[tuple[tuple[int, float], ...]]:
    """Return the index and the score of documents for a query, the best first."""
    body: dict[str, Any] = {"query": query, "documents": list(documents), "return_documents": False}
    body |= {"top_n": top_n} if top_n is not None else {}

    def read(headers: Mapping[str, str], reply: bytes) -> tuple[tuple[int, float], ...]:
        with unknown_reply():
            results = json.loads(reply)["results"]
            return tuple((int(item["index"]), float(item["relevance_score"])) for item in results)

    return ApiCall(request=_post("/v1/rerank", body | ({"model": model} if model else {})), read=read)


def decide(
    state: Any, questions: Mapping[str, Mapping[str, Any]], *, model: str | None, instructions: str | None
) -> ApiCall[dict[str, Decision]]:
    """Answer typed questions about a state."""
    body = {"state": state, "questions": {name: dict(question) for name, question in questions.items()}}
    body |= {"instructions": instructions} if instructions else {}

    def read(headers: Mapping[str, str], reply: bytes) -> dict[str, Decision]:
        with unknown_reply():
            return {name: _decision(answer) for name, answer in json.loads(reply)["answers"].items()}

    return ApiCall(request=_post("/v1/systemone", body | ({"model": model} if model else {})), read=read)


def _decision(answer: Mapping[str, Any]) -> Decision:
    value, confidence = answer[answer["type"]], answer.get("confidence")
    is_noul = answer["type"] == "noul"
    found = {"true": value, "false": 1 - value} if is_noul else answer["probabilities"]
    return Decision(
        value=str(value) if answer["type"] == "choice" else float(value),
        probabilities={str(name): float(one) for name, one in found.items()},
        confidence=None if confidence is None else float(confidence),
        calibrated=bool(answer["calibrated"]),
        temperature=float(answer["temperature"]),
    )


def model_cards() -> ApiCall[dict[str, ModelCard]]:
    """List the models that generate text."""

    def read(headers: Mapping[str, str], reply: bytes) -> dict[str, ModelCard]:
        with unknown_reply():
            rows = json.loads(reply)["data"]
            # Other servers do not say what a model does.
            return {
                str(row["id"]): _model_card(row)
                for row in rows
                if "completion" in row.get("capabilities", ("completion",))
            }

    return ApiCall(request=ApiRequest(method="GET", path="/v1/models"), read=read)


def _model_card(row: Mapping[str, Any]) -> ModelCard:
    max_length = row.get("max_model_len")
    return ModelCard(
        max_length=None if max_length is None else int(max_length),
        default_sampling_params=row.get("default_sampling_params", {}),
    )


def _chat_body(
    chat: Chat, *, model: str | None, options: Mapping[str, Any]
) -> tuple[SamplingParams, dict[str, Any]]:
    params = sampling_params(options)
    return params, openai_dialect.chat_body(chat, model=model, params=params)


def _generate_params(options: Mapping[str, Any]) -> SamplingParams:
    """Validate the options; rejects two options for which TGI's replies have no field."""
    params = sampling_params(options)
    for name, is_set in (
        ("logprob_token_ids", bool(params.logprob_token_ids)),
        ("prompt_logprobs", params.prompt_logprobs is not None),
    ):
        if is_set:
            raise InvalidRequest(
                f"{name} is not supported by generate", field=name, remedy="use complete, or LLM"
            )
    return params


def _post(path: str, body: Mapping[str, Any]) -> ApiRequest:
    return ApiRequest(method="POST", path=path, body=json.dumps(body).encode())
