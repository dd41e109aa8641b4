"""The pools of a run beside each other: who generates, how fast, and how far from the trainer's log-probabilities."""

from collections.abc import Sequence

from deploy.control_plane.status.series import MetricsSeries
from schemas.control_api.status import PoolStatus, ServiceStatus


def pool_statuses(
    names: Sequence[str], services: Sequence[ServiceStatus], history: MetricsSeries, steps: int
) -> list[PoolStatus]:
    """Return the status of each pool; what is trained is counted over the last ``steps``."""
    tokens = {name: history.last(f"pool/{name}/tokens", steps) for name in names}
    trained = sum(sum(counts) for counts in tokens.values())
    found = []
    for name in names:
        live = [one for one in services if one.role == "generator" and one.pool == name and one.live]
        gaps, count = history.last(f"pool/{name}/gap", steps), sum(tokens[name])
        weighted = sum(gap * of for gap, of in zip(gaps, tokens[name], strict=False))
        found.append(
            PoolStatus(
                name=name,
                generators=len(live),
                tokens_per_s=round(sum(one.tokens_per_s for one in live), 1),
                trained_share=count / trained if trained else None,
                logprob_gap=weighted / count if count else None,
            )
        )
    return found
