"""A run that Python has started: a process of its own, and a handle that watches it and gives it orders.

The run is ``tidemill up`` in a session of its own, so a thread, a notebook and a running event loop can start one, and
it outlives the Python that did.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Self

from deploy.client.client import connect
from deploy.client.transport import NoControlPlane
from deploy.control_plane.files.evaluations import read_evaluations
from deploy.control_plane.files.groups import GroupFiles, Wanted
from deploy.control_plane.files.lines import GrowingFile
from deploy.control_plane.files.run_folder import RunFolder, time_of
from deploy.control_plane.web.paging import Page
from deploy.services.main import command
from schemas.config import TidemillConfig, save_config
from schemas.config.loading import is_setting
from schemas.control_api.orders import Accepted
from schemas.control_api.run_folders import GroupDetail, RunEvaluation, RunHead
from schemas.errors import CONFIG_EXIT, ERROR_EXIT, ConfigError, InfraError
from schemas.run_folder import CONFIG, METRICS, PYTHON, StoredLines, parse_line, surviving_lines

POLL_S = 0.3
STOP_S = 180.0


class Callback:
    """What you do at each step and evaluation of a run: override what you need.

    The methods are called one after another in a thread of this process. An error in one is raised by ``wait``; the
    run continues without callbacks.
    """

    def on_step(self, run: StartedRun, metrics: Mapping[str, Any]) -> None:
        """Take a step's line of metrics.jsonl. After a crash, steps that are trained again come again."""

    def on_evaluation(self, run: StartedRun, evaluation: RunEvaluation) -> None:
        """Take a complete evaluation."""


class StartedRun:
    """A run and its process. As a context manager, it stops the run at the end of the block."""

    def __init__(self, config: TidemillConfig, fresh: bool = False, callbacks: Sequence[Callback] = ()) -> None:
        """Start or resume it. fresh: delete what an earlier run left."""
        self.config = config
        self.folder = config.folder
        self.name = config.run.name
        self._file = self.folder / PYTHON / CONFIG
        self._callbacks = callbacks
        self._error: Exception | None = None
        self._began = time.time()
        lines = GrowingFile(self.folder / METRICS)
        # Those of earlier attempts are passed over.
        earlier = [*lines.read()]
        seen = {one.version for one in self.evaluations()} if earlier and not fresh else set()
        save_config(config, self._file)
        # What the variables set is in the configuration already.
        environment = {name: value for name, value in os.environ.items() if not is_setting(name)}
        # A file of this start's own: an earlier one of the folder may still run, and write to the one that it has.
        output = self.folder / PYTHON / "output.log"
        output.unlink(missing_ok=True)
        self._output = output.open("x+b")
        self._process = subprocess.Popen(
            command("up", str(self._file), *(["--fresh"] if fresh else [])),
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environment,
        )
        self._thread = threading.Thread(target=self._follow, args=(lines, seen), name=f"run {self.name}", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def exit_code(self) -> int | None:
        """The exit code of ``tidemill up``: 0 when all steps are done; None while it runs."""
        return self._process.poll()

    @property
    def _begun(self) -> bool:
        """Whether the folder is in use by this run, not by one before it."""
        return time_of(self.folder / CONFIG) >= self._began

    def status(self) -> RunHead:
        """Return where the run stands. state: starting, that of its control plane, or how the run has ended."""
        began = self._begun
        head = RunFolder(self.folder if began else self._file.parent, self.name).head()
        if head is None:
            raise InfraError(f"run {self.name!r}: its folder {self.folder} is gone")
        if not began:
            alive = self.exit_code is None
            return head.model_copy(update={"state": "starting", "cause": ""} if alive else {"state": "failed"})
        state = head.state
        # Its control plane may be yet to come, or be turned off.
        with suppress(InfraError):
            state = connect(str(self._file), None).get("/v1/status")["state"] if state == "running" else state
        return head.model_copy(update={"state": state})

    def metrics(self) -> list[dict[str, Any]]:
        """Return the metrics of each step, as ``pandas.DataFrame`` takes them; docs/operations.md names them."""
        return list(surviving_lines(StoredLines(self.folder / METRICS)))

    def evaluations(self) -> list[RunEvaluation]:
        """Return the complete evaluations, by version."""
        return read_evaluations(self.folder)

    def samples(self, step: int | None = None, limit: int = 16) -> list[GroupDetail]:
        """Return prompt groups with their samples, the newest first. step: of this step alone."""
        files = GroupFiles(self.folder)
        heads = files.list(Wanted(step_from=step, step_to=step), "newest", Page(limit)).groups
        return [group for head in heads if (group := files.get(head.step, head.task_id)) is not None]

    def pause(self, drain: bool = False, wait_s: float = 60.0) -> Accepted:
        """Pause it: nothing is generated or trained until ``resume``. drain: finish work in flight first."""
        return self._order("pause", wait_s, mode="drain" if drain else "freeze")

    def resume(self, wait_s: float = 60.0) -> Accepted:
        """Resume it after a pause."""
        return self._order("resume", wait_s)

    def stop(self, wait_s: float = STOP_S) -> RunHead:
        """End it cleanly, with a checkpoint; the same configuration resumes it. Return where it stands."""
        if self.exit_code is None:
            self._process.send_signal(signal.SIGINT)
        return self.wait(wait_s)

    def wait(self, timeout_s: float | None = None) -> RunHead:
        """Wait until it has ended; return where it stands then: finished, stopped or failed, and why.

        ConfigError or InfraError if it could not start, TimeoutError after ``timeout_s``. An error of a callback is
        raised as it is.
        """
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"run {self.name!r} has not ended within {timeout_s:g} s") from None
        self._thread.join()
        if self._error is not None:
            raise self._error
        if code == CONFIG_EXIT or (code == ERROR_EXIT and not self._begun):
            self._output.seek(0)
            said = self._output.read().decode(errors="replace").strip()
            kind = ConfigError if code == CONFIG_EXIT else InfraError
            raise kind(said.rpartition("\n")[2].removeprefix("tidemill: "))
        return self.status()

    def _order(self, verb: str, wait_s: float, **body: Any) -> Accepted:
        """Give an order, once the control plane listens, which a run that has just been started does not yet."""
        deadline = time.monotonic() + wait_s
        while True:
            try:
                client = connect(str(self._file), None)
                return Accepted.model_validate(client.send("POST", f"/v1/{verb}", {**body, "wait_s": wait_s}, wait_s))
            except NoControlPlane:
                if time.monotonic() > deadline or self.exit_code is not None:
                    raise
            time.sleep(POLL_S)

    def _follow(self, lines: GrowingFile, seen: set[int]) -> None:
        over = False
        while self._callbacks and not over:
            over = self.exit_code is not None
            try:
                if self._begun:
                    self._call(lines, seen)
            except Exception as error:  # noqa: BLE001 - whatever a user's callback raises, ``wait`` raises
                self._error = error
                return
            time.sleep(0.0 if over else POLL_S)

    def _call(self, lines: GrowingFile, seen: set[int]) -> None:
        found = [parse_line(line) for _, line in lines.read()]
        # The last step's line is written again without times, if its evaluation comes after it.
        steps = [line for line in found if line is not None and "time/total_s" in line]
        evaluations = [one for one in self.evaluations() if one.version not in seen]
        seen |= {one.version for one in evaluations}
        for callback in self._callbacks:
            for metrics in steps:
                callback.on_step(self, metrics)
            for evaluation in evaluations:
                callback.on_evaluation(self, evaluation)
