"""The policy of examples/completion learns from users, who reward it late, while processes are killed::

    python -m benchmarks.learning.live_users --conversations 2000 --kills 5 --out runs/live-users

Unmodified openai clients ask for completions. Of each conversation another request reports 1 to 60 s later whether it
was kept. Generator, control plane and broker are killed with SIGKILL so many times each, in turns. Printed are
the share of kept completions by tenths of the conversations, and what became of the rewards.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import openai
import psutil

from benchmarks.harness.users import Users
from broker.client import Broker
from broker.connection.connection import Connection
from broker.connection.embedded import EmbeddedServer
from broker.connection.keys import Keys
from schemas.config import BrokerConfig
from schemas.plugins import load
from schemas.run_folder import surviving_lines

EXAMPLE = Path(__file__).parents[2] / "examples" / "completion" / "config.yaml"
NAME = "live-users"
VICTIMS = ("generator-0", "control", "broker")
BATCH, STALENESS, WINDOW = 64, 10, 257
"""With these a reward may be a minute late at ten conversations a second."""
STALL_S = 600.0
"""A run without a step for so long stands still."""
CLI = (sys.executable, "-P", "-m", "deploy.cli")


def settings(folder: Path, url: str, steps: int, lr: float) -> list[str]:
    """What differs from the example."""
    changed: dict[str, Any] = {
        "run": {"name": NAME, "folder": str(folder / "run")},
        "flow": {"staleness": STALENESS, "window": WINDOW},
        "broker.url": url,
        "generator.engine": "transformers",
        "generator.lease_s": 3,
        "generator.agents.episodes": 1024,
        "generator.agents.live.reward_s": 120,
        "trainer.steps": steps,
        "trainer.batch_groups": BATCH,
        "trainer.optimizer.lr": lr,
        "supervisor": {"max_restarts": 100, "backoff_s": 0.2},
        "control.port": free_port(),
    }
    return [f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in changed.items()]


def free_port() -> int:
    """Return a port at which the control plane also listens after it was killed, so that clients find it again."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


class Editors(Users):
    """Users who write code. kept: of each conversation with a stored reward, in the order of the rewards."""

    def __init__(self, folder: Path, seed: int) -> None:
        super().__init__(folder, seed)
        self._beginning = load("lines.py:beginning", "example", EXAMPLE.parent)
        self._keeps = load("lines.py:keeps", "example", EXAMPLE.parent)
        self.kept: list[float] = []
        self.rewarded: dict[str, float] = {}
        self.counts: dict[str, int] = dict.fromkeys(
            ("begun", "talked", "given_up", "repeated", "changed", "refused"), 0
        )

    async def converse(self, client: openai.AsyncOpenAI, number: int) -> float:
        """Ask for one completion; 1.0 if it is kept."""
        line = self._beginning(self.rng)
        answer = await client.completions.create(model="policy", prompt=line)
        return float(self._keeps(line, answer.choices[0].text))

    def note(self, kind: str, **data: Any) -> None:
        """Count it."""
        if kind != "rewarded":
            self.counts[kind] += 1
        elif data["id"] not in self.rewarded:
            self.rewarded[data["id"]] = data["counts"]
            self.kept.append(data["counts"])
        else:
            self.counts["repeated"] += 1
            self.counts["changed"] += data["changed"] or data["counts"] != self.rewarded[data["id"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=2000, help="that are trained")
    parser.add_argument("--kills", type=int, default=5, help="of each of the three")
    parser.add_argument("--users", type=int, default=150, help="Conversations at once: more of them are older rewards.")
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/live-users"), help="a new folder")
    given = parser.parse_args()
    given.out.mkdir(parents=True)
    out, steps = given.out.resolve(), given.conversations // BATCH
    with EmbeddedServer(out / "broker") as server:
        with (out / "log").open("w") as log:
            changed = settings(out, server.url, steps, given.lr)
            run = subprocess.Popen([*CLI, "up", str(EXAMPLE), *changed], stdout=log, stderr=subprocess.STDOUT)
        users = Editors(out / "run", given.seed)
        asyncio.run(play(run, users, server, out / "run", steps, given))
        print(json.dumps({"kept": tenths(users.kept), **users.counts}), flush=True)
        print(json.dumps(what_became(users, server, out / "run")), flush=True)


async def play(
    run: subprocess.Popen[bytes],
    users: Users,
    server: EmbeddedServer,
    folder: Path,
    steps: int,
    given: argparse.Namespace,
) -> None:
    """Talk until the run ends, and kill a victim each time that another part of the steps is trained."""
    talking, kills = asyncio.create_task(users.talk(given.users)), given.kills
    marks = [steps * (k + 1) // (len(VICTIMS) * kills + 1) for k in range(len(VICTIMS) * kills)]
    trained, since = 0, time.monotonic()
    try:
        while run.poll() is None:
            await asyncio.sleep(0.5)
            if talking.done():
                talking.result()
            if len(_lines(folder)) > trained:
                trained, since = len(_lines(folder)), time.monotonic()
            if time.monotonic() - since > STALL_S:
                raise SystemExit(f"waited {STALL_S:.0f} s for step {trained + 1}: {folder.parent}/log")
            if marks and trained > marks[0]:
                kill(run, VICTIMS[len(marks) % len(VICTIMS)], server)
                del marks[0]
    finally:
        talking.cancel()
        if run.poll() is None:
            run.terminate()
    if run.returncode or marks:
        raise SystemExit(f"the run ended with {run.returncode}, {len(marks)} kills before its end: {folder.parent}/log")


def kill(run: subprocess.Popen[bytes], victim: str, server: EmbeddedServer) -> None:
    """Kill a process with SIGKILL; the supervisor, or this program for the broker, starts it again."""
    if victim == "broker":
        assert server.process is not None
        server.process.kill()
        server.start()
        return
    for process in psutil.Process(run.pid).children(recursive=True):
        if process.is_running() and process.cmdline()[-2:] == ["--name", victim]:
            process.kill()


def what_became(users: Editors, server: EmbeddedServer, folder: Path) -> dict[str, int]:
    """How many rewards were trained, ended with a reason, and were in the pipeline at the end."""
    broker = Broker(Connection(server.url, Keys("tidemill", NAME), 60), BrokerConfig())
    records = broker.live_episodes().read([*users.rewarded])[1]
    trained = [f"{task}-{sample}" for line in surviving_lines(_lines(folder)) for task, sample in line["samples"]]
    state = broker.ledger.read_state()
    untrained = len({*users.rewarded} - {id for id, record in records.items() if record.seat in {*trained}})
    return {
        "rewarded": len(users.rewarded),
        "trained": len(users.rewarded) - untrained,
        "trained twice": len(trained) - len({*trained}),
        "not trained": untrained,
        "dropped with a reason": sum(state.dropped.values()),
        "in the pipeline": state.active,
    }


def tenths(kept: Sequence[float]) -> list[float]:
    """The share of kept completions in each tenth."""
    size = max(1, len(kept) // 10)
    return [round(sum(kept[at : at + size]) / size, 3) for at in range(0, size * 10, size)]


def _lines(folder: Path) -> list[dict[str, Any]]:
    file = folder / "trained.jsonl"
    found = []
    for line in file.read_text().splitlines() if file.is_file() else ():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue  # half written by a process that was killed
    return found


if __name__ == "__main__":
    began = time.monotonic()
    main()
    print(json.dumps({"s": round(time.monotonic() - began)}))
