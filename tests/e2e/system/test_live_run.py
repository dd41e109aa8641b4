"""A run that learns from conversations: unmodified clients talk, another program rewards, and everything is killed."""

import itertools
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import httpx
import openai
import pytest

from broker.client import Broker
from broker.connection.connection import Connection
from broker.connection.embedded import EmbeddedServer
from broker.connection.keys import Keys
from schemas.config import BrokerConfig
from tests.support.models.tiny_model import make_tiny_model
from tests.support.runs.up_runs import UpRun, trained_samples

pytestmark = [
    pytest.mark.timeout(500),
    pytest.mark.matrix("a whole run under kills, of minutes; test_live_episodes holds its promises"),
]

VICTIMS = ("generator-0", "control", "generator-1", "broker", "generator-0", "control", "broker")
USERS, STEPS, BATCH = 12, 40, 12
SHARE = 1e-6
"""Rewards differ by multiples of this, so that each tells its conversation."""


def configuration(model: Path, url: str) -> dict[str, Any]:
    return {
        "model": {"path": str(model), "dtype": "float32", "max_length": 256},
        "train": {"name": "live"},
        "sampling": {"n": 1, "max_tokens": 12},
        "reward": {"terms": []},
        "broker": {"url": url},
        "flow": {"staleness": 8, "window": 73},
        "generator": {
            "engine": "transformers",
            "replicas": 2,
            "lease_s": 3,
            "workflow": {"name": "live"},
            "agents": {"episodes": 64, "grace_s": 0, "live": {"reward_s": 60, "rate": 100_000}},
        },
        "trainer": {
            "steps": STEPS,
            "batch_groups": BATCH,
            "threads": 1,
            "optimizer": {"lr": 3e-3},
            "advantage": {"name": "reinforce_pp"},
            "checkpoint": {"every": 5},
            "log_groups": BATCH,
        },
        "supervisor": {"max_restarts": 60, "backoff_s": 0.2},
        "control": {"port": 0},
    }


class Users:
    """Users who talk to the policy, and a program that rewards their conversations later.

    rewarded: the reward of each conversation that was answered with 200, by its number, in the order of time.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._numbers = itertools.count(1)
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._talk, args=(seed,), daemon=True) for seed in range(USERS)]
        self.rewarded: dict[int, float] = {}
        self.seats: dict[int, str] = {}
        self.errors: list[str] = []

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(120)
            assert not thread.is_alive()

    def _url(self) -> str:
        return str(json.loads((self._folder / "control.json").read_text())["url"]).rstrip("/")

    def _key(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {(self._folder / 'control_token').read_text().strip()}"}

    def _post(self, path: str, body: Any = None) -> dict[str, Any] | None:
        """Repeat a request while the control plane is away or refuses for now; None if it always will."""
        while not self._stop.is_set():
            try:
                answer = httpx.post(self._url() + path, json=body, headers=self._key(), timeout=30)
            except (httpx.HTTPError, OSError, ValueError):
                time.sleep(0.1)
                continue
            if answer.status_code == 200:
                found: dict[str, Any] = answer.json()
                return found
            if answer.status_code in (404, 409):
                return None
            time.sleep(0.1)
        return None

    def _talk(self, seed: int) -> None:
        rng = random.Random(seed)
        while not self._stop.is_set():
            begun = self._post("/v1/episodes")
            if begun is None:
                return
            try:
                answers = self._converse(begun["base_url"], turns=rng.randint(1, 2))
            except openai.APIError as error:
                # The control plane has another port after its restart; a user begins another conversation.
                self.errors.append(repr(error))
                continue
            time.sleep(rng.random())
            number = next(self._numbers)
            value = round(sum(map(printable_share, answers)) / len(answers), 3) + number * SHARE
            for _ in range(2):
                found = self._post(f"/v1/episodes/{begun['id']}/reward", {"reward": value})
                if found is not None:
                    assert found["reward"] == value
                    self.rewarded[number] = value
                    self.seats[number] = begun["id"]

    def _converse(self, base_url: str, turns: int) -> list[str]:
        messages: list[Any] = []
        with openai.OpenAI(base_url=base_url, api_key="none", max_retries=8, timeout=60) as client:
            for turn in range(turns):
                messages.append({"role": "user", "content": f"{turn}?"})
                answer = client.chat.completions.create(model="policy", messages=messages)
                messages.append({"role": "assistant", "content": answer.choices[0].message.content or ""})
        return [message["content"] for message in messages[1::2]]


def printable_share(text: str) -> float:
    return sum(" " <= letter <= "~" for letter in text) / max(len(text), 1)


@contextmanager
def running(folder: Path, config: dict[str, Any]) -> Iterator[UpRun]:
    """A run, which has ended after the block even if that failed."""
    run = UpRun(folder, config)
    try:
        yield run
    finally:
        if run.process.poll() is None:
            run.process.terminate()
            run.process.wait(60)


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    with EmbeddedServer(tmp_path / "b") as server:
        yield server


def test_a_policy_learns_from_its_users_and_no_reward_is_lost(tmp_path: Path, own_server: EmbeddedServer) -> None:
    model = make_tiny_model(tmp_path / "model", hidden=32, layers=1)
    broker = Broker(Connection(own_server.url, Keys("tidemill", "e2e"), 60), BrokerConfig())
    with running(tmp_path, configuration(model, own_server.url)) as run:
        run.wait_until((run.folder / "control.json").exists, "a control plane")
        with Users(run.folder) as users:
            for number, step in enumerate(range(3, STEPS - 6, 5)):
                run.wait_until(lambda step=step: run.steps() >= step, f"step {step}")  # type: ignore[misc]
                victim = VICTIMS[number % len(VICTIMS)]
                if victim == "broker":
                    assert own_server.process is not None
                    own_server.process.kill()
                    own_server.start()
                elif (service := run.service(victim)) is not None:
                    service.kill()
            summary = run.finish(400)
    records = broker.live_episodes().read([*users.seats.values()])[1]
    seat_of = {number: records[id].seat for number, id in users.seats.items()}
    trained = Counter(f"{task_id}-{sample}" for task_id, sample in trained_samples(run))
    assert (summary["exit_reason"], summary["trajectories_trained_twice"]) == ("finished", 0)
    assert len(trained) == STEPS * BATCH
    assert max(trained.values()) == 1
    assert {*trained} <= {record.seat for record in records.values() if record.reward is not None}
    # What was rewarded and is not trained: dropped with a reason, or still in the pipeline at the end.
    state = broker.ledger.read_state()
    untrained = [number for number, seat in seat_of.items() if seat not in trained]
    assert len(untrained) <= sum(state.dropped.values()) + state.active
    values = [users.rewarded[number] for number in sorted(users.rewarded)]
    third = len(values) // 3
    assert sum(values[-third:]) / third > sum(values[:third]) / third + 0.1
