"""Messages that could not be processed."""

from typing import Any

from pydantic import Field

from schemas.control_api.base import Answer, ListAnswer


class LetterHead(Answer):
    """A dead letter as a list shows it."""

    id: str
    time: float
    source: str
    reason: str
    deliveries: int
    task_id: int | None
    sample: int | None
    bytes: int


class DeadLetters(ListAnswer):
    """Answer to GET /v1/dead-letters."""

    letters: list[LetterHead]
    total: int = Field(description="Number of all dead letters so far; the broker keeps only the newest.")


class LetterDetail(LetterHead):
    """A dead letter in full. payload: decoded if it is MessagePack, else hexadecimal digits."""

    payload: Any
