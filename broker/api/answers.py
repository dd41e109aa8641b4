"""What the routes and the command line answer alike, straight from a broker: dead letters, trajectories, settings.

Every change is noted in the timeline with who asked for it. Refusal says why something is not done.
"""

from __future__ import annotations

from typing import Literal

from broker.api.problems import Refusal
from broker.api.readers import Search, detail, head, letter_detail, letter_head
from broker.api.sse import timeline_event
from broker.api.tokens import Decode
from broker.client import Broker
from broker.eval_ids import EVAL_BASE
from broker.ledger import Setting
from schemas.messages import Event
from schemas.status import (
    Accepted,
    DeadLetters,
    LetterDetail,
    RunState,
    SettingsChange,
    Timeline,
    Trajectories,
    TrajectoryDetail,
)

SETTINGS: tuple[Setting, ...] = ("staleness", "batch", "concurrency")
EXAMINED = 2000
"""A search for trajectories looks through so many, the newest first."""


def note(
    broker: Broker, service: str, name: str, text: str, by: str, level: Literal["info", "warning"] = "info"
) -> None:
    """Write into the timeline what was ordered, and by whom. service: the one that took the order."""
    broker.events.emit(Event(name=name, service=service, level=level, text=f"{text} by {by}", data={"by": by}))


def timeline(broker: Broker, limit: int) -> Timeline:
    """The newest events, oldest first."""
    return Timeline(events=[timeline_event(noted) for noted in broker.events.newest(limit)])


def letters(broker: Broker, limit: int) -> DeadLetters:
    """The newest messages that could not be processed, newest first."""
    found = [letter_head(filed) for filed in reversed(broker.dead_letters.list(limit))]
    return DeadLetters(letters=found, total=broker.ledger.state().dead_letters)


def letter(broker: Broker, id: str) -> LetterDetail:
    """One whole; DataError when it is not there."""
    return letter_detail(broker.dead_letters.get(id))


def requeue(broker: Broker, id: str, service: str, by: str) -> bool:
    """Admit the letter's prompt group again, before all others; False if it was to be so already."""
    task_id = broker.dead_letters.get(id).letter.task_id
    if not 0 <= task_id < EVAL_BASE:
        raise Refusal(409, f"dead letter {id} belongs to no training prompt, it can only be dropped")
    answer = broker.dead_letters.requeue(id)
    if answer == "active":
        raise Refusal(409, f"the prompt group of dead letter {id} is still in the pipeline; wait until it has ended")
    if answer == "ended":
        raise Refusal(
            409,
            f"the prompt group of dead letter {id} is no longer a failed one (it went on without this sample, or the"
            " broker was mended since), making it again could train it twice: drop the letter",
        )
    if answer == "ok":
        note(broker, service, "requeue", f"the prompt group of dead letter {id} is admitted again, ordered", by)
    return answer == "ok"


def drop(broker: Broker, id: str, service: str, by: str) -> None:
    """Delete a letter; DataError when it is not there."""
    broker.dead_letters.drop(id)
    note(broker, service, "drop", f"dead letter {id} deleted", by)


def requeued(changed: bool, state: RunState) -> Accepted:
    """What is said of a letter that was requeued."""
    text = "its prompt group is admitted next"
    return Accepted(order="requeue", changed=changed, done=True, waiting_for=[], state=state, text=text)


def dropped(state: RunState) -> Accepted:
    """What is said of a letter that was dropped."""
    return Accepted(order="drop", changed=True, done=True, waiting_for=[], state=state, text="deleted")


def trajectories(broker: Broker, search: Search, limit: int) -> Trajectories:
    """Search what is in the pipeline, and the trained samples that are kept for reading; newest first."""
    found = broker.samples.search(search.wants, limit, EXAMINED, search.state == "trained")
    return Trajectories(
        trajectories=[head(seen) for seen in found.items], examined=found.examined, complete=found.complete
    )


def trajectory(broker: Broker, task_id: int, sample: int, decode: Decode | None) -> TrajectoryDetail:
    """One in full; Refusal when it is gone."""
    seen = broker.samples.get(task_id, sample)
    if seen is None:
        raise Refusal(
            404, f"sample {sample} of task {task_id} is not in the pipeline, and not among the trained ones kept"
        )
    return detail(seen, decode)


def change(broker: Broker, wanted: SettingsChange, service: str, by: str) -> None:
    """Change what is given of the staleness bound, the batch and the samples in flight of each generator."""
    given = wanted.model_fields_set
    if not given:
        raise Refusal(422, f"nothing to change: give one of {', '.join(SETTINGS)}")
    for name in SETTINGS:
        if name in given:
            value = getattr(wanted, name)
            if not broker.ledger.change(name, value):
                raise Refusal(409, "the run has no trainer yet that could follow; try again when it has begun")
            text = f"{name} set to {value}" if value is not None else f"{name} set back to the configuration's"
            note(broker, service, "settings", text, by)
