"""Ollama's management of models: `/api/pull`, `/api/create`, `/api/copy` and `/api/delete`.

Downloads and exports run in a process of their own, which ends when the client leaves. They need a server
whose models may change while it runs, and a key that may control it.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import tempfile
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any, TypeAlias

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field
from starlette.responses import StreamingResponse

from genserve.errors import ExportError, InferenceError, InvalidRequest, ModelNotFound, Status
from genserve.repository.model_files import (
    copy_text_model,
    delete_folder,
    removed_folders,
    require_new_name,
)
from genserve.repository.options import ControlMode
from genserve.request_context import current_request
from genserve.sampling.defaults import default_sampling_params
from genserve.server.dialects.ollama.blobs import (
    CHANGE,
    REMEDY,
    blob_path,
    blobs_folder,
    require_changes,
)
from genserve.server.dialects.ollama.routes import (
    OLLAMA_ERRORS,
    ModelFields,
    local_name,
    new_name,
    ollama_error,
    pulled_name,
)
from genserve.server.error_formats import renamed
from genserve.server.error_statuses import as_genserve_error
from genserve.server.http.request_body import TolerantBody
from genserve.server.http.sse_response import documented, while_connected
from genserve.server.route import Router, rules
from genserve.server.services import Services, SharedServices
from genserve.text.chat_template import TemplateFailed, TemplateProcess
from genserve.text.tokenizer_files import GENERATION_CONFIG

router = Router(prefix="/api", tag="Ollama", errors=OLLAMA_ERRORS)
_LINES = "application/x-ndjson"
EXPORT_JOB = (sys.executable, "-m", "genserve.export.export_job")
# Objects that say what is being done.
_Progress: TypeAlias = AsyncGenerator[Mapping[str, Any], None]
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_PRECISIONS = {
    "q8_0": "int8", "q4_0": "int4", "q4_k_m": "int4", "q4_k_s": "int4", "f16": "fp16", "f32": "fp32",
}  # fmt: skip
# The names in generation_config.json of Ollama's parameters that it can hold.
_PARAMETERS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repeat_penalty": "repetition_penalty",
}
# The whole context is used, and memory and threads are those of the server.
_WITHOUT_EFFECT = frozenset(("num_ctx", "num_batch", "num_gpu", "num_thread", "num_keep", "use_mmap"))


class CreateBody(ModelFields):
    """Body of `POST /api/create`."""

    from_: str | None = Field(default=None, alias="from", description="The model to begin with.")
    files: dict[str, str] | None = Field(
        default=None,
        description="The digests of uploaded files by their names: a GGUF file, or those of a checkpoint.",
    )
    adapters: dict[str, str] | None = Field(
        default=None, description="The digests of uploaded adapters as GGUF files, which are merged."
    )
    template: str | None = Field(default=None, description="A chat template for Jinja.")
    parameters: dict[str, Any] | None = Field(default=None, description="Defaults of sampling parameters.")
    quantize: str | None = Field(default=None, description="`q8_0`: int8; `q4_K_M`: int4; `f16`.")


class CopyBody(TolerantBody):
    """Body of `POST /api/copy`."""

    source: str = Field(description="The model to copy.")
    destination: str = Field(description="The name of the copy.")


@router.post("/pull", responses=documented(_LINES))
@rules(CHANGE)
async def pull(body: ModelFields, services: SharedServices, request: Request) -> Response:
    """Download a model by a short name or as ORG/NAME, in lines of progress; one that is there stays."""
    name = _given(body)
    current_request().change = f"pull {name}"
    if local_name(services, name) in services.repository.lifecycle.entries:
        return await _answer(body, _nothing(), request)
    if services.repository.options.control_mode is ControlMode.NONE:
        raise ModelNotFound(f"model {name[:128]!r} not found", remedy=REMEDY, field="model")
    return await _answer(body, _exported(services, {"pull": pulled_name(name)}), request)


@router.post("/create", responses=documented(_LINES))
@rules(CHANGE)
async def create(body: CreateBody, services: SharedServices, request: Request) -> Response:
    """Make a model of uploaded files, or of another model, in lines of progress."""
    name = _target(services, _given(body))
    current_request().change = f"create {name}"
    require_changes(services)
    _check_create(body)
    if body.template:
        await asyncio.to_thread(_check_template, body.template)
    require_new_name(name, entries=services.repository.lifecycle.entries)
    made = _from_model(body, services, name) if body.from_ else _from_files(body, services, name)
    return await _answer(body, made, request)


@router.post("/copy")
@rules(CHANGE)
async def copy(body: CopyBody, services: SharedServices) -> Response:
    """Copy a model; both share the data of their weights."""
    source, destination = local_name(services, body.source), _target(services, body.destination)
    current_request().change = f"copy {source} to {destination}"
    require_changes(services)
    await asyncio.to_thread(_copy, services, source, destination)
    return Response()


@router.delete("/delete")
@rules(CHANGE)
async def delete(body: ModelFields, services: SharedServices) -> Response:
    """Delete a model with its stages; requests that it answers go on."""
    name = local_name(services, _given(body))
    current_request().change = f"delete {name}"
    require_changes(services)
    await asyncio.to_thread(_delete, services, name)
    return Response()


@router.post("/push", include_in_schema=False)
@rules(CHANGE)
async def push() -> Response:
    """Reject an upload to a library."""
    raise InferenceError("models are not pushed to a library", status=Status.UNSUPPORTED)


def _given(body: ModelFields) -> str:
    name = body.model or body.name
    if not name:
        raise InvalidRequest("the request names no model", field="model", remedy="set `model`")
    return name


def _target(services: Services, name: str) -> str:
    """Return the name that a new model gets, or that of the model which has the name already."""
    known = local_name(services, name)
    return known if known in services.repository.lifecycle.entries else new_name(name)


def _check_create(body: CreateBody) -> None:
    body.reject(
        {
            "system": "send it as the first message, or write it into the template",
            "messages": "send them with each chat",
        }
    )
    if bool(body.from_) == bool(body.files):
        raise InvalidRequest("exactly one of from and files must be given", field="files")
    if body.from_ and (body.adapters or body.quantize):
        raise InvalidRequest(
            "adapters and quantize change weights, of which an existing model has none to change",
            field="adapters" if body.adapters else "quantize",
            remedy="give the source of the model as files",
        )
    if body.template and ("{{ ." in body.template or "{{." in body.template):
        raise InvalidRequest(
            "template is one for Go", field="template", remedy="give a template for Jinja, or leave it out"
        )
    if body.quantize and body.quantize.lower() not in _PRECISIONS:
        raise InvalidRequest(
            f"quantize {body.quantize[:32]!r} is not supported",
            field="quantize",
            remedy=f"use one of {', '.join(_PRECISIONS)}",
        )
    for name in body.parameters or ():
        if name not in _PARAMETERS and name not in _WITHOUT_EFFECT:
            raise InvalidRequest(
                f"parameters.{name[:64]} cannot be a default of a model",
                field=f"parameters.{name[:64]}",
                remedy="send it in `options` of each request",
            )
    try:
        default_sampling_params(_defaults(body))
    except InvalidRequest as error:
        names = {ours: f"parameters.{name}" for name, ours in _PARAMETERS.items()}
        raise renamed(error, names) from None


def _defaults(body: CreateBody) -> dict[str, Any]:
    """Return the parameters of a new model, by the names of generation_config.json."""
    given = body.parameters or {}
    return {_PARAMETERS[name]: value for name, value in given.items() if name in _PARAMETERS}


def _check_template(source: str) -> None:
    """Raise InvalidRequest if a chat template does not compile."""
    compiling = TemplateProcess(source, special_tokens={})
    try:
        compiling.compile()
    except TemplateFailed as error:
        raise InvalidRequest(f"template: {error}", field="template") from None
    finally:
        compiling.close()


async def _nothing() -> _Progress:
    return
    yield {}


async def _exported(services: Services, job: Mapping[str, Any]) -> _Progress:
    """Run an export job, and yield its lines; see `genserve.export.export_job`.

    Raises:
        ExportError: the job has failed.
    """
    text = json.dumps({"repository": str(services.settings.model_repository[0]), **job})
    process = await asyncio.create_subprocess_exec(*EXPORT_JOB, text, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        name = None
        async for line in process.stdout:
            fields = json.loads(line)
            if error := fields.get("error"):
                raise ExportError(error["message"], remedy=error["remedy"])
            name = fields.get("name", name)
            if "status" in fields:
                yield fields
        if name is None:
            raise ExportError("the export ended early", remedy="the server's log may have the reason")
    finally:
        with suppress(ProcessLookupError):
            process.terminate()
        await process.wait()
    await asyncio.to_thread(services.repository.lifecycle.scan_folders)


async def _from_model(body: CreateBody, services: Services, name: str) -> _Progress:
    yield {"status": f"copying {body.from_}"}
    await asyncio.to_thread(_copy_and_finish, body, services, name)     # both, even if the client leaves


async def _from_files(body: CreateBody, services: Services, name: str) -> _Progress:
    given, adapted = body.files or {}, body.adapters or {}
    blobs = blobs_folder(services)
    blobs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=blobs) as folder:
        files = _linked(services, given, Path(folder))
        adapters = _linked(services, adapted, Path(folder) / "adapters")
        is_gguf = len(files) == 1 and files[0].suffix == ".gguf"
        job = {
            "source": str(files[0] if is_gguf else folder),
            "name": name,
            "precision": _PRECISIONS.get((body.quantize or "").lower()),
            "adapters": [str(adapter) for adapter in adapters],
        }
        async with aclosing(_exported(services, job)) as lines:
            async for line in lines:
                yield line
    await asyncio.to_thread(_finish, body, services, name)
    for digest in (*given.values(), *adapted.values()):
        blob_path(services, digest).unlink(missing_ok=True)


def _linked(services: Services, digests: Mapping[str, str], folder: Path) -> list[Path]:
    """Return links to uploaded files under their own names.

    Raises:
        InvalidRequest: a name is a path, or a file was not uploaded.
    """
    links: list[Path] = []
    for name, digest in digests.items():
        last = name.rpartition("/")[2]
        if not _FILE.fullmatch(last):
            raise InvalidRequest(f"{name[:128]!r} is not the name of a file", field="files")
        blob = blob_path(services, digest)
        if not blob.exists():
            raise InvalidRequest(
                f"the file {name[:128]!r} is not here",
                field="files",
                remedy=f"upload it first: POST /api/blobs/{digest[:80]}",
            )
        folder.mkdir(exist_ok=True)
        link = folder / last
        link.symlink_to(blob.resolve())
        links.append(link)
    return links


def _copy(services: Services, source: str, destination: str) -> None:
    lifecycle = services.repository.lifecycle
    lifecycle.scan_folders()
    stages = lifecycle.text_models.get(source)
    if stages is None:
        raise ModelNotFound(f"model {source[:128]!r} not found", remedy="GET /api/tags lists the models")
    copy_text_model(source, stages, lifecycle.entries, to=destination)
    lifecycle.scan_folders()


def _copy_and_finish(body: CreateBody, services: Services, name: str) -> None:
    _copy(services, local_name(services, body.from_ or ""), name)
    _finish(body, services, name)


def _finish(body: CreateBody, services: Services, name: str) -> None:
    """Write the template and the parameters of a new model, which is deleted if that fails."""
    try:
        _write_defaults(body, services, name)
    except Exception:
        _delete(services, name)
        raise


def _write_defaults(body: CreateBody, services: Services, name: str) -> None:
    folder = services.repository.lifecycle.text_models[name]["tokenizer"].latest_version()
    if body.template:
        (folder / "chat_template.jinja").write_text(body.template, encoding="utf-8")
    if given := _defaults(body):
        file = folder / GENERATION_CONFIG
        config = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        file.write_text(json.dumps(config | given, indent=2), encoding="utf-8")
    services.repository.options.default_sampling_params(folder)     # raises if they contradict its own


def _delete(services: Services, name: str) -> None:
    lifecycle = services.repository.lifecycle
    lifecycle.scan_folders()
    if name not in lifecycle.entries:
        raise ModelNotFound(f"model {name[:128]!r} not found", remedy="GET /api/tags lists the models")
    folders = removed_folders([name], lifecycle.entries, repository=lifecycle.entries[name].path.parent)
    if services.repository.on_demand is not None:
        services.repository.on_demand.release(name)
    elif services.repository.options.control_mode is ControlMode.EXPLICIT:  # polling notices it
        lifecycle.unload(name, dependents=True)
    for folder in folders:
        delete_folder(folder)
    lifecycle.scan_folders()


async def _answer(body: ModelFields, lines: _Progress, request: Request) -> Response:
    """Return the lines as they come, and with `stream` false only whether all went well."""
    if body.stream is not False:
        return StreamingResponse(_written(lines), media_type=_LINES)
    await while_connected(_all(lines), request.receive)
    return JSONResponse({"status": "success"})


async def _all(lines: _Progress) -> None:
    async with aclosing(lines):
        async for _ in lines:
            pass


async def _written(lines: _Progress) -> AsyncGenerator[str, None]:
    try:
        async with aclosing(lines):
            async for line in lines:
                yield f"{json.dumps(line)}\n"
    except Exception as error:
        failed = as_genserve_error(error, doing="a change of models")
        current_request().fail(failed)
        yield f"{json.dumps(ollama_error(failed))}\n"
    else:
        yield '{"status": "success"}\n'
