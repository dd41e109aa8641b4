"""Starts ``tidemill up`` as a user would, and looks at what it leaves."""

import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import psutil
import yaml

from deploy.control_plane.address import address_of, own_token
from deploy.services.main import command
from schemas.run_folder import surviving_lines

PACKAGES = ("schemas", "broker", "producers", "consumers", "deploy")


def make_decoys(folder: Path) -> Path:
    """Folders of a user's that are named like our packages; returns the folder that they are in."""
    for name in PACKAGES:
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").touch()
    return folder


class UpRun:
    """One ``tidemill up`` in a folder of its own, beside a user's folders that are named like our packages."""

    def __init__(self, folder: Path, config: dict[str, Any], output: int | None = None, terminal: bool = False) -> None:
        """output: descriptor for what it prints, instead of a file. terminal: whether that is its terminal."""
        self.folder = folder / "run"
        self.output = folder / "output.txt"
        file = folder / "config.yaml"
        file.write_text(yaml.safe_dump({**config, "run": {"name": "e2e", "folder": str(self.folder)}}))
        environment = {key: value for key, value in os.environ.items() if key != "REDIS_URL"}
        with self.output.open("w") as to_file:
            self.process = subprocess.Popen(
                [*(["setsid", "--ctty"] if terminal else []), *command("up", str(file))],
                stdin=output if terminal else None,
                stdout=to_file if output is None else output,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=make_decoys(folder / "work"),
            )

    def service(self, name: str) -> psutil.Process | None:
        """The process of one service, None while it is not there."""
        for process in psutil.Process(self.process.pid).children(recursive=True):
            try:
                command = process.cmdline()
            except psutil.NoSuchProcess:
                continue
            if command[-2:] == ["--name", name] and "deploy.cli" in command and "guard.py" not in " ".join(command):
                return process
        return None

    def steps(self) -> int:
        """Steps finished so far, replays counted once."""
        return len({line["step"] for line in self.lines("trained.jsonl") if "step" in line})

    def lines(self, name: str) -> list[dict[str, Any]]:
        file = self.folder / name
        if not file.is_file():
            return []
        # The last line may be half written by a process that was killed; its writer starts a new one.
        found = []
        for line in file.read_text().splitlines():
            try:
                found.append(json.loads(line))
            except json.JSONDecodeError:
                continue
        return found

    def ask(self, path: str, body: dict[str, Any] | None = None, method: str | None = None) -> Any:
        """Send a request to the run's control plane."""
        headers = {"Authorization": f"Bearer {own_token(self.folder)}", "Content-Type": "application/json"}
        url = (address_of(self.folder) or "").rstrip("/") + path
        request = Request(url, None if body is None else json.dumps(body).encode(), headers, method=method)
        with urlopen(request, timeout=10) as answer:
            return json.loads(answer.read())

    def wait_until(self, condition: Callable[[], bool], what: str, deadline_s: float = 120.0) -> None:
        """Wait for something to happen in the run; fails with the run's output when it doesn't."""
        end = time.monotonic() + deadline_s
        while not condition():
            assert self.process.poll() is None, f"the run ended before {what}:\n{self.output.read_text()[-3000:]}"
            assert time.monotonic() < end, f"no {what} after {deadline_s:.0f} s:\n{self.output.read_text()[-3000:]}"
            time.sleep(0.1)

    def finish(self, deadline_s: float = 240.0) -> dict[str, Any]:
        """Wait for the end; the summary. No process of the run may be left."""
        family = psutil.Process(self.process.pid).children(recursive=True)
        try:
            code = self.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            self.process.terminate()
            self.process.wait(60)
            raise AssertionError(f"not finished after {deadline_s:.0f} s:\n{self.output.read_text()[-3000:]}") from None
        assert code == 0, self.output.read_text()[-3000:]
        assert not [process for process in family if process.is_running()]
        summary: dict[str, Any] = json.loads((self.folder / "summary.json").read_text())
        return summary

    def finish_whole(self, deadline_s: float = 240.0) -> dict[str, Any]:
        """Wait for the end of a run that is finished, and lost no trajectory and trained none twice; the summary."""
        summary = self.finish(deadline_s)
        known = (summary["exit_reason"], summary["trajectories_lost"], summary["trajectories_trained_twice"])
        assert known == ("finished", 0, 0)
        return summary


def trained_samples(run: UpRun) -> list[tuple[int, int]]:
    """Samples of the surviving weights."""
    lines = list(surviving_lines(run.lines("trained.jsonl")))
    return [(task_id, sample) for line in lines for task_id, sample in line["samples"]]


def environment_of(run: UpRun) -> psutil.Process | None:
    """A process of environments of the generator."""
    service = run.service("generator-0")
    below = service.children(recursive=True) if service is not None else []
    return next(
        (each for each in below if each.cmdline()[-1:] == ["gymnasium_envs"] and "-I" not in each.cmdline()), None
    )
