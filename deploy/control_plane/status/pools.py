"""The pools of a run beside each other: who generates, how fast, and how far from the trainer's log-probabilities."""

from collections.abc import Mapping, Sequence

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
        speed, share = round(sum(one.tokens_per_s for one in live), 1), count / trained if trained else None
        gap = weighted / count if count else None
        pool = PoolStatus(name=name, generators=len(live), tokens_per_s=speed, trained_share=share, logprob_gap=gap)
        found.append(pool)
    return found


def differences(services: Sequence[ServiceStatus]) -> list[str]:
    """Return for each pool with different drivers, packages or GPUs what live generators have, in a line."""
    pools: dict[str, dict[str, dict[str, list[str]]]] = {}
    for one in services:
        for what, value in one.software.items() if one.role == "generator" and one.live else ():
            pools.setdefault(one.pool, {}).setdefault(what, {}).setdefault(value, []).append(one.name)
    found = []
    for pool, kinds in pools.items():
        differing = [f"{what} {_with_owners(values)}" for what, values in kinds.items() if len(values) > 1]
        if differing:
            found.append(f"generators{f' of pool {pool}' if pool else ''} differ: {'; '.join(differing)}")
    return found


def _with_owners(values: Mapping[str, Sequence[str]]) -> str:
    more = {value: f" and {len(names) - 1} more" if len(names) > 1 else "" for value, names in values.items()}
    return ", ".join(f"{value} ({names[0]}{more[value]})" for value, names in values.items())
