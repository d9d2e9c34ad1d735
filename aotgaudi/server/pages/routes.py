"""The pages for people: the API's description, and the dashboard with its data as one JSON value.

Pages, style and scripts are files of this package, read before the server listens. A page loads nothing from elsewhere. Its
policy forbids that, as well as inline scripts, inline styles and frames around the page. It inserts data as text only.
Requests for pages pass the same check of ``Host`` as all others, so that no other site's page can read the answers. As with
``/metrics``, everybody who can reach the server may see them. The dashboard computes rates from two successive values.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from aotgaudi.engine.stats import EngineStats, EntryCounters
from aotgaudi.llm.running import Warmth
from aotgaudi.server.metrics import labelled
from aotgaudi.server.service import Service

MAX_ENTRIES = 500
"""The most rows of entries. All further entries share one row for each kind."""


def dashboard_document(service: Service) -> dict[str, Any]:
    """Returns the present state of `service`. Times are in seconds; counts begin at its start."""
    stats, warmth = service.engine.stats(), service.warmth()
    return {
        "server": {
            "version": service.version,
            "model": service.model.names[0],
            "manifest_id": service.manifest_id,
            "binding": service.binding,
            "max_model_len": service.model.max_len,
            "started_at": service.started_at,
            "now": service.now().timestamp(),
        },
        "readiness": asdict(service.readiness()),
        "coverage": _coverage(service, stats, warmth),
        "start": {
            "seconds": service.metrics.start_seconds,
            "phases": [
                {"phase": phase.name, "begin": phase.begin, "end": phase.end}
                for phase in service.metrics.start_phases
            ],
        },
        "requests": {
            "running": stats.num_running,
            "waiting": stats.num_waiting,
            "oldest_waiting_seconds": stats.oldest_waiting_seconds,
            "stalled_seconds": stats.stalled_seconds,
            "finished": dict(stats.num_finished),
            "refused": dict(stats.num_refused),
            "preemptions": stats.num_preemptions,
            "failed_steps": stats.num_failed_steps,
        },
        "tokens": {"prompt": stats.num_prefill_tokens, "generated": stats.num_output_tokens},
        "kv": {
            "used": stats.num_blocks_used,
            "free": stats.num_blocks_free,
            "cached": stats.num_blocks_kept,
            "evicted": stats.num_blocks_evicted,
            "highest": stats.max_block_used,
        },
        "prefix": {"queries": stats.num_prefix_queries, "hits": stats.num_prefix_hits},
        "defrag": {"swaps": stats.num_defrag_swaps},
        "kinds": {kind: _figures(counters) for kind, counters in stats.counters.by_kind().items()},
        "entries": [
            {"kind": kind, "bucket": bucket, **_figures(counters)}
            for (kind, bucket), counters in labelled(stats.counters.entries, MAX_ENTRIES)
        ],
    }


def _coverage(service: Service, stats: EngineStats, warmth: Warmth) -> dict[str, Any]:
    entries = stats.counters.entries
    used = {kind: sum(entry.kind == kind for entry in entries) for kind in ("prompt", "decode", "defrag")}
    used["sampler"] = warmth.num_samplers_used
    return {
        "said": service.coverage,
        "entries": warmth.num_total,
        "warm": warmth.num_warm,
        "used": sum(used.values()),
        "used_by_kind": used,
        "compilations": dict(warmth.compilations),
        "guard": list(warmth.layers),
    }


def _figures(counters: EntryCounters) -> dict[str, Any]:
    work = counters.work
    return {
        "steps": counters.steps.num,
        "seconds": counters.steps.seconds,
        "tokens": work.num_tokens,
        "padding_tokens": work.num_padding_tokens,
        "blocks": work.num_blocks,
        "padding_blocks": work.num_padding_blocks,
        "queued": counters.queue.num,
        "queue_seconds": counters.queue.seconds,
        "first_tokens": counters.first_token.num,
        "first_token_seconds": counters.first_token.seconds,
        "gaps": counters.gaps.num,
        "gap_seconds": counters.gaps.seconds,
        "prefix_tokens": counters.num_prefix_tokens,
        "cached_tokens": counters.num_cached_tokens,
    }


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


def docs_routes() -> list[Route]:
    """Returns the routes of the page that shows ``/openapi.json``."""
    return _page_routes("docs")


def dashboard_routes(service: Service) -> list[Route]:
    """Returns the routes of the page that shows `service`. ``/openapi.json`` omits them, since their answers may change."""

    async def data(_: Request) -> Response:
        await service.refresh()
        return JSONResponse(dashboard_document(service), headers=_HEADERS)

    return [*_page_routes("dashboard"), Route("/dashboard/data", data, include_in_schema=False)]


def _page_routes(name: str) -> list[Route]:
    return [
        _file_route(f"/{name}", f"{name}.html", "text/html; charset=utf-8"),
        _file_route(f"/{name}/{name}.js", f"{name}.js", "text/javascript; charset=utf-8"),
        _file_route(f"/{name}/page.css", "page.css", "text/css; charset=utf-8"),
    ]


def _file_route(path: str, name: str, media_type: str) -> Route:
    content = Path(__file__).with_name(name).read_bytes()

    async def answer(_: Request) -> Response:
        return Response(content, headers=_HEADERS, media_type=media_type)

    return Route(path, answer, include_in_schema=False)
