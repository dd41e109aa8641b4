"""Errors as RFC 9457 problems: what is wrong, and what to do, in one JSON object."""

from http import HTTPStatus
from typing import Any

import redis
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from deploy.control_plane.web.refusal import Refusal
from schemas.control_api.base import Problem
from schemas.errors import ConfigError, DataError, RefusedError, TidemillError

MEDIA_TYPE = "application/problem+json"
KINDS: dict[int, str] = {
    400: "bad-request",
    401: "not-authenticated",
    403: "forbidden",
    404: "not-found",
    405: "method-not-allowed",
    409: "conflict",
    413: "too-large",
    414: "too-long",
    415: "unsupported-media-type",
    422: "invalid",
    429: "too-many-requests",
    503: "unavailable",
}
"""The last part of a problem's ``type``, by status."""


def problem(status: int, detail: str, instance: str, headers: dict[str, str] | None = None) -> Response:
    """Return the answer for one problem."""
    body = Problem(
        type=f"urn:tidemill:problem:{KINDS.get(status, 'error')}",
        title=HTTPStatus(status).phrase,
        status=status,
        detail=detail,
        instance=instance,
    )
    return Response(body.model_dump_json(), status, headers, MEDIA_TYPE)


def install(app: FastAPI) -> None:
    """Answer every error of the app in this form."""

    async def refused(request: Request, error: Exception) -> Response:
        return problem(status_of(error), " ".join(str(error).split()), request.url.path)

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return problem(error.status_code, str(error.detail), request.url.path, dict(error.headers or {}))

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return problem(422, "; ".join(_line(item) for item in error.errors()), request.url.path)

    app.add_exception_handler(TidemillError, refused)
    app.add_exception_handler(redis.RedisError, refused)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(RequestValidationError, invalid)


def status_of(error: Exception) -> int:
    """Return the HTTP status for one of our own errors."""
    if isinstance(error, Refusal):
        return error.status
    if isinstance(error, DataError):
        return 404
    return 409 if isinstance(error, ConfigError | RefusedError) else 503


def _line(item: Any) -> str:
    where = ".".join(str(part) for part in item["loc"] if part != "body") or "body"
    return f"{where}: {item['msg']}"
