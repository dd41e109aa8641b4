"""Agents that are programs: each episode is its own process group, with the endpoint in its environment.

Exit code 0 ends the episode; with any other code it has failed, and the last line on stderr is the reason. A program
writes its reward to the file TIDEMILL_RESULT, in the form of a function's result: a number, or an object of reward,
turns, metrics and data. The first MiB of its output goes to the generator's log, and never into a result.
"""

import asyncio
import contextlib
import json
import os
import signal
import stat
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import structlog

from producers.agents.workers.jail import RESULT, AgentJail
from producers.agents.workers.process import CANCEL_S, LATE_S
from producers.agents.workers.protocol import AgentJob, AgentResult, Kind
from producers.agents.workers.start import AgentProgram
from producers.runner.connection import UserCodeError, escape_halves
from producers.runner.outcome import read_outcome
from schemas.system.files import remove_tree
from schemas.system.guarded_process import GuardedProcess, environment

log = structlog.get_logger()
_TAIL = 4096
"""Bytes of stderr that are kept for the reason of a failure."""
_MOST_OUTPUT = 1 << 20
"""Bytes of each of stdout and stderr that are copied to the log; an agent may write without an end."""
_MOST_BYTES = 1 << 22
"""Bytes of a result."""
_NOT_REGULAR = "TIDEMILL_RESULT is not a regular file"
_SIGNALLED = 128
"""A sandbox reports the signal that ended the agent by an exit code above this one."""


class CommandRunner:
    """Runs a program for each episode, in the configuration's folder."""

    def __init__(self, agent: AgentProgram, clock: Callable[[], float], run_folder: Path | None) -> None:
        self._agent = agent
        jailed = agent.settings.sandbox == "bwrap"
        self._jail = AgentJail(agent.base, agent.settings, run_folder) if jailed else None
        self._clock = clock
        self._closing = asyncio.Event()

    async def run(self, job: AgentJob) -> AgentResult:
        """Run the program to its end; if this call is cancelled, the program is killed with all its processes."""
        folder = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="tidemill-agent-"))
        try:
            return await self._run(job, folder)
        finally:
            # In a thread: the program may have left very many files.
            left = await asyncio.shield(asyncio.to_thread(remove_tree, folder))
            if left:
                log.warning("an episode's folder can't be removed", folder=str(folder), error=left)

    async def close(self) -> None:
        """Stop the running commands, and close the jail."""
        self._closing.set()
        if self._jail is not None:
            await self._jail.close()

    async def _run(self, job: AgentJob, folder: Path) -> AgentResult:
        if self._jail is not None:
            await self._jail.start(job.base_url)
        (out, stdout), (err, stderr) = os.pipe(), os.pipe()
        output, errors = await _open_pipe(out), await _open_pipe(err)
        starting = asyncio.ensure_future(asyncio.to_thread(self._start, job, folder, stdout, stderr))
        try:
            process = await asyncio.shield(starting)
        except asyncio.CancelledError:
            await asyncio.to_thread((await starting).kill)
            raise
        except OSError as error:
            return AgentResult("raised", error=f"it cannot be started: {error.strerror}", error_type="OSError")
        finally:
            os.close(stdout)
            os.close(stderr)
        copying = [asyncio.create_task(_copy(stream)) for stream in (errors, output)]
        ended = asyncio.create_task(process.wait())
        stopping = asyncio.create_task(self._closing.wait())
        why: Kind = "died"
        try:
            end = self._clock() + job.deadline_s
            while (left := end - self._clock()) > 0 and not (ended.done() or stopping.done()):
                await asyncio.wait({ended, stopping}, timeout=max(left, LATE_S), return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                why = "cancelled" if self._closing.is_set() else "deadline"
                process.order_end()
                await asyncio.wait({ended}, timeout=CANCEL_S)
        finally:
            process.order_kill()
            stopping.cancel()
            ended.cancel()
            await asyncio.wait({ended, stopping})
            how = await asyncio.shield(asyncio.to_thread(process.kill))
            # A pipe ends when the last process that holds it has ended.
            await asyncio.wait(copying, timeout=CANCEL_S)
            for one in copying:
                one.cancel()
        result = await asyncio.to_thread(_read_result, folder)
        last = copying[0].result() if copying[0].done() and not copying[0].cancelled() else ""
        code = process.exit_code
        if self._jail is not None and code is not None and code - _SIGNALLED in list(signal.Signals):
            code, how = _SIGNALLED - code, signal.Signals(code - _SIGNALLED).name
        return _judge(why, how, code, last, result, job)

    def _start(self, job: AgentJob, folder: Path, stdout: int, stderr: int) -> GuardedProcess:
        (folder / "agent").mkdir()
        task = folder / "agent" / "task.json"
        task.write_text(json.dumps(job.task), encoding="utf-8")
        site = job.base_url.removesuffix("/v1")
        shown = {
            **environment(self._agent.settings.env),
            "OPENAI_BASE_URL": job.base_url,
            "OPENAI_API_KEY": job.api_key,
            "ANTHROPIC_BASE_URL": site,
            "ANTHROPIC_API_KEY": job.api_key,
            "TIDEMILL_URL": f"{site}/tidemill/v1",
            "TIDEMILL_TASK": str(task),
            "TIDEMILL_RESULT": str(folder / "agent" / RESULT),
            "TIDEMILL_EPISODE": job.episode_id,
            "TIDEMILL_ATTEMPT": str(job.attempt),
            "TIDEMILL_DEADLINE": f"{time.time() + job.deadline_s:.3f}",
        }
        command = list(self._agent.command or ())
        if self._jail is not None:
            command, shown = self._jail.command(command, folder, job.base_url, shown)
        with open(os.devnull, "rb") as nothing:
            return GuardedProcess(
                command, "agent", shown, stdin=nothing.fileno(), stdout=stdout, stderr=stderr, folder=self._agent.base
            )


async def _open_pipe(read_end: int) -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_end, "rb", buffering=0)
    )
    return reader


async def _copy(output: asyncio.StreamReader) -> str:
    """Copy what arrives to our own stderr, up to a limit; return the last line, beyond the limit too."""
    tail, left = b"", _MOST_OUTPUT
    while data := await output.read(1 << 16):
        tail = (tail + data)[-_TAIL:]
        with contextlib.suppress(OSError):
            os.write(2, data[:left])
            if left and len(data) >= left:
                os.write(2, b"\nthe agent writes more, which is left out\n")
        left = max(0, left - len(data))
    lines = tail.decode("utf-8", "replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _read_result(folder: Path) -> dict[str, Any] | str:
    """Return the result that the program wrote to TIDEMILL_RESULT, or why it can't be read.

    The program chose what lies there: a link is not followed, and a named pipe is not waited for.
    """
    path = folder / "agent" / RESULT
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                return _NOT_REGULAR
            if status.st_size > _MOST_BYTES:
                return f"TIDEMILL_RESULT has {status.st_size} bytes, at most {_MOST_BYTES} are read"
            return read_outcome(escape_halves(json.loads(file.read(_MOST_BYTES)))) if status.st_size else {}
    except FileNotFoundError:
        return {}
    except OSError as error:
        return _NOT_REGULAR if path.is_symlink() else f"TIDEMILL_RESULT can't be read: {error.strerror}"
    except (ValueError, RecursionError) as error:
        return f"TIDEMILL_RESULT is not JSON: {error}"
    except UserCodeError as error:
        return f"TIDEMILL_RESULT: {error}"


def _judge(
    why: Kind, how: str, code: int | None, last: str, result: dict[str, Any] | str, job: AgentJob
) -> AgentResult:
    kind, error, error_type = why, "", ""
    if why == "deadline":
        error = f"it did not end within {job.deadline_s:g} s"
    elif why == "cancelled":
        error = "it was cancelled"
    elif code is None or code < 0:
        error = f"it ended with {how}"
    elif code:
        kind, error, error_type = "raised", f"exit code {code}: {last}".rstrip(": "), f"exit code {code}"
    elif isinstance(result, str):
        kind, error, error_type = "raised", result, "TIDEMILL_RESULT"
    else:
        kind = "returned"
    report = result if isinstance(result, dict) else {}
    return AgentResult(kind, error=error, error_type=error_type, **report)
