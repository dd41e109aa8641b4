"""Errors in the form of the clients' protocols."""

from typing import Any

from producers.agents.protocol import SessionError
from schemas.errors import DataError, InfraError, TidemillError

_OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_ANTHROPIC_TYPES = _OPENAI_TYPES | {413: "request_too_large", 503: "overloaded_error"}


def bad_request(message: str, code: str = "invalid_request") -> SessionError:
    """Return an error with status 400."""
    return SessionError(400, code, message)


def as_session_error(error: SessionError | TidemillError) -> SessionError:
    """Return the error that a client gets for ``error``: 503 if a retry can succeed."""
    if isinstance(error, SessionError):
        return error
    if isinstance(error, InfraError):
        return SessionError(503, "unavailable", str(error))
    return SessionError(400 if isinstance(error, DataError) else 500, "invalid_request", str(error))


def openai_error(error: SessionError) -> dict[str, Any]:
    """Return the error's body in OpenAI's form."""
    kind = _OPENAI_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    return {"error": {"message": error.message, "type": kind, "param": None, "code": error.code}}


def anthropic_error(error: SessionError) -> dict[str, Any]:
    """Return the body of an error in Anthropic's protocol, whose clients detect a full context by the first words."""
    kind = _ANTHROPIC_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    full = error.code == "context_length_exceeded" and not error.message.startswith("prompt is too long")
    message = f"prompt is too long: {error.message}" if full else error.message
    return {"type": "error", "error": {"type": kind, "message": message}}


def responses_error(error: SessionError) -> dict[str, Any]:
    """Return the event of an error within a stream of responses. OpenAI's library reads its first field."""
    return openai_error(error) | {"type": "error", "code": error.code, "message": error.message}
