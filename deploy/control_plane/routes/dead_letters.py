"""Routes for dead letters: list, show, admit again, drop."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path

from broker.queues.dead_letters import KEPT
from deploy.control_plane.routes import views
from deploy.control_plane.routes.context import By, InContext
from deploy.control_plane.routes.paging import page_of
from deploy.control_plane.web.paging import Page
from schemas.control_api import Accepted, DeadLetters, LetterDetail

router = APIRouter(prefix="/v1/dead-letters", tags=["dead letters"])
Letter = Annotated[str, Path(pattern=r"^[0-9]{1,19}-[0-9]{1,19}$", description="Id of the letter, from the list.")]


@router.get("")
def list_letters(context: InContext, page: Annotated[Page, page_of(100, KEPT)]) -> DeadLetters:
    """The messages that could not be processed and are kept. A cursor is the id of a letter."""
    return views.letters(context.broker, page)


@router.get("/{id}")
def show_letter(context: InContext, id: Letter) -> LetterDetail:
    """A dead letter in full, with its payload."""
    return views.letter(context.broker, id)


@router.post("/{id}/requeue")
def requeue_letter(context: InContext, by: By, id: Letter) -> Accepted:
    """Admit the letter's prompt group again, before all others."""
    changed = views.requeue(context.broker, id, context.name, by)
    return views.requeued(changed, context.poller.latest.state)


@router.delete("/{id}")
def drop_letter(context: InContext, by: By, id: Letter) -> Accepted:
    """Delete a dead letter."""
    views.drop(context.broker, id, context.name, by)
    return views.dropped(context.poller.latest.state)
