"""Rerank: `/v1/rerank` and `/v1/score`, as Jina, Cohere, vLLM and llama.cpp write them.

A reranker (cross-encoder) reads a query and a document together, and computes a score. With a model of
vectors the score is the cosine of the two vectors.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Literal

import numpy as np
from fastapi import Request
from fastapi.responses import Response
from pydantic import ConfigDict, Field

from genserve.backends.encoder import normalized
from genserve.errors import InvalidRequest
from genserve.sampling.logits_array import FloatArray
from genserve.server.access.access_control import INFERENCE
from genserve.server.dialects.generation_handler import AnswerResponse
from genserve.server.dialects.vectors import MAX_TEXTS, encode, prompt_of
from genserve.server.error_formats import OPENAI_ERRORS
from genserve.server.http.request_body import Items, TolerantBody
from genserve.server.route import Router, rules
from genserve.server.services import Services, SharedServices

router = Router(tag="Rerank", errors=OPENAI_ERRORS)


class Document(TolerantBody):
    """A document with fields, of which the text is read."""

    text: str = Field(description="The text.")


class _ModelBody(TolerantBody):
    model: str | None = Field(
        default=None, description="The name of a model; not needed if there is only one of vectors or scores."
    )
    truncate_prompt_tokens: Literal[-1] | None = Field(
        default=None, description="vLLM's: -1 truncates what is too long."
    )
    truncate: bool | None = Field(
        default=None,
        description="Jina's: truncate what is too long, instead of rejecting it.",
        json_schema_extra={"default": False},
    )

    @property
    def truncates(self) -> bool:
        """Whether documents that are too long are truncated."""
        return bool(self.truncate) or self.truncate_prompt_tokens is not None


class RerankBody(_ModelBody):
    """Body of `POST /v1/rerank`."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"query": "What is a sea?", "documents": ["Salt water.", "A mountain."]}]
        }
    )

    query: str = Field(description="The query.")
    documents: Items[str | Document] = Field(description="The documents, as texts or with a field `text`.")
    top_n: int | None = Field(default=None, ge=1, description="Only so many of the best documents.")
    return_documents: bool | None = Field(
        default=None,
        description="The results have the texts of the documents.",
        json_schema_extra={"default": True},
    )


class ScoreBody(_ModelBody):
    """Body of `POST /v1/score`."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"text_1": "What is a sea?", "text_2": ["Salt water."]}]}
    )

    text_1: str | Items[str] = Field(
        description="A text, which is paired with each of the others; or as many as there are of the others."
    )
    text_2: str | Items[str] = Field(description="A text or a list of texts.")


@router.post("/v1/rerank")
@router.post("/rerank", include_in_schema=False)
@router.post("/v1/reranking", include_in_schema=False)     # llama.cpp's
@router.post("/reranking", include_in_schema=False)
@rules(INFERENCE)
async def rerank(body: RerankBody, services: SharedServices, request: Request) -> Response:
    """Return the documents with their scores for a query, the best first."""
    texts = [one if isinstance(one, str) else one.text for one in body.documents]
    name, scores, num_tokens = await _scores(
        body,
        [body.query],
        texts,
        services,
        request,
        fields=("query", "documents"),
        input_types=("query", "document"),
    )
    best = np.argsort(-scores, kind="stable")[: body.top_n].tolist()
    shows = body.return_documents is not False
    return AnswerResponse(
        {
            "id": f"rerank-{uuid.uuid4().hex}",
            "object": "list",
            "model": name,
            "results": [
                {
                    "index": index,
                    **({"document": {"text": texts[index]}} if shows else {}),
                    "relevance_score": float(scores[index]),
                }
                for index in best
            ],
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }
    )


@router.post("/v1/score")
@router.post("/score", include_in_schema=False)
@rules(INFERENCE)
async def score(body: ScoreBody, services: SharedServices, request: Request) -> Response:
    """Return the scores of pairs of texts, in their order."""
    first = [body.text_1] if isinstance(body.text_1, str) else body.text_1
    second = [body.text_2] if isinstance(body.text_2, str) else body.text_2
    if len(first) not in (1, len(second)):
        raise InvalidRequest(
            f"text_1 has {len(first)} texts, and text_2 {len(second)}",
            field="text_1",
            remedy="send one text, or as many as text_2 has",
        )
    name, scores, num_tokens = await _scores(
        body, first, second, services, request, fields=("text_1", "text_2")
    )
    return AnswerResponse(
        {
            "id": f"score-{uuid.uuid4().hex}",
            "object": "list",
            "created": int(time.time()),
            "model": name,
            "data": [
                {"index": index, "object": "score", "score": value}
                for index, value in enumerate(scores.tolist())
            ],
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }
    )


async def _scores(
    body: _ModelBody,
    first: Sequence[str],
    second: Sequence[str],
    services: Services,
    request: Request,
    *,
    fields: tuple[str, str],
    input_types: tuple[str | None, str | None] = (None, None),
) -> tuple[str, FloatArray, int]:
    """Return the name of the model, the scores [pairs], and the number of tokens of all texts.

    Args:
        body: the request.
        first: the first text of each pair, or one for all.
        second: the second text of each pair.
        services: the server's services.
        request: the request over HTTP.
        fields: the fields of the texts, for errors.
        input_types: their uses, for which a model of vectors may have prompts.

    Raises:
        InvalidRequest: a model of classes has no single score; otherwise see `encode`.
    """
    model = await services.encoder_model(body.model)
    if not 0 < len(second) <= MAX_TEXTS:
        raise InvalidRequest(
            f"{fields[1]} has {len(second):,} texts", field=fields[1], remedy=f"send from 1 to {MAX_TEXTS:,}"
        )
    if model.reads_pairs:
        pairs = [*zip(first if len(first) > 1 else [*first] * len(second), second, strict=True)]
        encoded = await encode(model, pairs, services, request, truncate=body.truncates, field=fields[1])
        if encoded.rows.shape[1:] != (1,):
            raise InvalidRequest(
                f"model {model.name!r} computes {encoded.rows.shape[1]} numbers for a pair, not one score",
                field="model",
                remedy="ask a reranker, whose graph has one output for a pair",
            )
        return model.name, encoded.rows[:, 0], sum(encoded.num_tokens)
    vectors: list[FloatArray] = []
    num_tokens = 0
    for texts, field, input_type in zip((first, second), fields, input_types, strict=True):
        prompt = prompt_of(model, input_type=input_type)
        prompted = [prompt + text for text in texts]
        encoded = await encode(model, prompted, services, request, truncate=body.truncates, field=field)
        vectors.append(normalized(encoded.rows))
        num_tokens += sum(encoded.num_tokens)
    return model.name, np.vecdot(*vectors), num_tokens
