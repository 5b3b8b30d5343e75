"""KServe shared memory: regions that clients register, over HTTP."""

from __future__ import annotations

from genserve.errors import InferenceError
from genserve.kserve.json_document import Kind, checked, read_json
from genserve.kserve.refusal import cuda_region, refuse_cuda_region
from genserve.server.routes.kserve_call import Answer, Call, json_answer

__all__ = [
    "cuda_status",
    "region_status",
    "register_cuda_region",
    "register_region",
    "unregister_cuda_region",
    "unregister_region",
]

_FIELDS = ("name", "key", "offset", "byte_size")


async def region_status(call: Call) -> Answer:
    """Return the regions that are registered, or one of them."""
    regions = call.services.shared_memory.regions(call.names["region"])
    return json_answer([{field: getattr(region, field) for field in _FIELDS} for region in regions])


async def register_region(call: Call) -> Answer:
    """Register a region of the system's shared memory."""
    call.services.shared_memory.refuse_if_disabled()
    name = call.names["region"]
    if not name:
        raise InferenceError("'region name' is necessary to register system shared memory region")
    document = read_json(await call.body(limit=call.services.settings.http_max_input_size))
    given = document if isinstance(document, dict) else {}
    for field in ("key", "byte_size"):
        if field not in given:
            raise InferenceError(f"Shared memory register request has no '{field}' field")
    call.services.shared_memory.register(
        name,
        key=checked(given["key"], Kind.STRING),
        offset=checked(given.get("offset", 0), Kind.UNSIGNED),
        byte_size=checked(given["byte_size"], Kind.UNSIGNED),
    )
    return Answer()


async def unregister_region(call: Call) -> Answer:
    """Forget a region, or all of them."""
    call.services.shared_memory.unregister(call.names["region"])
    return Answer()


async def cuda_status(call: Call) -> Answer:
    """Return the regions of a GPU's memory: there are none."""
    refuse_cuda_region(call.names["region"])
    return json_answer([])


async def register_cuda_region(call: Call) -> Answer:
    """Refuse a region of a GPU's memory."""
    call.services.shared_memory.refuse_if_disabled()
    raise cuda_region(call.names["region"])


async def unregister_cuda_region(call: Call) -> Answer:
    """Forget regions of a GPU's memory: there are none."""
    call.services.shared_memory.refuse_if_disabled()
    return Answer()
