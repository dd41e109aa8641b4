"""Routes for dead letters: list, show, requeue, drop."""

from typing import Annotated, Any, TypeVar

import msgspec
from fastapi import APIRouter, Path

from broker.queues.dead_letters import KEPT, StoredLetter
from deploy.control_plane.routes.context import By, InContext, accepted
from deploy.control_plane.routes.decoding import plain
from deploy.control_plane.routes.paging import page_of
from deploy.control_plane.web.paging import Page
from deploy.control_plane.web.refusal import Refusal
from schemas.control_api.dead_letters import DeadLetters, LetterDetail, LetterHead
from schemas.control_api.orders import Accepted

router = APIRouter(prefix="/v1/dead-letters", tags=["dead letters"])
Shown = TypeVar("Shown", bound=LetterHead)
NOT_REQUEUED = {
    "active": "is still in the pipeline; wait until it has ended",
    "ended": "has not failed (it finished without this sample, or the broker was repaired), so sampling it again could"
    " train it twice: drop the letter",
}
Letter = Annotated[str, Path(pattern=r"^[0-9]{1,19}-[0-9]{1,19}$", description="Id of the letter, from the list.")]


@router.get("")
def list_letters(context: InContext, page: Annotated[Page, page_of(100, KEPT)]) -> DeadLetters:
    """List the stored messages that could not be processed. A cursor is the id of a letter."""
    found, following = context.broker.dead_letters.page(page.limit, page.entry(), page.newest)
    heads = [_shown(LetterHead, filed) for filed in found]
    return DeadLetters(letters=heads, total=context.broker.ledger.read_state().dead_letters, next=following)


@router.get("/{id}")
def show_letter(context: InContext, id: Letter) -> LetterDetail:
    """Return a dead letter with its payload."""
    filed = context.broker.dead_letters.get(id)
    return _shown(LetterDetail, filed, payload=payload(filed.letter.payload))


@router.post("/{id}/requeue")
def requeue_letter(context: InContext, by: By, id: Letter) -> Accepted:
    """Requeue the letter's prompt group, before all other prompts."""
    answer = context.broker.dead_letters.requeue(id)
    if answer in NOT_REQUEUED:
        raise Refusal(409, f"the prompt group of dead letter {id} {NOT_REQUEUED[answer]}")
    if answer == "ok":
        context.record_event("requeue", f"the prompt group of dead letter {id} is requeued", by)
    return accepted(context.poller.latest.state, "requeue", answer == "ok", "its prompt group is admitted next")


@router.delete("/{id}")
def drop_letter(context: InContext, by: By, id: Letter) -> Accepted:
    """Delete a dead letter."""
    context.broker.dead_letters.drop(id)
    context.record_event("drop", f"dead letter {id} deleted", by)
    return accepted(context.poller.latest.state, "drop", True, "deleted")


def _shown(kind: type[Shown], filed: StoredLetter, **more: Any) -> Shown:
    letter, time = filed.letter, int(filed.id.partition("-")[0]) / 1000
    task_id = letter.task_id if letter.task_id >= 0 else None
    sample = letter.sample if letter.sample >= 0 else None
    return kind.of(filed, letter, time=time, task_id=task_id, sample=sample, bytes=len(letter.payload), **more)


def payload(data: bytes) -> Any:
    """Return a payload as JSON values if it is MessagePack, else as hexadecimal digits."""
    try:
        return plain(msgspec.msgpack.decode(data))
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError):
        return data.hex()
