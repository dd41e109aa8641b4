"""Games of TextArena for one player, or for several, all of whom are the policy. Needs the package textarena."""

from __future__ import annotations

import random
import re
import threading
from typing import Any

# Games draw from the one generator that all threads of the process share.
_DRAWING = threading.Lock()


class TextArenaGame:
    """A game, by its id, such as ``GuessTheNumber-v0``; args: of ``textarena.make``. Its reward comes at its end.

    players: with more than one the policy plays against itself, as ``player_0``, ``player_1`` and so on. Without a
    suffix the game is played raw: the wrappers of textarena say all that was said before once more.
    """

    def __init__(self, id: str, args: dict[str, Any] | None = None, players: int = 1) -> None:
        import textarena

        self._players = players
        self._game = textarena.make(env_id=f"{id}-raw" if re.search(r"-v\d+$", id) else id, **(args or {}))

    def reset(self, task: dict[str, Any]) -> Any:
        with _DRAWING:
            random.seed(task["seed"])
            self._game.reset(num_players=self._players, seed=task["seed"])
        player, text = self._observe()
        return text if self._players == 1 else {"player": player, "text": text}

    def step(self, text: str) -> Any:
        done, _ = self._game.step(action=text)
        if not done:
            player, observed = self._observe()
            return (observed, None, False) if self._players == 1 else {"player": player, "text": observed}
        rewards, info = self._game.close()
        if self._players > 1:
            return {"rewards": {f"player_{place}": float(value) for place, value in rewards.items()}, "done": True}
        reason = str((info or {}).get(0, {}).get("reason", ""))
        return reason, float((rewards or {}).get(0, 0.0)), True

    def _observe(self) -> tuple[str, str]:
        player, observation = self._game.get_observation()
        name = f"player_{player}"
        if not isinstance(observation, list):
            return name, str(observation)
        # What is new since the last time, the player's own words among it.
        return name, "\n".join(str(one[1]) for one in observation if one[0] != player)
