"""Vectors: what the routes for embeddings and rerankers share, from texts to the encoder's output.

All texts are tokenized, and their lengths checked, before the first is encoded. Each text is a request of its
own to the encoder, whose dynamic batching joins texts of all clients.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, cast

import numpy as np
import orjson
from fastapi import Request
from fastapi.responses import Response
from numpy.typing import NDArray

from genserve.backends.encoder import normalized
from genserve.config.model_config import ATTENTION_MASK
from genserve.errors import (
    ContextLengthExceeded,
    GenserveError,
    InferenceError,
    InvalidRequest,
    ModelFailed,
    ModelNotReady,
    Status,
)
from genserve.inference import Inference, InferenceRequest, InferenceResponse
from genserve.repository.encoder_model import EncoderModel
from genserve.request_context import current_request
from genserve.sampling.logits_array import FloatArray
from genserve.server.dialects.generation_handler import AnswerResponse
from genserve.server.error_formats import renamed
from genserve.server.http.offload import offload_if_large
from genserve.server.http.sse_response import while_connected
from genserve.server.services import Services
from genserve.tensor import Tensor
from genserve.text.tokenizer import Tokenizer

# The prompts of the uses that `input_type` names, the first that a model has. Source: encode_query and
# encode_document of sentence-transformers.
_PROMPTS = {"query": ("query",), "document": ("document", "passage", "corpus")}
MAX_TEXTS = 2048  # of one request: OpenAI's limit
_BATCHES_AHEAD = 2  # requests at the encoder, in batches, so that a long list leaves room for others

# The inputs of the encoder for one text, by the names of the tokenizer's outputs: [1, num_tokens].
Tokens: TypeAlias = Mapping[str, Tensor]
Text: TypeAlias = str | Sequence[int] | tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """The output of an encoder for some texts.

    Attributes:
        rows: [texts, size]: their vectors, or the scores of pairs.
        num_tokens: the tokens of each text, special tokens included.
    """

    rows: FloatArray
    num_tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedAnswer:
    """What an encoder has read for a request; a `LoggedAnswer`."""

    num_prompt_tokens: int
    num_cached_tokens: int = 0
    num_new_tokens: int = 0
    finish_reason: str | None = "stop"
    timings: None = None
    first_token_s: None = None
    last_token_s: None = None


def require_vectors(model: EncoderModel) -> EncoderModel:
    """Return a model that makes vectors of single texts; raises InvalidRequest for one that reads pairs."""
    if model.reads_pairs:
        raise InvalidRequest(
            f"model {model.name!r} computes scores of pairs of texts, and no vectors",
            field="model",
            remedy="send it to /v1/rerank or /v1/score",
        )
    return model


def prompt_of(model: EncoderModel, *, prompt_name: str | None = None, input_type: str | None = None) -> str:
    """Return what is written before a text.

    Args:
        model: the model, with prompts by the uses of vectors.
        prompt_name: the name of one of them; None: the request names none.
        input_type: "query" or "document", for whose texts not every model has a prompt; None: neither.

    Raises:
        InvalidRequest: the model has no such prompt.
    """
    if prompt_name is None:
        names = _PROMPTS.get(input_type or "", ())
        return next((model.prompts[name] for name in names if name in model.prompts), model.prompts[""])
    if not prompt_name or prompt_name not in model.prompts:
        known = ", ".join(filter(None, model.prompts))
        raise InvalidRequest(
            f"model {model.name!r} has no prompt {prompt_name[:128]!r}",
            field="prompt_name",
            remedy=f"use one of {known}" if known else "leave it out: the model has no prompts",
        )
    return model.prompts[prompt_name]


async def encode(
    model: EncoderModel,
    texts: Sequence[Text],
    services: Services,
    request: Request,
    *,
    truncate: bool = False,
    dimensions: int | None = None,
    field: str = "input",
) -> Encoded:
    """Return the vectors of texts, or the scores of pairs of texts.

    Args:
        model: the model, which reads pairs if `texts` are pairs.
        texts: texts, lists of token ids, or pairs of texts.
        services: the server's services.
        request: the request over HTTP, on whose end the work ends.
        truncate: leave out the ends of texts that are too long.
        dimensions: return only so many first numbers of each vector, scaled to the length 1; None: all.
        field: the field of the texts, for errors.

    Raises:
        InvalidRequest: there is no text or there are too many; one is too long, or has an unknown token id;
            the vectors have fewer dimensions.
        ClientLeft: the client has disconnected.
        ModelNotReady: the server is stopping.
        GenserveError: a step fails.
    """
    services.check_running()
    if not 0 < len(texts) <= MAX_TEXTS:
        remedy = f"send from 1 to {MAX_TEXTS:,}"
        raise InvalidRequest(f"{field} has {len(texts):,} texts", field=field, remedy=remedy)
    if dimensions is not None and model.size > 0:  # before the work
        _check_dimensions(dimensions, size=model.size)
    context = current_request()
    context.model, context.operation = model.name, "embeddings"
    running: set[Inference] = set()
    try:
        encoded = await while_connected(
            _encode(model, texts, services, truncate=truncate, field=field, running=running), request.receive
        )
    finally:
        for inference in running:
            inference.cancel()
    if dimensions is None:
        return encoded
    _check_dimensions(dimensions, size=encoded.rows.shape[1])
    return replace(encoded, rows=normalized(encoded.rows[:, :dimensions]))


async def _encode(
    model: EncoderModel,
    texts: Sequence[Text],
    services: Services,
    *,
    truncate: bool,
    field: str,
    running: set[Inference],
) -> Encoded:
    tokens = await _tokenized(model, texts, services, truncate=truncate, field=field, running=running)
    num_tokens = tuple(one[ATTENTION_MASK].shape[1] for one in tokens)
    context = current_request()
    context.answers = [*context.answers, *(EncodedAnswer(num_prompt_tokens=count) for count in num_tokens)]
    free = asyncio.Semaphore(_BATCHES_AHEAD * model.batch_size)

    async def encode_one(one: Tokens) -> NDArray[Any]:
        async with free:
            response = await _run(model.encode(one), services, running)
        output = response.output(model.output)
        assert output is not None
        row: NDArray[Any] = output.array[0]
        return row

    if len(tokens) == 1:
        rows = [await encode_one(tokens[0])]  # a task would cost more than its request
    else:
        tasks = [asyncio.ensure_future(encode_one(one)) for one in tokens]
        try:
            rows = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
    return Encoded(rows=np.stack(rows).astype(np.float32, copy=False), num_tokens=num_tokens)


async def _tokenized(
    model: EncoderModel,
    texts: Sequence[Text],
    services: Services,
    *,
    truncate: bool,
    field: str,
    running: set[Inference],
) -> list[Tokens]:
    if not isinstance(texts[0], str | tuple):
        vocab_size = _vocab_size(model, services)
        return [
            model.tokens_of(_checked(ids, model, vocab_size, truncate=truncate, field=f"{field}[{index}]"))
            for index, ids in enumerate(cast("Sequence[Sequence[int]]", texts))
        ]
    tokens: list[Tokens] = []
    given = cast("Sequence[str | tuple[str, str]]", texts)
    for start in range(0, len(given), model.batch_size):
        some = given[start : start + model.batch_size]
        asked = model.tokenize(
            [(text,) if isinstance(text, str) else text for text in some], truncate=truncate
        )
        try:
            response = await _run(asked, services, running)
        except ContextLengthExceeded as error:
            place = str(error.field)  # within this batch
            index = len(tokens) + int(place.removeprefix("input[").removesuffix("]"))
            raise renamed(error, {place: f"{field}[{index}]"}) from None
        tokens += _rows(response)
    return tokens


def _rows(response: InferenceResponse) -> Iterator[Tokens]:
    """Yield the tokens of each text, without the padding of the tokenizer."""
    mask = response.output(ATTENTION_MASK)
    assert mask is not None
    for row, length in enumerate(mask.array.sum(axis=1).tolist()):
        yield {
            tensor.name: Tensor(tensor.name, tensor.array[row : row + 1, :length])
            for tensor in response.outputs
        }


def _checked(
    ids: Sequence[int], model: EncoderModel, vocab_size: int, *, truncate: bool, field: str
) -> Sequence[int]:
    """Return the token ids of a text, truncated if the request asks for it; raises InvalidRequest."""
    if not ids:
        raise InvalidRequest(f"{field} is empty", field=field, remedy="give at least one token")
    for token_id in (min(ids), max(ids)):
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"{field} has the token id {token_id}, which the model does not have",
                field=field,
                remedy=f"its token ids are from 0 to {vocab_size - 1}",
            )
    limit = model.max_length
    if limit is None or len(ids) <= limit:
        return ids
    if truncate:
        return ids[:limit]
    raise ContextLengthExceeded(
        f"{field} has {len(ids)} tokens; the model reads {limit}",
        remedy="send shorter parts, or let the server truncate it",
        field=field,
        num_tokens=len(ids),
        max_length=limit,
    )


def _vocab_size(model: EncoderModel, services: Services) -> int:
    entry = services.repository.lifecycle.entries[model.tokenizer.model_name]
    return Tokenizer.from_folder(entry.latest_version()).vocab_size


async def _run(request: InferenceRequest, services: Services, running: set[Inference]) -> InferenceResponse:
    """Return the response to an inference.

    Raises:
        GenserveError: the model fails or rejects it.
    """
    answered: Future[InferenceResponse] = Future()

    def on_response(response: InferenceResponse | None, final: bool) -> None:  # noqa: FBT001 - OnResponse
        del final  # an encoder sends one response
        if not answered.done():
            answered.set_result(response or InferenceResponse())

    inference = Inference(request=request, on_response=on_response)
    running.add(inference)
    try:
        services.repository.submit(inference)
        response = await asyncio.wrap_future(answered)
    except InferenceError as error:
        raise _in_words_of_dialects(error) from error
    finally:
        running.discard(inference)
    if response.error is not None:
        raise _in_words_of_dialects(response.error)
    return response


def _in_words_of_dialects(error: GenserveError) -> GenserveError:
    """Return the error of a model as dialects write it: theirs have no codes of Triton."""
    if not isinstance(error, InferenceError):
        return error
    match error.status:
        case Status.INVALID_ARG:
            return InvalidRequest(error.message, remedy=error.remedy)
        case Status.UNAVAILABLE | Status.NOT_FOUND:
            return ModelNotReady(error.message, remedy=error.remedy or "try again in a moment")
        case _:
            return ModelFailed(error.message, remedy=error.remedy)


def _check_dimensions(dimensions: int, *, size: int) -> None:
    """Raise InvalidRequest if vectors of a size cannot be shortened to `dimensions`."""
    if not 1 <= dimensions <= size:
        raise InvalidRequest(
            f"dimensions is {dimensions}; the model's vectors have {size}",
            field="dimensions",
            remedy=f"give a number from 1 to {size}, or leave it out",
        )


class VectorsResponse(AnswerResponse):
    """A response whose document has numpy arrays."""

    def render(self, content: Any) -> bytes:
        """Return the JSON text; numbers are the shortest that are the same float32."""
        return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)


async def written(document: Any, vectors: FloatArray) -> Response:
    """Return a response with a document that has the vectors, written on a thread if they are many."""
    return await offload_if_large(vectors.nbytes, VectorsResponse, document)
