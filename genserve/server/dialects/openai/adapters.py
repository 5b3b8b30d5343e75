"""vLLM's `/v1/load_lora_adapter` and `/v1/unload_lora_adapter`: adapters from any folder of this machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fastapi.responses import PlainTextResponse
from pydantic import Field

from genserve.errors import InferenceError, InvalidRequest, ModelNotFound, ModelNotReady, Status
from genserve.repository.served_models import ServedModels
from genserve.request_context import current_request
from genserve.server.access.access_control import Rights
from genserve.server.error_formats import OPENAI_ERRORS
from genserve.server.http.offload import run_for_long
from genserve.server.http.request_body import TolerantBody
from genserve.server.route import Router, rules
from genserve.server.services import SharedServices
from genserve.textmodel.peft_adapter import CONFIG, WEIGHTS

router = Router(prefix="/v1", tag="OpenAI", errors=OPENAI_ERRORS)
_CHANGE = Rights(part="model-repository", controls=True)


class LoadAdapterBody(TolerantBody):
    """Body of `POST /v1/load_lora_adapter`."""

    lora_name: str = Field(min_length=1, description="The name by which requests name the adapter.")
    lora_path: str = Field(
        min_length=1, description="A folder of PEFT on the server's machine."
    )
    load_inplace: bool = Field(default=False, description="Replace a loaded adapter of this name.")
    base_model_name: str | None = Field(
        default=None, description="The model that it is for; not needed if there is only one."
    )


class UnloadAdapterBody(TolerantBody):
    """Body of `POST /v1/unload_lora_adapter`."""

    lora_name: str = Field(min_length=1, description="The name of the adapter.")


@router.post("/load_lora_adapter", response_class=PlainTextResponse)
@rules(_CHANGE)
async def load_lora_adapter(body: LoadAdapterBody, services: SharedServices) -> PlainTextResponse:
    """Load an adapter, which stays until it is unloaded or the server stops."""
    current_request().change = f"adapter {body.lora_name}"
    repository = services.repository
    served = repository.table.get(body.lora_name)
    if served is not None and not (body.load_inplace and served.config.base_model):
        problem = "has already been loaded" if served.config.base_model else "has the name of a model"
        raise InvalidRequest(
            f"the adapter {body.lora_name[:128]!r} {problem}",
            field="lora_name",
            remedy="set load_inplace to replace it" if served.config.base_model else "take another name",
        )
    with _load_errors():
        await run_for_long(_load, repository, body)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post("/unload_lora_adapter", response_class=PlainTextResponse)
@rules(_CHANGE)
async def unload_lora_adapter(body: UnloadAdapterBody, services: SharedServices) -> PlainTextResponse:
    """Unload an adapter; requests that it answers go on."""
    current_request().change = f"adapter {body.lora_name}"
    served = services.repository.table.get(body.lora_name)
    if served is None or served.config.base_model is None:
        known = ", ".join(model.name for model in services.repository.adapter_models) or "none"
        raise ModelNotFound(
            f"the adapter {body.lora_name[:128]!r} is not loaded",
            field="lora_name",
            remedy=f"adapters that are: {known}",
        )
    with _load_errors():
        await run_for_long(services.repository.unload, body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _load(repository: ServedModels, body: LoadAdapterBody) -> None:
    files = {f"1/{name}": Path(body.lora_path) / name for name in (CONFIG, WEIGHTS)}
    if missing := [file.name for file in files.values() if not _is_file(file)]:
        raise ModelNotFound(
            f"there is no adapter at {body.lora_path[:256]!r}: {missing[0]} is missing, or cannot be read",
            field="lora_path",
            remedy="give a folder of PEFT on the machine of the server",
        )
    base = body.base_model_name or repository.only_text_model_name()
    config = {"backend": "adapter", "parameters": {"base_model": {"string_value": base}}}
    repository.load(body.lora_name, config=json.dumps(config), files=files)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:     # the path is too long, or leads through a folder that this user may not read
        return False


@contextmanager
def _load_errors() -> Iterator[None]:
    """Raise the errors of loads and unloads as those of requests, whose status in Triton is another."""
    try:
        yield
    except InferenceError as error:
        kind = ModelNotReady if error.status is Status.UNAVAILABLE else InvalidRequest
        raise kind(error.message, remedy=error.remedy) from error
