"""Dead letters, trajectories and settings as the routes and the command line both show and change them.

Every change is noted in the timeline with who asked for it; Refusal says why something is not done. A trajectory is
shown token by token where the model's tokenizer.json is at hand.
"""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec
import structlog

from broker.client import Broker
from broker.flow.ledger import Setting
from broker.queues.dead_letters import StoredLetter
from broker.queues.tasks import EVAL_BASE
from broker.telemetry.trajectories import StoredTrajectory
from deploy.control_plane.routes.conversation import spoken_messages
from deploy.control_plane.web.paging import Page, cut, wrong
from deploy.control_plane.web.refusal import Refusal
from deploy.control_plane.web.sse import timeline_event
from schemas.control_api import (
    Accepted,
    DeadLetters,
    ImageRange,
    LetterDetail,
    LetterHead,
    RunState,
    SegmentRange,
    SettingsChange,
    Timeline,
    TokenTable,
    Trajectories,
    TrajectoryDetail,
    TrajectoryHead,
    TurnRange,
    Weights,
    WeightVersion,
)
from schemas.errors import RefusedError
from schemas.messages import Event

BROKEN = "\ufffd"
"""A decoder's output for half a character."""
JOINED = 8
"""Most tokens that are looked at together for a whole character, which has up to four bytes."""
DEEPEST = 64

log = structlog.get_logger()
Decode = Callable[[Sequence[int]], str]


def pieces(decode: Decode, ids: Sequence[int]) -> list[str]:
    """Return the text that each token adds; of a character of several tokens, the last has it, the others are empty.

    A token is decoded beside the one before it: alone, some tokenizers would lose the space between words. What is no
    character with the JOINED tokens from it on never becomes one.
    """
    texts = [""] * len(ids)
    start = read = 0
    for last in range(1, len(ids) + 1):
        end, now = last, decode(ids[start:last])
        if now.endswith(BROKEN) and last < len(ids):
            if last - read < JOINED:
                continue
            end, now = read + 1, decode(ids[start : read + 1])
        texts[end - 1] = now[len(decode(ids[start:read])) :]
        start, read = read, end
    return texts


def load_decoder(model_path: str) -> Decode | None:
    """Decoder of the model's folder; None where there is no tokenizer.json or no ``tokenizers`` package."""
    file = Path(model_path) / "tokenizer.json"
    if not file.is_file():
        return None
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return None
    tokenizer: Any = Tokenizer.from_file(str(file))

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=False))

    return decode


SETTINGS: tuple[Setting, ...] = get_args(Setting)
EXAMINED = 2000
"""Most trajectories that a page of a search reads."""


def record_event(
    broker: Broker, service: str, name: str, text: str, by: str, level: Literal["info", "warning"] = "info"
) -> None:
    """Add an event to the timeline: what was ordered, and by whom. service: the one that took the order."""
    broker.events.emit(Event(name=name, service=service, level=level, text=f"{text} by {by}", data={"by": by}))


def timeline(broker: Broker, page: Page) -> Timeline:
    """A page of the events that are kept."""
    found, following = broker.events.page(page.limit, page.entry(), page.newest)
    return Timeline(events=[timeline_event(noted) for noted in found], next=following)


def letters(broker: Broker, page: Page) -> DeadLetters:
    """A page of the messages that could not be processed and are kept."""
    found, following = broker.dead_letters.page(page.limit, page.entry(), page.newest)
    heads = [letter_head(filed) for filed in found]
    return DeadLetters(letters=heads, total=broker.ledger.read_state().dead_letters, next=following)


def letter(broker: Broker, id: str) -> LetterDetail:
    """Return a dead letter in full; DataError when there is none of this id."""
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
        record_event(broker, service, "requeue", f"the prompt group of dead letter {id} is admitted again, ordered", by)
    return answer == "ok"


def drop(broker: Broker, id: str, service: str, by: str) -> None:
    """Delete a letter; DataError when it is not there."""
    broker.dead_letters.drop(id)
    record_event(broker, service, "drop", f"dead letter {id} deleted", by)


def requeued(changed: bool, state: RunState) -> Accepted:
    """Return the answer to a requeued dead letter."""
    text = "its prompt group is admitted next"
    return Accepted(order="requeue", changed=changed, done=True, waiting_for=[], state=state, text=text)


def dropped(state: RunState) -> Accepted:
    """Return the answer to a dropped dead letter."""
    return Accepted(order="drop", changed=True, done=True, waiting_for=[], state=state, text="deleted")


def trajectories(broker: Broker, search: Search, page: Page) -> Trajectories:
    """Search the trained samples that are kept for reading, and what is in the pipeline."""
    if page.cursor is not None and not re.fullmatch(r"(trained|pipeline):[0-9]{1,19}-[0-9]{1,19}", page.cursor):
        raise wrong(page.cursor)
    found = broker.trajectory_store.search(
        search.wants, page.limit, EXAMINED, search.state == "trained", page.cursor, page.newest
    )
    heads = [head(seen) for seen in found.items]
    return Trajectories(trajectories=heads, examined=found.examined, complete=found.complete, next=found.next)


def trajectory(broker: Broker, task_id: int, sample: int, decode: Decode | None) -> TrajectoryDetail:
    """Return a trajectory in full; Refusal when it is gone."""
    seen = broker.trajectory_store.get(task_id, sample)
    if seen is None:
        raise Refusal(
            404, f"sample {sample} of task {task_id} is not in the pipeline, and not among the trained ones kept"
        )
    return detail(seen, decode)


def change(broker: Broker, wanted: SettingsChange, service: str, by: str) -> None:
    """Change what is given of the settings that can change while the run goes on; all or none.

    Refusal when they do not fit together.
    """
    given = wanted.model_fields_set
    if not given:
        raise Refusal(422, f"nothing to change: give one of {', '.join(SETTINGS)}")
    if wanted.steps is not None and wanted.steps <= (step := broker.ledger.read_state().step):
        raise Refusal(409, f"the run has taken {step} steps: give it more than these, or stop it")
    values: dict[Setting, float | None] = {name: getattr(wanted, name) for name in SETTINGS if name in given}
    try:
        begun = broker.ledger.change_settings(values)
    except RefusedError as error:
        raise Refusal(409, str(error)) from error
    if not begun:
        raise Refusal(409, "the run has no trainer yet that could follow; try again when it has begun")
    for name, value in values.items():
        text = f"{name} set to {value}" if value is not None else f"{name} set back to the configuration's"
        record_event(broker, service, "settings", text, by)


def weights(broker: Broker, page: Page) -> Weights:
    """Return a page of the weight versions that are kept."""
    shown, following = cut(broker.weights.published(), lambda one: (one.version, ""), page)
    return Weights(
        next=following,
        weights=[
            WeightVersion(
                version=one.version,
                step=one.step,
                leader_term=one.leader_term,
                transport=(one.state if one.whole or one.delta is None else one.delta.payload).uri.partition(":")[0],
                bytes=one.state.size,
                whole=one.whole,
                delta_base=one.delta.base if one.delta else None,
                delta_bytes=one.delta.payload.size if one.delta else None,
                tensors=len(one.tensors),
                adapter_rank=one.adapter.rank if one.adapter else None,
            )
            for one in shown
        ],
    )


HEAD_CHARACTERS = 200


@dataclass(frozen=True)
class Search:
    """Filter of a search for trajectories; None matches all. version: one that sampled any of its tokens."""

    task_id: int | None = None
    version: int | None = None
    finish: str | None = None
    state: str | None = None
    kind: str | None = None
    reward_min: float | None = None
    reward_max: float | None = None

    def wants(self, seen: StoredTrajectory) -> bool:
        """Return whether a trajectory passes the filter."""
        body, score = seen.trajectory, seen.score
        if self.reward_min is not None or self.reward_max is not None:
            if score is None or score.status != "ok":
                return False
            if self.reward_min is not None and score.reward < self.reward_min:
                return False
            if self.reward_max is not None and score.reward > self.reward_max:
                return False
        return (
            self.task_id in (None, body.task_id)
            and self.finish in (None, body.finish)
            and self.state in (None, seen.state)
            and self.kind in (None, body.kind)
            and (self.version is None or any(span.version == self.version for span in body.spans))
        )


def head(seen: StoredTrajectory) -> TrajectoryHead:
    """Return a trajectory as a list shows it."""
    return TrajectoryHead.model_validate(_head(seen))


def _head(seen: StoredTrajectory) -> dict[str, Any]:
    body, score = seen.trajectory, seen.score
    versions = [span.version for span in body.spans]
    return {
        "task_id": body.task_id,
        "sample": body.sample,
        "kind": body.kind,
        "state": seen.state,
        "step": seen.step,
        "reward": score.reward if score and score.status == "ok" else None,
        "score_status": score.status if score else None,
        "oldest_version": min(versions, default=None),
        "newest_version": max(versions, default=None),
        "finish": body.finish,
        "tokens": body.sampled_tokens,
        "calls": body.calls,
        "rows": max(1, len(body.segments)),
        "generator": body.generator,
        "time": seen.time,
        "prompt": body.prompt[:HEAD_CHARACTERS],
        "completion": body.completion[:HEAD_CHARACTERS],
    }


def detail(seen: StoredTrajectory, decode: Decode | None) -> TrajectoryDetail:
    """Return a trajectory in full, with a table of its tokens."""
    body, score = seen.trajectory, seen.score
    ids, mask = body.tokens.numpy().tolist(), body.loss_mask.numpy().tolist()
    versions, logprobs = body.versions().tolist(), body.logprobs.numpy().tolist()
    # No character begins in one segment and ends in the next.
    parts = [ids[segment.start : segment.end] for segment in body.segments] or [ids]
    table = TokenTable(
        id=ids,
        text=None if decode is None else [text for part in parts for text in pieces(decode, part)],
        logprob=[value if own else None for value, own in zip(logprobs, mask, strict=True)],
        version=[value if own else None for value, own in zip(versions, mask, strict=True)],
        mask=mask,
    )
    return TrajectoryDetail.model_validate(
        _head(seen)
        | {
            "full_prompt": body.prompt,
            "full_completion": body.completion,
            "temperature": body.temperature,
            "seconds": body.seconds,
            "components": dict(score.components) if score else {},
            "score_reason": score.reason if score else "",
            "turns": [TurnRange(**msgspec.structs.asdict(turn)) for turn in body.turns],
            "segments": [SegmentRange(**msgspec.structs.asdict(segment)) for segment in body.segments],
            "images": [ImageRange(**msgspec.structs.asdict(image)) for image in body.images],
            "messages": spoken_messages(body.data.get("messages")),
            "workflow_reward": body.reward,
            "metrics": body.metrics,
            "token_table": table,
            "data": plain(body.data),
        }
    )


def letter_head(filed: StoredLetter) -> LetterHead:
    """Return a dead letter as a list shows it."""
    return LetterHead.model_validate(_letter(filed))


def letter_detail(filed: StoredLetter) -> LetterDetail:
    """Return a dead letter with its payload."""
    return LetterDetail.model_validate(_letter(filed) | {"payload": payload(filed.letter.payload)})


def _letter(filed: StoredLetter) -> dict[str, Any]:
    letter = filed.letter
    return {
        "id": filed.id,
        "time": int(filed.id.partition("-")[0]) / 1000,
        "source": letter.source,
        "reason": letter.reason,
        "deliveries": letter.deliveries,
        "task_id": letter.task_id if letter.task_id >= 0 else None,
        "sample": letter.sample if letter.sample >= 0 else None,
        "bytes": len(letter.payload),
    }


def payload(data: bytes) -> Any:
    """Return a payload as JSON values if it is MessagePack, else as hexadecimal digits."""
    try:
        return plain(msgspec.msgpack.decode(data))
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError):
        return data.hex()


def plain(value: Any, depth: int = 0) -> Any:
    """Return what MessagePack can hold as JSON can: bytes in base64, no NaN, keys as text, at most DEEPEST levels."""
    if depth > DEEPEST:
        return "..."
    if isinstance(value, dict):
        return {str(key): plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, depth + 1) for item in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, str | int) else str(value)
