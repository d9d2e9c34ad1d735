"""The description of the API in OpenAPI, with the bodies, which are parsed elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from aotgaudi.server.body import Body

_REF = "#/components/schemas/{model}"


def body_schema(body_class: type[Body]) -> dict[str, object]:
    """Returns what a route adds to its OpenAPI description to say which body it takes."""
    content = {"application/json": {"schema": {"$ref": _REF.format(model=body_class.__name__)}}}
    return {"requestBody": {"required": True, "content": content}}


def openapi_schema(app: FastAPI, body_classes: Sequence[type[Body]]) -> dict[str, object]:
    """Returns ``/openapi.json``: FastAPI's document with the bodies, which we parse ourselves. Made anew at each call."""
    wanted = [(body_class, "validation") for body_class in body_classes]
    _, definitions = models_json_schema(wanted, ref_template=_REF)  # type: ignore[arg-type]
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    schemas.update(definitions.get("$defs", {}))
    return document
