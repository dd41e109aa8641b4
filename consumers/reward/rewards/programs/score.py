"""Scores of programs that the policy wrote: the share of a task's cases that they pass, each run in the sandbox.

What a case expects of stdout or of a call never gets into the sandbox: a program can't know it, and what it prints is
compared out here. A test made of assertions runs beside the program.
"""

import json
import math
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from consumers.reward.rewards.clock import CLOCK
from consumers.reward.rewards.programs import harness
from consumers.reward.rewards.terms import Positive, reward
from schemas.errors import ConfigError
from schemas.system.sandbox.jail import Sandbox, choose
from schemas.system.sandbox.limits import Interpreter, Limits, Outcome, find_interpreter

_FENCE = re.compile(r"^[ \t]*```[ \t]*([\w+#.-]*)[^\n]*\n(.*?)(?:^[ \t]*```[ \t]*$|\Z)", re.MULTILINE | re.DOTALL)
_TOLERANCE = 1e-6
_OUTPUT_BYTES = 1 << 20
_LATE = 2
"""After so many cases that took too long the rest is not run: it has failed."""
_SHARE = 1 / (_LATE + 1)
"""Of the time until the call's deadline, what a case may take: late cases leave a part of it for the others."""
_MOST = 0.85
"""Of the time until the call's deadline, what one run of the program may take."""
_HARNESS = Path(harness.__file__).read_bytes()


def _check(sandbox: str = "auto", python: str | None = None, command: Sequence[str] | None = None, **_: Any) -> None:
    """Raise ValueError for a command without ``{file}``, or a sandbox or interpreter that does not work here."""
    if command is not None and "{file}" not in command:
        raise ValueError(f"command {command!r} must be a list that has {{file}}, such as [/usr/bin/node, '{{file}}']")
    try:
        choose(sandbox)
        find_interpreter(python)
    except ConfigError as error:
        raise ValueError(str(error)) from error


@reward(check=_check, settings=True)
def code(
    completion: str,
    *,
    sandbox: str = "auto",
    timeout_s: Annotated[float, Field(gt=0)] = 5.0,
    memory_mb: Positive = 512,
    processes: Positive = 16,
    partial: bool = True,
    python: str | None = None,
    command: list[str] | None = None,
    **data: Any,
) -> float:
    """Return the share of the task's cases that the program in the completion passes, each run in a sandbox.

    The program is the last fenced block, or all of the completion. ``cases`` are ``{stdin, stdout}``,
    ``{call, equals}`` or ``{test}``; ``tests`` are texts of assertions, and ``setup`` is run before. ``timeout_s``:
    seconds of processor time of a case. A case may take twice as many seconds in all, but at most a third of
    reward.timeout_s; after two cases that took longer, the rest count as failed. Without ``partial``: 1 if all cases
    pass, else 0. A sandbox that can't be started excludes the sample.
    """
    cases = read_cases(data)
    program = extract(completion)
    if not program.strip():
        return 0.0
    limits = Limits(0.0, timeout_s, memory_mb, _OUTPUT_BYTES, processes)
    program, setup = str(data.get("prefix") or "") + program, str(data.get("setup") or "")
    runner = _Runner(choose(sandbox), find_interpreter(python), limits, command, partial, program, setup)
    printing = [case for case in cases if "stdin" in case]
    share = (runner.printing(printing) + runner.evaluated([case for case in cases if "stdin" not in case])) / len(cases)
    return share if partial else float(share == 1.0)


def extract(completion: str) -> str:
    """Return the program in a completion: its last fenced block of code, else all of it, thoughts left out."""
    _, _, answer = completion.rpartition("</think>")
    blocks = [text for _, text in _FENCE.findall(answer)]
    return blocks[-1] if blocks else answer


def read_cases(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Read the cases of a row, each with stdin and stdout, call and equals, or test. ValueError if there are none.

    Fields: ``cases``, such a list; ``tests``, one or more texts of assertions; ``input_output``, as in APPS.
    """
    cases: list[dict[str, Any]] = []
    for case in row.get("cases") or []:
        if not isinstance(case, dict) or not any(
            keys <= case.keys() for keys in ({"stdin", "stdout"}, {"call", "equals"}, {"test"})
        ):
            raise ValueError(f"case {str(case)[:80]} must have stdin and stdout, call and equals, or test")
        cases.append(case)
    tests = row.get("tests") or []
    for test in [tests] if isinstance(tests, str) else tests:
        entry = row.get("entry_point")
        # HumanEval's: a function that gets the one to be tested.
        cases.append({"test": f"{test}\ncheck({entry})" if entry and "def check(" in test else str(test)})
    if given := row.get("input_output"):
        given = json.loads(given) if isinstance(given, str) else given
        for told, value in zip(given["inputs"], given["outputs"], strict=True):
            if name := given.get("fn_name"):
                single = isinstance(value, list) and len(value) == 1
                cases.append({"call": f"{name}(*{told!r})", "equals": value[0] if single else value})
            else:
                cases.append({"stdin": _text(told), "stdout": _text(value)})
    if not cases:
        raise ValueError("the row has no cases, tests or input_output")
    return cases


def _text(lines: Any) -> str:
    return "\n".join(map(str, lines)) if isinstance(lines, list) else str(lines)


@dataclass
class _Runner:
    """Runs one program on cases. command: how a file ``{file}`` is run; None: with Python."""

    sandbox: Sandbox
    python: Interpreter
    limits: Limits
    command: Sequence[str] | None
    partial: bool
    program: str
    setup: str

    def __post_init__(self) -> None:
        self.wall_s = min(2 * self.limits.cpu_s, _SHARE * CLOCK.get().left())
        """Seconds that a case may take."""

    def printing(self, cases: Sequence[dict[str, Any]]) -> int:
        """Return how many cases of stdin and stdout it passes, each in its own run."""
        passed = late = 0
        for case in cases:
            outcome = self._run(str(case["stdin"]), {"program.py": _bytes(self.program)}, "{job}/program.py")
            done = outcome.end == "exit" and outcome.code == 0
            right = done and _lines(outcome.stdout.decode("utf-8", "replace")) == _lines(str(case["stdout"]))
            passed += right
            late += outcome.end == "time"
            if late == _LATE or not (right or self.partial):
                break
        return passed

    def evaluated(self, cases: Sequence[dict[str, Any]]) -> int:
        """Return how many calls and tests it passes: the program runs once, each case in a copy of its process."""
        if not cases:
            return 0
        if self.command is not None:
            raise ValueError("a row with tests or calls needs Python; command is for cases with stdin and stdout")
        key = secrets.token_hex(16)
        told = {
            "program": self.program,
            "setup": self.setup,
            "cases": [{name: case[name] for name in ("call", "test") if name in case} for case in cases],
            "wall_s": self.wall_s,
            "late": _LATE,
        }
        files = {"harness.py": _HARNESS, "case.json": _bytes(json.dumps(told))}
        outcome = self._run(f"{key}\n", files, "{job}/harness.py", "{job}", cases=len(cases))
        said, whole, found = outcome.stdout.decode("utf-8", "replace").partition(key)
        try:
            results = json.loads(found) if whole and not said else []
            return sum(
                bool(ended) and ("test" in case or _equal(value, case["equals"]))
                for case, (ended, value, _) in zip(cases, results, strict=False)
            )
        except (ValueError, TypeError, RecursionError):
            return 0

    def _run(self, stdin: str, files: dict[str, bytes], *arguments: str, cases: int = 1) -> Outcome:
        command = [*self.python.command, *arguments]
        if self.command is not None:
            command = [part.replace("{file}", arguments[0]) for part in self.command]
        # The program itself counts as one more case. A part of the time is left for the answer.
        wall_s = min(self.wall_s * (cases if cases == 1 else cases + 1), _MOST * CLOCK.get().left())
        limits = replace(self.limits, wall_s=wall_s)
        return self.sandbox.run(command, _bytes(stdin), files, limits, self.python.mounts)


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "backslashreplace")


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


def _equal(found: Any, wanted: Any) -> bool:
    """Return whether two values of JSON are the same, numbers nearly so."""
    if isinstance(found, bool) or isinstance(wanted, bool):
        return found is wanted
    if isinstance(found, int | float) and isinstance(wanted, int | float):
        return math.isclose(found, wanted, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
    if isinstance(found, list) and isinstance(wanted, list | tuple):
        return len(found) == len(wanted) and all(map(_equal, found, wanted))
    if isinstance(found, dict) and isinstance(wanted, dict):
        return found.keys() == {str(key) for key in wanted} and all(
            _equal(found[str(key)], value) for key, value in wanted.items()
        )
    return type(found) is type(wanted) and bool(found == wanted)
