"""Trajectories and dead letters as the API tells them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import msgspec

from broker.api.tokens import Decode, pieces
from broker.dead_letters import Filed
from broker.samples import Seen
from schemas.status import LetterDetail, LetterHead, TokenTable, TrajectoryDetail, TrajectoryHead, Turn

HEAD_CHARACTERS = 200


@dataclass(frozen=True)
class Search:
    """What a search for trajectories asks for; None asks for nothing. version: one that sampled any of its tokens."""

    task_id: int | None = None
    version: int | None = None
    finish: str | None = None
    state: str | None = None
    kind: str | None = None
    reward_min: float | None = None
    reward_max: float | None = None

    def wants(self, seen: Seen) -> bool:
        """Whether a trajectory fits."""
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


def head(seen: Seen) -> TrajectoryHead:
    """One line of a list."""
    return TrajectoryHead.model_validate(_head(seen))


def _head(seen: Seen) -> dict[str, Any]:
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
        "tokens": body.loss_mask.data.count(1),
        "generator": body.generator,
        "time": seen.time,
        "prompt": body.prompt[:HEAD_CHARACTERS],
        "completion": body.completion[:HEAD_CHARACTERS],
    }


def detail(seen: Seen, decode: Decode | None) -> TrajectoryDetail:
    """One in full, with what is known of each token."""
    body, score = seen.trajectory, seen.score
    ids, mask = body.tokens.numpy().tolist(), body.loss_mask.numpy().tolist()
    versions, logprobs = body.versions().tolist(), body.logprobs.numpy().tolist()
    table = TokenTable(
        id=ids,
        text=None if decode is None else pieces(decode, ids),
        logprob=[value if own else None for value, own in zip(logprobs, mask, strict=True)],
        version=[value if own else None for value, own in zip(versions, mask, strict=True)],
        mask=mask,
    )
    return TrajectoryDetail.model_validate(
        _head(seen)
        | {
            "full_prompt": body.prompt,
            "full_completion": body.completion,
            "seconds": body.seconds,
            "components": dict(score.components) if score else {},
            "score_reason": score.reason if score else "",
            "turns": [Turn(role=turn.role, start=turn.start, end=turn.end) for turn in body.turns],
            "token_table": table,
            "data": plain(body.data),
        }
    )


def letter_head(filed: Filed) -> LetterHead:
    """One line of the list of dead letters."""
    return LetterHead.model_validate(_letter(filed))


def letter_detail(filed: Filed) -> LetterDetail:
    """One dead letter whole."""
    return LetterDetail.model_validate(_letter(filed) | {"payload": payload(filed.letter.payload)})


def _letter(filed: Filed) -> dict[str, Any]:
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
    """MessagePack as JSON would have it, anything else as hexadecimal digits."""
    try:
        return plain(msgspec.msgpack.decode(data))
    except (msgspec.MsgspecError, UnicodeDecodeError, ValueError):
        return data.hex()


def plain(value: Any) -> Any:
    """As JSON can hold it: bytes in base64, no NaN."""
    return json.loads(msgspec.json.encode(value))
