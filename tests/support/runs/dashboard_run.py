"""A run for the dashboard to show: it trains on the scripted engine, and its reward makes a few dead letters."""

import signal
import subprocess
import time
from pathlib import Path

import yaml
from msgspec.structs import replace

from broker.connection.connection import Connection
from broker.connection.keys import Keys
from deploy.control_plane.address import address_of, own_token
from schemas.codec import decode, encode
from schemas.messages import DeadLetter, Heartbeat
from tests.support.models.tiny_model import make_tiny_model
from tests.support.runs.light_service import start_service
from tests.support.runs.programs import free_port
from tests.support.runs.up_runs import UpRun

START_S, TASK_S = 240.0, 60.0
"""Deadline for a service to start, which loads much, on a machine that does other things as well."""
REWARDS = '''
def even(prompt, completion, prompt_ids, completion_ids, **data):
    """Share of even tokens; a few completions cannot be scored, so that there are dead letters."""
    if sum(completion_ids) % 61 == 0:
        raise ValueError("this one cannot be scored")
    return sum(token % 2 == 0 for token in completion_ids) / max(len(completion_ids), 1)
'''


class System:
    """A run on the scripted engine, and its control plane's address."""

    def __init__(self, folder: Path) -> None:
        (folder / "rewards.py").write_text(REWARDS)
        model = make_tiny_model(folder / "model")
        self.config = {
            "model": {"path": str(model), "dtype": "float32", "max_length": 64},
            "train": {"name": "arithmetic"},
            "eval": {
                "dataset": {"name": "arithmetic", "args": {"split": "heldout"}, "limit": 16},
                "every": 5,
                "sampling": {"n": 1, "max_tokens": 24},
            },
            "sampling": {"n": 4, "max_tokens": 24},
            "reward": {"terms": [{"name": "rewards.py:even"}]},
            "generator": {
                "engine": "scripted",
                "args": {"token_s": 0.08, "first": 40, "tokens": 40, "min_length": 4, "max_length": 24},
                "max_samples": 32,
                "lease_s": 5,
                "probe_tolerance": 1e3,
            },
            "trainer": {
                "steps": 100_000,
                "batch_groups": 4,
                "threads": 1,
                "advantage": {"keep_zero_variance": True},
                "checkpoint": {"every": 20},
            },
            "supervisor": {"max_restarts": 20, "backoff_s": 0.2},
            "control": {"port": free_port()},
        }
        self.folder = folder
        self.ports: dict[str, int] = {}
        self.run = UpRun(folder, self.config)
        self.url = self.token = ""

    def wait(self) -> None:
        """Until the run has trained a little."""
        self.run.wait_until(lambda: self.run.steps() >= 2, "second step", START_S)
        self.url = self.address(self.run.folder)
        self.token = own_token(self.run.folder) or ""

    def address(self, folder: Path) -> str:
        """Where the control plane listens whose run has this folder."""
        self.run.wait_until(lambda: address_of(folder) is not None, "control plane")
        url = address_of(folder)
        assert url is not None
        return url

    def start(self, role: str, name: str, **environment: str) -> subprocess.Popen[bytes]:
        """One more service of this run, which no supervisor looks after."""
        generator = self.run.service("generator-0")
        assert generator is not None
        file = self.folder / f"{name}.yaml"
        # A folder of its own: another control plane must not take the first one's address.
        settings = {**self.config, "run": {"name": "e2e", "folder": str(self.folder / name)}}
        settings["control"] = {"port": self.ports.setdefault(name, free_port())}
        file.write_text(yaml.safe_dump(settings))
        return start_service(role, file, name, generator.environ()["REDIS_URL"], **environment)

    def connect(self) -> Connection:
        """To the run's broker."""
        generator = self.run.service("generator-0")
        assert generator is not None
        return Connection(generator.environ()["REDIS_URL"], Keys("tidemill", "e2e"), 10.0)

    def age_heartbeat(self, service: str, seconds: float) -> None:
        """Let the last heartbeat of a dead service be that much older."""
        connection = self.connect()
        beat = decode(connection.client.hget(connection.keys.services, service), Heartbeat)
        connection.client.hset(connection.keys.services, service, encode(replace(beat, time=beat.time - seconds)))

    def fail_a_group(self) -> str:
        """Give up the newest prompt group, as after too many dead generators; the id of its dead letter."""
        connection = self.connect()
        body = DeadLetter(source="tasks", reason="no generator could make it", deliveries=9, payload=b"")
        end = time.monotonic() + TASK_S
        while time.monotonic() < end:
            newest = connection.client.xrevrange(connection.keys.tasks, count=1)
            if not newest:  # generators have taken all of them
                time.sleep(0.01)
                continue
            entry, fields = newest[0]
            letter = encode(replace(body, task_id=int(fields[b"t"])))
            if connection.run_script("fail_task", "tasks", entry, fields[b"t"], letter) == b"ok":
                found = connection.client.xrevrange(connection.keys.dead, count=20)
                return next(id.decode() for id, fields in found if fields[b"b"] == letter)
        raise AssertionError(f"no task could be given up in {TASK_S} s")

    def stop(self) -> None:
        self.run.process.send_signal(signal.SIGINT)
        try:
            self.run.process.wait(60)
        finally:
            self.run.process.kill()
