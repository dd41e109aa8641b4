"""Routes for dead letters: list, show, admit again, drop."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query

from broker.api.context import By, InContext
from broker.api.problems import Refusal
from broker.api.readers import letter_detail, letter_head
from broker.dead_letters import KEPT
from broker.eval_ids import EVAL_BASE
from schemas.status import Accepted, DeadLetters, LetterDetail

router = APIRouter(prefix="/v1/dead-letters", tags=["dead letters"])
Letter = Annotated[str, Path(pattern=r"^[0-9]{1,19}-[0-9]{1,19}$", description="Id of the letter, from the list.")]


@router.get("")
def list_letters(context: InContext, limit: Annotated[int, Query(ge=1, le=KEPT)] = 100) -> DeadLetters:
    """The newest messages that could not be processed, newest first."""
    letters = [letter_head(filed) for filed in reversed(context.broker.dead_letters.list(limit))]
    return DeadLetters(letters=letters, total=context.broker.ledger.state().dead_letters)


@router.get("/{id}")
def show_letter(context: InContext, id: Letter) -> LetterDetail:
    """One whole, with what it carried."""
    return letter_detail(context.broker.dead_letters.get(id))


@router.post("/{id}/requeue")
def requeue_letter(context: InContext, by: By, id: Letter) -> Accepted:
    """Admit the letter's prompt group again, before all others."""
    task_id = context.broker.dead_letters.get(id).letter.task_id
    if not 0 <= task_id < EVAL_BASE:
        raise Refusal(409, f"dead letter {id} belongs to no training prompt, it can only be dropped")
    answer = context.broker.dead_letters.requeue(id)
    if answer == "active":
        raise Refusal(409, f"the prompt group of dead letter {id} is still in the pipeline; wait until it has ended")
    if answer == "ended":
        raise Refusal(409, f"the prompt group of dead letter {id} went on without this sample: drop the letter")
    if answer == "ok":
        context.note("requeue", f"the prompt group of dead letter {id} is admitted again, ordered", by)
    return _accepted(context, "requeue", "its prompt group is admitted next", changed=answer == "ok")


@router.delete("/{id}")
def drop_letter(context: InContext, by: By, id: Letter) -> Accepted:
    """Delete one."""
    context.broker.dead_letters.drop(id)
    context.note("drop", f"dead letter {id} deleted", by)
    return _accepted(context, "drop", "deleted")


def _accepted(context: InContext, order: str, text: str, changed: bool = True) -> Accepted:
    state = context.watch.latest.state
    fields = {"order": order, "changed": changed, "done": True, "waiting_for": [], "state": state, "text": text}
    return Accepted.model_validate(fields)
