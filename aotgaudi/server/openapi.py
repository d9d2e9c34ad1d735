"""The schema in ``/openapi.json``: FastAPI's, and the bodies that we parse ourselves."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from aotgaudi.server.body import Body
from aotgaudi.server.protocol import ChatCompletionRequest, CompletionRequest

_REF = "#/components/schemas/{model}"


def body_schema(body_class: type[Body]) -> dict[str, object]:
    """What a route adds to its description to say which body it takes."""
    content = {"application/json": {"schema": {"$ref": _REF.format(model=body_class.__name__)}}}
    return {"requestBody": {"required": True, "content": content}}


def openapi_schema(app: FastAPI) -> Mapping[str, object]:
    """The document, made anew at each call."""
    _, definitions = models_json_schema(
        [(CompletionRequest, "validation"), (ChatCompletionRequest, "validation")], ref_template=_REF
    )
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    schemas.update(definitions.get("$defs", {}))
    return document
