"""Games of TextArena for one player. Needs the package textarena."""

from __future__ import annotations

import re
from typing import Any


class TextArenaGame:
    """A game, by its id, such as ``GuessTheNumber-v0``; args: of ``textarena.make``. Its reward comes at its end.

    Without a suffix the game is played raw: the wrappers of textarena say all that was said before once more.
    """

    def __init__(self, id: str, args: dict[str, Any] | None = None) -> None:
        import textarena

        self._game = textarena.make(env_id=f"{id}-raw" if re.search(r"-v\d+$", id) else id, **(args or {}))

    def reset(self, task: dict[str, Any]) -> str:
        self._game.reset(num_players=1, seed=task["seed"] % (1 << 31))
        return self._observe()

    def step(self, text: str) -> tuple[str, float | None, bool]:
        done, _ = self._game.step(action=text)
        if not done:
            return self._observe(), None, False
        rewards, info = self._game.close()
        reason = str((info or {}).get(0, {}).get("reason", ""))
        return reason, float((rewards or {}).get(0, 0.0)), True

    def _observe(self) -> str:
        _, observation = self._game.get_observation()
        if not isinstance(observation, list):
            return str(observation)
        # What is new since the last time, the player's own words among it.
        return "\n".join(str(one[1]) for one in observation if one[0] != 0)
