"""The dashboard's routes. Its page, style and script are files of this package, read before the server listens.

The page loads nothing from elsewhere, and its policy lets it do nothing else: no inline script, no inline style, no frame
around it. It puts all that it is told into the page as text. It is answered under the same check of ``Host`` as everything
else, so no other site's page can read it; who may reach the server may see it, as with ``/metrics``.
"""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from aotgaudi.server.dashboard.document import dashboard_document
from aotgaudi.server.service import Service

_HEADERS = MappingProxyType(
    {
        "Content-Security-Policy": (
            "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
            "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        ),
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "DENY",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Cache-Control": "no-store",
    }
)
_FILES = MappingProxyType(
    {
        "/dashboard": ("page.html", "text/html; charset=utf-8"),
        "/dashboard/page.css": ("page.css", "text/css; charset=utf-8"),
        "/dashboard/page.js": ("page.js", "text/javascript; charset=utf-8"),
    }
)


def dashboard_routes(service: Service) -> list[Route]:
    """Returns the routes of the page that shows `service`. They are in no schema: what they answer may change."""

    async def data(_: Request) -> Response:
        await service.refresh()
        return JSONResponse(dashboard_document(service), headers=_HEADERS)

    pages = [_file_route(path, name, media_type) for path, (name, media_type) in _FILES.items()]
    return [*pages, Route("/dashboard/data", data, include_in_schema=False)]


def _file_route(path: str, name: str, media_type: str) -> Route:
    content = Path(__file__).with_name(name).read_bytes()

    async def answer(_: Request) -> Response:
        return Response(content, headers=_HEADERS, media_type=media_type)

    return Route(path, answer, include_in_schema=False)
