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
    kind, title = f"urn:tidemill:problem:{KINDS.get(status, 'error')}", HTTPStatus(status).phrase
    body = Problem(type=kind, title=title, status=status, detail=detail, instance=instance)
    return Response(body.model_dump_json(), status, headers, MEDIA_TYPE)


def install(app: FastAPI) -> None:
    """Answer every error of the app in this form."""

    async def answer(request: Request, error: Exception) -> Response:
        detail, headers = " ".join(str(error).split()), None
        match error:
            case HTTPException():
                status, detail, headers = error.status_code, str(error.detail), dict(error.headers or {})
            case RequestValidationError():
                status, detail = 422, "; ".join(_line(item) for item in error.errors())
            case Refusal():
                status = error.status
            case DataError():
                status = 404
            case _:
                status = 409 if isinstance(error, ConfigError | RefusedError) else 503
        return problem(status, detail, request.url.path, headers)

    for kind in (TidemillError, redis.RedisError, HTTPException, RequestValidationError):
        app.add_exception_handler(kind, answer)


def _line(item: Any) -> str:
    where = ".".join(str(part) for part in item["loc"] if part != "body") or "body"
    return f"{where}: {item['msg']}"
