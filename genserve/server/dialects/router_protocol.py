"""Router protocol: what vllm-router, sglang-router and llm-d ask of a server, besides health and metrics.

- vllm-router, and the token producer of llm-d: `/v1/.../render`, the token ids of a prompt, as in vLLM
- sglang-router: `/server_info` and `/model_info`, by which it knows the model of a worker
- sglang-router with the policy power_of_two: `/get_load`
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any
from uuid import uuid4

from fastapi.responses import Response

from genserve.server.access.access_control import INFERENCE, METADATA
from genserve.server.dialects.generation_handler import AnswerResponse
from genserve.server.dialects.openai.chat_body import ChatBody
from genserve.server.dialects.openai.completions import CompletionBody
from genserve.server.error_formats import OPENAI_ERRORS, named_as
from genserve.server.route import Router, rules
from genserve.server.services import Services, SharedServices
from genserve.textmodel.text_model import TextModel
from genserve.version import __version__

router = Router(tag="Routers", errors=OPENAI_ERRORS)


@router.post("/v1/chat/completions/render")
@rules(INFERENCE)
async def render_chat(body: ChatBody, services: SharedServices) -> Response:
    """Return the token ids of a chat's prompt, before any truncation, as vLLM's `GenerateRequest`."""
    [rendered] = await _render(body, services, id_prefix="chatcmpl")
    return AnswerResponse(rendered)


@router.post("/v1/completions/render")
@rules(INFERENCE)
async def render_completion(body: CompletionBody, services: SharedServices) -> Response:
    """Return the token ids of each prompt, before any truncation, as vLLM's `GenerateRequest`."""
    return AnswerResponse(await _render(body, services, id_prefix="cmpl"))


@router.get("/model_info")
@router.get("/get_model_info", include_in_schema=False)  # the name in older versions of sglang-router
@rules(METADATA)
async def model_info(services: SharedServices) -> dict[str, Any]:
    """Describe the text model, with SGLang's fields; nulls if there are several."""
    model = _only_model(services)
    return {
        "model_path": model.name if model else None,
        "tokenizer_path": None,  # a folder of this machine
        "is_generation": True,
        "preferred_sampling_params": dict(model.default_sampling_params) if model else None,
        "model_type": None,
        "architectures": None,
    }


@router.get("/server_info")
@router.get("/get_server_info", include_in_schema=False)
@rules(METADATA)
async def server_info(services: SharedServices) -> dict[str, Any]:
    """Describe the server, with SGLang's fields; nulls if there are several text models."""
    model = _only_model(services)
    return {
        "model_path": None,  # from which sglang-router would download a tokenizer
        "served_model_name": model.name if model else None,
        "version": __version__,
        "tp_size": 1,
        "dp_size": 1,
        "context_length": model.max_length if model else None,
        "max_running_requests": model.max_num_seqs if model else None,
        "max_total_tokens": _cached_tokens(model) if model else None,
    }


@router.get("/get_load")
@rules(METADATA)
async def load(services: SharedServices) -> list[dict[str, int]]:
    """Return the load of each text model, with SGLang's fields; `num_tokens` are cached and waiting ones."""
    return [_load(model, rank=rank) for rank, model in enumerate(services.repository.text_models)]


async def _render(
    body: ChatBody | CompletionBody, services: Services, *, id_prefix: str
) -> list[dict[str, Any]]:
    body.check()
    model = await services.text_model(body.model_name)
    with named_as(body.names):
        params, prompts = body.params(), body.prompts()  # validated, since the request is generated next
        encode = partial(model.encode, add_special_tokens=params.add_special_tokens)
        future = model.run_soon(lambda: [*map(encode, prompts)], compiles=False)
        token_ids = await asyncio.wrap_future(future)
    return [
        {
            "request_id": f"{id_prefix}-{uuid4().hex}",
            "model": model.name,
            "token_ids": list(ids),
            "features": None,  # images and audio would have some
            "stream": bool(body.stream),
        }
        for ids in token_ids
    ]


def _only_model(services: Services) -> TextModel | None:
    """Return the only text model; None: there are several, and a worker has one name for a router."""
    models = services.repository.text_models
    return models[0] if len(models) == 1 else None


def _load(model: TextModel, *, rank: int) -> dict[str, int]:
    engine, waiting = model.engine, model.num_waiting
    return {
        "dp_rank": rank,
        "num_reqs": engine.num_running + waiting,
        "num_waiting_reqs": waiting,
        "num_tokens": round(engine.cache_usage * _cached_tokens(model)) + engine.num_waiting_tokens,
    }


def _cached_tokens(model: TextModel) -> int:
    """Return how many tokens fit into the KV cache."""
    return model.logits.num_blocks * model.logits.block_size
