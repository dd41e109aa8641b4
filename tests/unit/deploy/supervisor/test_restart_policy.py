"""When a dead service is started again, and which failure is named when it is hopeless."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deploy.supervisor.failures import ServiceFailure, last_error, root_cause
from deploy.supervisor.restart_policy import MAX_BACKOFF_S, RETURN_S, SETTLED_S, RestartState, State
from deploy.supervisor.services import Exit
from schemas.config import SupervisorConfig
from schemas.errors import CONFIG_EXIT, FENCED_EXIT, RUN_FAILED_EXIT


def policy(**changes: float) -> SupervisorConfig:
    return SupervisorConfig.model_validate({"max_restarts": 5, "window_s": 1000, "backoff_s": 1, **changes})


def crash(lifecycle: RestartState, now: float, code: int = 1) -> float:
    """Start it and let it die at once; returns the wait before the next start."""
    lifecycle.started(now)
    lifecycle.exited(code, now)
    return lifecycle.due - now


def test_waits_double_up_to_the_limit() -> None:
    lifecycle = RestartState(policy(max_restarts=7))
    assert [crash(lifecycle, now) for now in range(7)] == [1, 2, 4, 8, MAX_BACKOFF_S, MAX_BACKOFF_S, MAX_BACKOFF_S]


def test_it_is_given_up_after_so_many_restarts() -> None:
    lifecycle = RestartState(policy(max_restarts=2))
    crash(lifecycle, 0)
    crash(lifecycle, 1)
    assert lifecycle.state is State.WAITING
    crash(lifecycle, 2)
    assert lifecycle.state is State.FAILED
    assert lifecycle.restarts == 2


def test_only_recent_restarts_count() -> None:
    lifecycle = RestartState(policy(max_restarts=1, window_s=100))
    for day in range(10):
        assert crash(lifecycle, day * 101.0) == 1
        assert lifecycle.state is State.WAITING
    assert lifecycle.restarts == 10


def test_no_restarts_at_all_when_none_are_allowed() -> None:
    lifecycle = RestartState(policy(max_restarts=0))
    crash(lifecycle, 0)
    assert lifecycle.state is State.FAILED


@pytest.mark.parametrize("code", [CONFIG_EXIT, FENCED_EXIT, RUN_FAILED_EXIT])
def test_what_a_restart_cannot_mend_is_not_restarted(code: int) -> None:
    lifecycle = RestartState(policy())
    crash(lifecycle, 0, code)
    assert lifecycle.state is State.FAILED
    assert lifecycle.restarts == 0


def test_exit_code_zero_means_what_the_service_is() -> None:
    for lifecycle, state in (
        (RestartState(policy(), finishes=True), State.FINISHED),
        (RestartState(policy(), may_leave=True), State.LEFT),
        (RestartState(policy()), State.WAITING),
    ):
        crash(lifecycle, 0, code=0)
        assert lifecycle.state is state


def test_a_service_that_ended_well_comes_back_without_being_counted_as_failing() -> None:
    lifecycle = RestartState(policy(max_restarts=0))
    for now in range(3):
        assert crash(lifecycle, now, code=0) == RETURN_S
    assert lifecycle.state is State.WAITING
    assert lifecycle.failing_since is None


def test_a_service_that_was_asked_to_end_stays_ended() -> None:
    running = RestartState(policy())
    running.started(0)
    running.asked()
    assert running.exited(-15, 1) is State.STOPPED
    waiting = RestartState(policy())
    crash(waiting, 0)
    waiting.asked()
    assert waiting.state is State.STOPPED


def test_it_has_recovered_when_it_ran_for_a_while() -> None:
    lifecycle = RestartState(policy())
    crash(lifecycle, 0)
    assert not lifecycle.healthy(1)
    lifecycle.started(1)
    assert not lifecycle.healthy(1 + SETTLED_S / 2)
    assert lifecycle.healthy(1 + SETTLED_S)


def test_failures_in_a_row_have_one_beginning() -> None:
    lifecycle = RestartState(policy())
    crash(lifecycle, 0)
    crash(lifecycle, 2)
    assert lifecycle.failing_since == 0
    lifecycle.started(5)
    lifecycle.exited(1, 5 + SETTLED_S)
    assert lifecycle.failing_since == 5 + SETTLED_S


def failure(service: str, time: float, rank: int = 0, code: int = 1) -> ServiceFailure:
    return ServiceFailure(service, Exit(code), time, rank, "", Path("x.log"))


def test_the_first_failure_is_the_root_cause() -> None:
    first = failure("broker", 1.0)
    assert root_cause([failure("trainer", 5.0), first, failure("reward", 2.0)]) is first


def test_of_failures_at_one_moment_the_service_started_first_is_named() -> None:
    first = failure("broker", 1.0, rank=1)
    assert root_cause([failure("feeder", 1.0, rank=4), first]) is first


def test_who_finds_that_everything_fails_names_the_cause_though_others_failed_for_it_before() -> None:
    verdict = failure("trainer", 9.0, code=RUN_FAILED_EXIT)
    assert root_cause([failure("generator-0", 1.0), verdict, failure("generator-1", 2.0)]) is verdict


def test_nothing_failed() -> None:
    assert root_cause([]) is None


def test_a_failure_reads_as_one_line(tmp_path: Path) -> None:
    log = tmp_path / "trainer.log"
    failure = ServiceFailure("trainer", Exit(-9), 0.0, 0, "out of memory", log)
    assert str(failure) == "trainer failed (killed by SIGKILL): out of memory"
    log.touch()
    assert str(failure) == f"trainer failed (killed by SIGKILL): out of memory [log: {log}]"


TRACE = "Traceback (most recent call last):\n  File 'x.py', line 1, in f\nValueError: no such column\n"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", ""),
        ("loading\nready\n", ""),
        ("\x1b[31mtidemill: model.path: required and missing\x1b[0m\nbye\n", "model.path: required and missing"),
        (f"loading\n{TRACE}cleaning up\n", "ValueError: no such column"),
        ("redis.exceptions.ConnectionError: refused\nsemaphore cleanup\n", "redis.exceptions.ConnectionError: refused"),
        (
            "    | schemas.errors.InfraError: the engine died\n    +------------------------------------\n",
            "schemas.errors.InfraError: the engine died",
        ),
        ("cannot open the model\nloaded 3 files\n", "cannot open the model"),
        (
            json.dumps({"level": "error", "event": "step failed", "exception": TRACE})
            + "\n"
            + json.dumps({"level": "info", "event": "closing"})
            + "\nsome Error: noise\n",
            "step failed: ValueError: no such column",
        ),
        (json.dumps({"level": "info", "event": "an error in a word"}) + "\nlast\n", ""),
        (json.dumps({"level": "info", "event": "engine started"}) + "\n", ""),
    ],
)
def test_the_line_that_says_why(tmp_path: Path, text: str, line: str) -> None:
    log = tmp_path / "x.log"
    log.write_text(text)
    assert last_error(log) == line


@pytest.mark.parametrize(
    ("text", "code", "line"),
    [
        ("WARNING 11-22 [importing.py:44] Triton is installed, but no driver failed not\n", -9, ""),
        ("Triton is installed, but no driver was found\n", -9, ""),
        (TRACE, -15, ""),
        ("Triton is installed, but no driver was found\n", 1, ""),
        ("WARNING 11-22 [importing.py:44] an optional import failed\n", 1, ""),
        ("INFO ready\nterminate called after throwing\n  what(): no device\n", -6, "what(): no device"),
        ("sh: vllm: not found\n", 127, "sh: vllm: not found"),
        ("ValueError: x\ntidemill: no file data.jsonl\n", 2, "no file data.jsonl"),
        ("ValueError: x\ntidemill: 16 prompt groups in a row failed\n", 6, "16 prompt groups in a row failed"),
        ("ValueError: x\ntidemill: the broker is gone\n", 1, "ValueError: x"),
    ],
)
def test_a_line_is_named_as_the_cause_of_an_end_only_when_it_can_be(
    tmp_path: Path, text: str, code: int, line: str
) -> None:
    log = tmp_path / "x.log"
    log.write_text(text)
    assert last_error(log, code=code) == line


def test_only_the_last_life_of_a_service_is_looked_at(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    old = "ValueError: yesterday\n"
    log.write_text(old + "fine\n")
    assert last_error(log, start=len(old)) == ""
    assert last_error(tmp_path / "none.log") == ""
