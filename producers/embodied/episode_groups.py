"""Groups of whole episodes that begin in one state, for advantages that compare them (GRPO, arXiv:2402.03300)."""

from collections.abc import Sequence

import numpy as np

from producers.embodied.environment_process import EnvironmentLost
from producers.embodied.fragment_collector import MOST_LOSSES, Actor, Collected, Episodes, FragmentCollector, spans_of
from schemas.codec import Array
from schemas.messages.fragments import TRUNCATED, Fragment


def play_group(collector: FragmentCollector, seed: int, steps: int, actor: Actor) -> list[Collected] | None:
    """Play an episode in each environment from the same state, ``steps`` at a time; None if the actor ends.

    An environment whose episode has ended plays others, which count nowhere, until all have ended. A group that a
    lost process breaks off is played again from its seed; EnvironmentLost if that happens again and again.
    """
    for _ in range(MOST_LOSSES):
        collector.reset(seed, same=True)
        parts: list[Collected] = []
        ended = np.zeros(collector.envs, dtype=bool)
        while not ended.all():
            found = collector.collect(steps, actor)
            if found is None:
                return None
            if found.episodes.restarts:
                break
            parts.append(found)
            ended |= found.fragment.numpy()["ends"].any(0)
        else:
            return [_first_episode(parts, env) for env in range(collector.envs)]
    raise EnvironmentLost(f"the group of seed {seed} was broken off {MOST_LOSSES} times")


def _first_episode(parts: Sequence[Collected], env: int) -> Collected:
    """Cut out the first episode of an environment, as a fragment of its own."""
    arrays = [part.fragment.numpy() for part in parts]
    joined = {
        name: np.concatenate([part[name][:, env] for part in arrays])
        for name in ("actions", "logprobs", "rewards", "ends")
    }
    seen = np.concatenate([*(part["observations"][:-1, env] for part in arrays), arrays[-1]["observations"][-1:, env]])
    length = int(np.flatnonzero(joined["ends"])[0]) + 1
    lasts = [last for part in arrays for last in part["last"][np.nonzero(part["ends"] == TRUNCATED)[1] == env]]
    truncated = joined["ends"][length - 1] == TRUNCATED
    versions = np.concatenate([np.repeat(span.version, span.end - span.start) for part in parts for span in part.spans])
    at, episodes = next((part.episodes.envs.index(env), part.episodes) for part in parts if env in part.episodes.envs)
    acts = "i4" if joined["actions"].dtype == np.int32 else "f4"
    kind = {name: "f4" for name in joined} | {"ends": "u1", "actions": acts}
    columns = {name: Array.of(values[:length].reshape(-1), kind[name]) for name, values in joined.items()}
    what = "u1" if seen.dtype == np.uint8 else "f4"
    fragment = Fragment(
        envs=1,
        observations=Array.of(seen[: length + 1].reshape(-1), what),
        last=Array.of(lasts[0] if truncated else np.zeros(0), what),
        **columns,
    )
    own = Episodes(
        [episodes.returns[at]], [episodes.lengths[at]], episodes.once[at : at + 1], episodes.at_end[at : at + 1]
    )
    return Collected(fragment, list(spans_of(versions[:length])), own)
