"""The description of the API in OpenAPI 3.1, https://spec.openapis.org/oas/v3.1.0."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping

from pydantic.json_schema import models_json_schema
from starlette.routing import Route

from aotgaudi.server.intake.body import Body

_REF = "#/components/schemas/{model}"


def openapi_document(
    version: str, routes: Iterable[Route], bodies: Mapping[str, type[Body]]
) -> Mapping[str, object]:
    """Returns ``/openapi.json`` of `routes`; `bodies` are what the paths take that take one."""
    _, definitions = models_json_schema([(body, "validation") for body in bodies.values()], ref_template=_REF)
    return {
        "openapi": "3.1.0",
        "info": {"title": "aotgaudi", "version": version},
        "paths": {
            route.path_format: _path(route, bodies.get(route.path))
            for route in routes
            if route.include_in_schema
        },
        "components": {"schemas": definitions["$defs"]},
    }


def _path(route: Route, body: type[Body] | None) -> Mapping[str, object]:
    summary = (inspect.getdoc(route.endpoint) or "").splitlines()[0].rstrip(".")
    operation: dict[str, object] = {
        "operationId": route.name,
        "summary": summary,
        "responses": {"200": {"description": "what was asked for"}, "default": {"description": "an error"}},
    }
    if route.param_convertors:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in route.param_convertors
        ]
    if body is not None:
        content = {"application/json": {"schema": {"$ref": _REF.format(model=body.__name__)}}}
        operation["requestBody"] = {"required": True, "content": content}
    return {"get" if body is None else "post": operation}
