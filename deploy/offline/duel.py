"""Two models on the same held-out prompts: who earns more, as a share and as a difference of Elo ratings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Duel:
    """A comparison over prompts that both answered; a prompt is won by the higher mean reward of its samples.

    Half a win is added to both sides, so that a model that wins everything is ahead by a finite number.
    """

    wins: int
    ties: int
    losses: int

    @classmethod
    def of(cls, rewards: Sequence[float | None], others: Sequence[float | None]) -> Duel:
        """Compare mean rewards by prompt, None where no sample was scored."""
        pairs = [(one, two) for one, two in zip(rewards, others, strict=True) if one is not None and two is not None]
        wins, losses = (sum(sign * (one - two) > 0 for one, two in pairs) for sign in (1, -1))
        return cls(wins, len(pairs) - wins - losses, losses)

    @property
    def share(self) -> float:
        """Share of the prompts that the first model wins, ties counted half."""
        return (self.wins + self.ties / 2 + 0.5) / (self.wins + self.ties + self.losses + 1)

    def elo(self) -> tuple[float, float, float]:
        """Return the first model's lead in Elo points, and the bounds of its interval of 95 %.

        400 * log10(p / (1 - p)), p the share; the bounds are Wilson's, which take a tie for half a win.
        """
        count, z = self.wins + self.ties + self.losses + 1, 1.96
        middle = (self.share + z * z / (2 * count)) / (1 + z * z / count)
        spread = z / (1 + z * z / count) * math.sqrt(self.share * (1 - self.share) / count + (z / (2 * count)) ** 2)
        low, lead, high = (400 * math.log10(p / (1 - p)) for p in (middle - spread, self.share, middle + spread))
        return lead, low, high

    def as_json(self) -> dict[str, Any]:
        """Return counts and ratings."""
        lead, low, high = (round(value, 1) for value in self.elo())
        return {"wins": self.wins, "ties": self.ties, "losses": self.losses, "elo": lead, "elo_95": [low, high]}

    def __str__(self) -> str:
        lead, low, high = self.elo()
        return f"{self.wins} won, {self.ties} tied, {self.losses} lost: Elo {lead:+.0f} ({low:+.0f} to {high:+.0f})"
