"""Groups of whole episodes that begin in one state, for advantages that compare them (GRPO, arXiv:2402.03300)."""

from collections.abc import Sequence

import numpy as np

from producers.embodied.environment_process import EnvironmentLost
from producers.embodied.fragment_collector import (
    MOST_LOSSES,
    Collected,
    Episodes,
    FragmentCollector,
    PolicyFunction,
    pack,
    spans_of,
)
from schemas.messages.fragments import TRUNCATED


def play_group(collector: FragmentCollector, seed: int, steps: int, actor: PolicyFunction) -> list[Collected] | None:
    """Play an episode in each environment from one state; None if the actor ends. Steps after its end are dropped."""
    parts = play_episodes(collector, seed, steps, actor)
    return None if parts is None else [_first_episode(parts, env) for env in range(collector.envs)]


def play_episodes(collector: FragmentCollector, seed: int, steps: int, actor: PolicyFunction) -> list[Collected] | None:
    """Play all environments from one state, ``steps`` at a time, until each ends an episode; None if the actor ends.

    What a lost process breaks off is played again from its seed; EnvironmentLost after MOST_LOSSES losses.
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
            return parts
    what = "group" if collector.envs > 1 else "episode"
    raise EnvironmentLost(f"the {what} of seed {seed} was broken off {MOST_LOSSES} times")


def _first_episode(parts: Sequence[Collected], env: int) -> Collected:
    """Cut out the first episode of an environment, as a fragment of its own."""
    found = [part.fragment.numpy() for part in parts]
    joined = {
        name: np.concatenate([part[name][:, env] for part in found])
        for name in ("actions", "logprobs", "rewards", "ends")
    }
    seen = np.concatenate([*(part["observations"][:-1, env] for part in found), found[-1]["observations"][-1:, env]])
    length = int(np.flatnonzero(joined["ends"])[0]) + 1
    lasts = [last for part in found for last in part["last"][np.nonzero(part["ends"] == TRUNCATED)[1] == env]]
    truncated = joined["ends"][length - 1] == TRUNCATED
    versions = np.concatenate([np.repeat(span.version, span.end - span.start) for part in parts for span in part.spans])
    at, episodes = next((part.episodes.envs.index(env), part.episodes) for part in parts if env in part.episodes.envs)
    arrays = {name: values[:length] for name, values in joined.items()}
    arrays |= {"observations": seen[: length + 1], "last": lasts[0] if truncated else np.zeros(0, seen.dtype)}
    own = Episodes(
        [episodes.returns[at]], [episodes.lengths[at]], episodes.once[at : at + 1], episodes.at_end[at : at + 1]
    )
    return Collected(pack(1, arrays), list(spans_of(versions[:length])), own)
