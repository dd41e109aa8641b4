"""An environment server of OpenEnv: a number from 1 to 63 is to be guessed. Nothing of Tidemill is in it.

python examples/openenv/server.py serves it at http://127.0.0.1:8000, 64 sessions at once.
"""

from __future__ import annotations

import argparse
import random
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

LARGEST = 63


class Guess(Action):
    """The number that is guessed, as text."""

    message: str


class Answer(Observation):
    """What is said to it: > or < for where the number is, ? for what is no number."""

    text: str = ""


class Guessing(Environment[Guess, Answer, State]):
    """Pays 1 at the turn in which the number is found. One object is one session."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._number = 0
        self._state = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **settings: Any) -> Answer:
        """Think of the number that the seed gives."""
        self._number = random.Random(seed).randint(1, LARGEST)
        self._state = State(episode_id=episode_id, step_count=0)
        return Answer()

    def step(self, action: Guess, timeout_s: float | None = None, **settings: Any) -> Answer:
        """Say where the number is."""
        self._state.step_count += 1
        if not action.message.isdigit():
            return Answer(text="?", reward=0.0)
        guess = int(action.message)
        if guess == self._number:
            return Answer(reward=1.0, done=True)
        return Answer(text=">" if guess < self._number else "<", reward=0.0)

    @property
    def state(self) -> State:
        """What is known of the session."""
        return self._state


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8000)
    app = create_fastapi_app(Guessing, Guess, Answer, max_concurrent_envs=64)
    uvicorn.run(app, host="127.0.0.1", port=parser.parse_args().port, log_level="warning")
