"""Errors as OpenAI's API has them: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

from collections.abc import Mapping

from aotgaudi.errors import RequestError

ErrorBody = Mapping[str, Mapping[str, "str | None"]]

_TYPES: Mapping[int, str] = {
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}
_CODES: Mapping[int, str] = {
    404: "not_found",
    405: "method_not_allowed",
    413: "request_too_large",
    415: "unsupported_media_type",
    429: "rate_limit_exceeded",
    500: "internal_error",
    503: "service_unavailable",
}
INTERNAL_ERROR_MESSAGE = "The server had an error while processing the request; see its log."


def error_body(status: int, message: str, param: str | None = None) -> ErrorBody:
    """The body that goes with `status`."""
    code = "model_not_found" if (status, param) == (404, "model") else _CODES.get(status)
    kind = _TYPES.get(status, "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_status(error: Exception) -> int:
    """The status of a refusal; 500 for everything that nobody raised on purpose."""
    return error.http_status if isinstance(error, RequestError) else 500


def body_of(error: Exception) -> ErrorBody:
    """The body of a refusal; an unexpected error gives a body that tells nothing of the inside."""
    if isinstance(error, RequestError):
        return error_body(error.http_status, str(error), error.param)
    return error_body(500, INTERNAL_ERROR_MESSAGE)
