"""The HTTP application: routes, their handlers, and errors.

=====================================  ====================================================================
``GET /v1/models``, ``/v1/models/ID``  the served models
``POST /v1/completions``               text or token ids in, text out; streamed on request
``POST /v1/chat/completions``          messages in, a message out; streamed on request
``GET /health``                        200 while engine and preprocessor pool live and steps end; else 503 and the reason
``GET /ready``                         200 while the server takes requests; else 503 and the reason
``GET /metrics``                       Prometheus or OpenMetrics text
``GET /version``                       this program's version
``POST /tokenize``, ``/detokenize``    a prompt's tokens, and the text of tokens, in vLLM's forms
``GET /ping``, ``POST /ping``          as ``/health``, for SageMaker
``GET /load``                          how many answers are waiting or in progress
=====================================  ====================================================================
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from functools import partial

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from aotgaudi.engine.output import TokenEvent
from aotgaudi.errors import RequestError
from aotgaudi.server.boundary import (
    CLIENT_GONE_STATUS,
    HEADER,
    AllowedHosts,
    HostCheck,
    KeyCheck,
    RequestBoundary,
    answer_error,
    answer_id,
)
from aotgaudi.server.generation import Generation
from aotgaudi.server.http import (
    BodyReader,
    ClientGoneError,
    EventStreamResponse,
    error_body,
    unless_disconnected,
)
from aotgaudi.server.log import REQUEST_ID
from aotgaudi.server.options import OPEN_ACCESS, Access, Observability
from aotgaudi.server.preprocess.prepare import AnswerT, PreparedRequest
from aotgaudi.server.responses import (
    AnswerFormat,
    AnswerHead,
    ChatFormat,
    ChunkWriter,
    CompletionFormat,
    TokenTexts,
    stream,
)
from aotgaudi.server.service import Service

Work = Callable[[bytes], Coroutine[object, object, AnswerT]]
_LAST_SLASHES = re.compile(r"(/|%2[fF])+$")


def create_app(
    service: Service,
    hosts: AllowedHosts = AllowedHosts(),  # noqa: B008 - a frozen value
    observability: Observability = Observability(),  # noqa: B008 - a frozen value
    access: Access = OPEN_ACCESS,
    root_path: str = "",
) -> Starlette:
    """Returns the application that serves `service` to requests for `hosts` with `access`. The caller ends the service.

    Behind a proxy, clients find the application at `root_path`. The paths of requests may include that prefix or not.

    A path with a trailing slash is redirected, as by vLLM, but not to wherever the client's ``Host`` says, as by Starlette.
    """
    routes = _routes(Api(service))
    app = Starlette(
        routes=[*_slashed(routes), *routes],
        middleware=[
            Middleware(
                RequestBoundary,
                metrics=service.metrics,
                routes=routes,
                access_log_now=service.now if observability.access_log else None,
                root_path=root_path,
            ),
            Middleware(HostCheck, hosts=hosts),
            *_admit(access),
        ],
        exception_handlers={
            RequestError: answer_error,
            HTTPException: _answer_http_exception,
            ClientGoneError: _answer_nobody,
        },
    )
    app.router.redirect_slashes = False
    return app


def _slashed(routes: Iterable[Route]) -> Iterable[Route]:
    """Yields a route that redirects each path with a slash at its end to the path without."""
    for route in routes:
        methods = sorted(route.methods or ())
        yield Route(f"{route.path}/", _redirect, methods=methods)


async def _redirect(request: Request) -> Response:
    path, query = _LAST_SLASHES.sub("", request.scope["raw_path"].decode("latin-1")), request.url.query
    return RedirectResponse(f"{path}?{query}" if query else path)


def _admit(access: Access) -> Iterable[Middleware]:
    """Yields the middleware that checks access. CORS comes first, because a browser's preflight request carries no key."""
    if access.allowed_origins:
        yield Middleware(
            CORSMiddleware,
            allow_origins=access.allowed_origins,
            allow_methods=("*",),
            allow_headers=("*",),
            expose_headers=(HEADER, "Retry-After"),
        )
    if access.key_digests:
        yield Middleware(KeyCheck, digests=access.key_digests)


def _routes(api: Api) -> list[Route]:
    return [
        Route("/v1/completions", api.complete, methods=["POST"]),
        Route("/v1/chat/completions", api.chat, methods=["POST"]),
        Route("/v1/models", api.list_models),
        Route("/v1/models/{model_id:path}", api.retrieve_model),
        Route("/health", api.health),
        Route("/ready", api.ready),
        Route("/metrics", api.metrics),
        Route("/version", api.version),
        Route("/tokenize", api.tokenize, methods=["POST"]),
        Route("/detokenize", api.detokenize, methods=["POST"]),
        Route("/ping", api.ping, methods=["GET", "POST"]),
        Route("/load", api.load),
    ]


class Api:
    """The handlers of the routes, bound to a service."""

    def __init__(self, service: Service) -> None:
        self._service, self._preprocessor = service, service.preprocessor
        self._bodies = BodyReader(service.engine.admission, service.max_body_bytes)

    async def list_models(self, _: Request) -> Response:
        """Lists what is served."""
        models = [self._model_card(name) for name in self._service.model.names]
        return JSONResponse({"object": "list", "data": models})

    async def retrieve_model(self, request: Request) -> Response:
        """Describes one model."""
        model_id = request.path_params["model_id"]
        return JSONResponse(self._model_card(self._service.model.resolve(model_id)))

    async def complete(self, request: Request) -> Response:
        """Completes one prompt or several."""
        prepared = await self._preprocessed(request, partial(self._preprocessor.prepare, "completion"))
        head, texts = self._head("cmpl", prepared), self._texts(prepared)
        echoes = [echo for echo in prepared.echoes for _ in range(prepared.num_choices)]
        answer_format = CompletionFormat(head, texts, echoes, self._prompt_texts(prepared))
        return await self._answer(request, prepared, answer_format)

    async def chat(self, request: Request) -> Response:
        """Answers a conversation."""
        prepared = await self._preprocessed(request, partial(self._preprocessor.prepare, "chat"))
        head, texts, echo = self._head("chatcmpl", prepared), self._texts(prepared), "".join(prepared.echoes)
        answer_format = ChatFormat(head, texts, echo, prepared.reply, self._prompt_texts(prepared))
        return await self._answer(request, prepared, answer_format)

    async def health(self, _: Request) -> Response:
        """Says whether engine and preprocessor pool live and the engine advances, or why not."""
        trouble = self._service.trouble
        return JSONResponse({"alive": not trouble, "reason": trouble}, 503 if trouble else 200)

    async def ready(self, _: Request) -> Response:
        """Says whether the server takes requests, and how warm it is."""
        await self._service.engine.refresh()
        readiness = self._service.readiness()
        return JSONResponse(readiness, 200 if readiness["ready"] else 503)

    async def metrics(self, request: Request) -> Response:
        """Exposes the metrics."""
        await self._service.engine.refresh()
        content, content_type = self._service.metrics.expose(request.headers.get("accept", ""))
        return Response(content, headers={"content-type": content_type})

    async def version(self, _: Request) -> Response:
        """Says which version this is."""
        return JSONResponse({"version": self._service.version})

    async def tokenize(self, request: Request) -> Response:
        """Gives the tokens of a prompt."""
        tokenized = await self._preprocessed(request, partial(self._preprocessor.tokenize, "tokenize"))
        return JSONResponse(tokenized.as_tokens(self._service.model.max_len))

    async def detokenize(self, request: Request) -> Response:
        """Gives the text of tokens."""
        tokenized = await self._preprocessed(request, partial(self._preprocessor.tokenize, "detokenize"))
        return JSONResponse(tokenized.as_text())

    async def ping(self, request: Request) -> Response:
        """Says what /health says."""
        return await self.health(request)

    async def load(self, _: Request) -> Response:
        """Says how many answers are being made or wait."""
        return JSONResponse({"server_load": self._service.engine.admission.num_open})

    def _model_card(self, name: str) -> dict[str, object]:
        return {
            "id": name,
            "object": "model",
            "created": self._service.started_at,
            "owned_by": "aotgaudi",
            "root": self._service.model.root or name,
            "parent": None,
            "max_model_len": self._service.model.max_len,
        }

    async def _preprocessed(self, request: Request, work: Work[AnswerT]) -> AnswerT:
        """Returns the answer of the preprocessor's `work` to the body of a request."""
        async with self._admitted(request) as raw:
            answer = await unless_disconnected(work(raw), request.receive)
        self._service.tell_ignored(answer.ignored)
        return answer

    @asynccontextmanager
    async def _admitted(self, request: Request) -> AsyncIterator[bytes]:
        """Yields the body of a request once the server is open and has room for it."""
        async with self._bodies.json_bytes(request) as raw:
            self._service.check_open()
            with self._service.engine.admission.preparing():
                yield raw

    def _head(self, prefix: str, prepared: PreparedRequest) -> AnswerHead:
        return AnswerHead(
            id=answer_id(prefix, REQUEST_ID.get() or ""),
            created=self._service.unix_seconds(),
            model=prepared.model,
            system_fingerprint=self._service.fingerprint,
        )

    def _texts(self, prepared: PreparedRequest) -> TokenTexts | None:
        return None if prepared.params.logprobs is None else TokenTexts(self._service.engine.token_text)

    def _prompt_texts(self, prepared: PreparedRequest) -> TokenTexts | None:
        return TokenTexts(self._service.engine.token_text) if prepared.shows_prompt_logprobs else None

    async def _answer(
        self, request: Request, prepared: PreparedRequest, answer_format: AnswerFormat
    ) -> Response:
        service = self._service
        generation = Generation(service.engine, answer_format.head.id, service.metrics, service.clock)
        request.state.generation = generation
        generation.submit(prepared)
        if prepared.stream:
            writer = ChunkWriter(answer_format, generation.prompt_lens, prepared.stream_usage)
            return EventStreamResponse(stream(generation, writer), on_close=generation.close)
        outputs = await _outputs(generation, request)
        return JSONResponse(answer_format.whole(outputs, generation.token_counts))


async def _outputs(generation: Generation, request: Request) -> list[list[TokenEvent]]:
    """Waits for all events, returns those of each choice, and closes `generation`."""
    try:
        return await unless_disconnected(_collect(generation), request.receive)
    finally:
        generation.close()


async def _collect(generation: Generation) -> list[list[TokenEvent]]:
    events: list[list[TokenEvent]] = [[] for _ in generation.prompt_lens]
    async for index, event in generation.events():
        events[index].append(event)
    return events


async def _answer_http_exception(_: Request, error: Exception) -> Response:
    """Answers routing errors, such as an unknown path or a wrong method."""
    status, message = (error.status_code, error.detail) if isinstance(error, HTTPException) else (500, "")
    headers = error.headers if isinstance(error, HTTPException) else None
    return JSONResponse(error_body(status, message, is_of_http=True), status, headers)


async def _answer_nobody(_request: Request, _error: Exception) -> Response:
    return Response(status_code=CLIENT_GONE_STATUS)
