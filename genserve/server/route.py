"""Route: what a path of the server is, declared at its handler; the rest of the server reads it here.

    router = Router(prefix="/v1", tag="OpenAI", errors=OPENAI_ERRORS)

    @router.get("/models")
    @rules(METADATA)
    async def models(services: SharedServices) -> dict[str, Any]: ...

FastAPI declares path, method, body and documentation; `rules` who may call the handler, at which level calls
are logged, and whether a full model rejects a request before its body is validated; `Router` how errors are
written.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar, get_type_hints

from fastapi import APIRouter, HTTPException, Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.types import Receive, Scope, Send

from genserve.errors import Closed, ModelNotFound, ModelNotReady, Overloaded
from genserve.request_context import DEFAULT_LEVELS, LogLevels, current_request
from genserve.server.access.access_control import ANY_KEY, PROBE, Rights
from genserve.server.error_formats import TGI_ERRORS, ErrorFormat
from genserve.server.error_responses import invalid_field
from genserve.server.http.connection_errors import raise_connection_error
from genserve.server.http.offload import offload_if_large
from genserve.server.http.request_body import StrictRequest, check_coding, empty_body, json_cost
from genserve.server.services import Services

_Handler = TypeVar("_Handler", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteRules:
    """The rules of one route.

    Attributes:
        rights: what clients need to call it.
        levels: the levels of the lines of its requests.
        rejects_early: a model that is full rejects its requests before their bodies are validated, which
            costs more than the rejection. Their fields `model` and `priority` are OpenAI's or TGI's.
    """

    rights: Rights
    levels: LogLevels = DEFAULT_LEVELS
    rejects_early: bool = False


NO_ROUTE = RouteRules(rights=ANY_KEY)
_rules: dict[Callable[..., Any], RouteRules] = {}   # by handler


def rules(
    rights: Rights, *, levels: LogLevels = DEFAULT_LEVELS, rejects_early: bool = False
) -> Callable[[_Handler], _Handler]:
    """Decorate the handler of a `Router`, below the path; see `RouteRules`."""

    def declare(handler: _Handler) -> _Handler:
        _rules[handler] = RouteRules(rights=rights, levels=levels, rejects_early=rejects_early)
        return handler

    return declare


def admit(services: Services, scope: Scope, route: RouteRules) -> None:
    """Note the rules of a request's route for the log, and raise the error that rejects the request.

    The body has not been read. For the errors see `AccessControl.admit`, `raise_connection_error`.
    """
    raise_connection_error(scope, is_probe=route.rights is PROBE)
    request = current_request()
    request.levels = route.levels
    services.access.admit(
        request, method=scope["method"], headers=scope["headers"], rights=route.rights
    )


async def no_route(scope: Scope, _receive: Receive, _send: Send) -> None:
    """Reject a request whose path no route has, first for what it lacks to call any; the ASGI protocol."""
    admit(scope["app"].state.services, scope, NO_ROUTE)
    raise HTTPException(404)


class Route(APIRoute):
    """A route that admits requests by the rules of its handler."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        """Take the rules of the handler; raises KeyError if it has none."""
        self.rules = _rules[endpoint]
        super().__init__(path, endpoint, **options)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Admit a request, then answer it; also one with another method, which is rejected."""
        admit(scope["app"].state.services, scope, self.rules)
        await super().handle(scope, receive, send)


class JsonRoute(Route):
    """A route that parses bodies strictly, and as JSON whatever they are declared as.

    Attributes:
        generates: whether the handler takes body, services and request, and returns a response.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        """Take the rules of the handler, and the model of its body if it generates."""
        self._body_model = _body_of_generation(endpoint)
        self.generates = self._body_model is not None
        super().__init__(path, endpoint, **options)

    async def generate(self, scope: Scope, receive: Receive) -> Response:
        """Admit a generation, and call its handler without FastAPI.

        FastAPI's stacks and its solver of dependencies cost ten times as much as the validation of a short
        body, and a rejection by a full model is to cost little.

        Raises:
            GenserveError: the request is rejected.
        """
        assert self._body_model is not None
        services: Services = scope["app"].state.services
        admit(services, scope, self.rules)
        check_coding(scope["headers"])
        request, fields = await self._read(scope, receive)
        if fields is None:
            raise empty_body()
        body = await offload_if_large(json_cost(request), _validated, self._body_model, fields)
        response: Response = await self.endpoint(body=body, services=services, request=request)
        return response

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Wrap FastAPI's handler, which takes the body that is parsed here."""
        handle = super().get_route_handler()

        async def handle_strictly(request: Request) -> Response:
            # `curl -d` declares a form; access control has rejected those that a page can send.
            headers = request.scope["headers"]
            check_coding(headers)
            others = [header for header in headers if header[0] != b"content-type"]
            as_json = {"headers": [*others, (b"content-type", b"application/json")]}
            strict, _ = await self._read({**request.scope, **as_json}, request.receive)
            return await handle(strict)

        return handle_strictly

    async def _read(self, scope: Scope, receive: Receive) -> tuple[StrictRequest, dict[str, Any] | None]:
        """Return a request whose body has been read, and its fields.

        FastAPI, which would read them too, replaces the errors by its own.

        Raises:
            InvalidRequest, BodyTooLarge: see `StrictRequest`.
            Overloaded: the model is full, and the route rejects early.
        """
        services: Services = scope["app"].state.services
        request = StrictRequest(scope, receive, max_bytes=services.settings.max_body_bytes)
        if not await request.body():
            return request, None
        fields: dict[str, Any] = await request.json()
        if self.rules.rejects_early:
            _reject_if_full(services, fields)
        return request, fields


class Router(APIRouter):
    """The routes of one dialect.

    Attributes:
        errors: how errors are written, also for unknown paths that begin with the prefix.
    """

    def __init__(
        self,
        *,
        prefix: str = "",
        tag: str = "",
        errors: ErrorFormat = TGI_ERRORS,
        route_class: type[Route] = JsonRoute,
        include_in_schema: bool = True,
    ) -> None:
        self.errors = errors
        super().__init__(
            prefix=prefix, tags=[tag], route_class=route_class, include_in_schema=include_in_schema
        )


def _body_of_generation(endpoint: Callable[..., Any]) -> type[BaseModel] | None:
    """Return the model of the body, for a handler of body, services and request that returns a response.

    None: the handler takes or returns something else.
    """
    hints = get_type_hints(endpoint)
    generates = hints.keys() == {"body", "services", "request", "return"} and hints["return"] is Response
    body: type[BaseModel] | None = hints["body"] if generates else None
    return body


def _validated(model: type[BaseModel], fields: dict[str, Any]) -> BaseModel:
    """Return a body; raises InvalidRequest for the first field that is not valid."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        problem = error.errors()[0]
        raise invalid_field(problem, problem["loc"], model) from None


def _reject_if_full(services: Services, fields: dict[str, Any]) -> None:
    """Raise Overloaded if the model would reject any request of the default priority now.

    A request that states its priority, or does not name a model, is left to `submit`.
    """
    name, parameters = fields.get("model"), fields.get("parameters")    # the latter is TGI's
    has_priority = "priority" in fields or (isinstance(parameters, dict) and "priority" in parameters)
    if services.draining or has_priority or not isinstance(name, str | None):
        return
    with suppress(Closed, ModelNotFound, ModelNotReady):    # the rest of the request may be wrong, too
        model = services.repository.text_model(name)
        request = current_request()
        try:
            model.engine.reserve(1, share=request.key).release()
        except Overloaded:
            request.model = model.name
            request.operation = "text_completion" if fields.keys() & {"prompt", "inputs"} else "chat"
            raise
