"""When the supervisor restarts a service, asks for another generator or gives one up, and how services are named."""

import json
import signal
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deploy.launchers.gpus import GpuPlan
from deploy.launchers.ray import GROW_S, SHRINK_S, Autoscaler, Ray, RayCluster, RayService
from deploy.services.main import service_name
from deploy.supervisor.failures import ServiceFailure, last_error, root_cause
from deploy.supervisor.restart_policy import MAX_BACKOFF_S, RETURN_S, SETTLED_S, RestartState, State
from deploy.supervisor.services import Exit
from schemas.config import SupervisorConfig
from schemas.control_api.status import ServiceStatus
from schemas.errors import CONFIG_EXIT, FENCED_EXIT, RUN_FAILED_EXIT
from tests.support.broker.run_statuses import make_status


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
def test_a_line_is_the_cause_of_an_end_only_when_it_can_be(tmp_path: Path, text: str, code: int, line: str) -> None:
    log = tmp_path / "x.log"
    log.write_text(text)
    assert last_error(log, code=code) == line


def test_only_the_last_life_of_a_service_is_looked_at(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    old = "ValueError: yesterday\n"
    log.write_text(old + "fine\n")
    assert last_error(log, start=len(old)) == ""
    assert last_error(tmp_path / "none.log") == ""


def test_one_more_when_tasks_have_waited_long_enough_and_then_the_count_starts_anew() -> None:
    scaler = Autoscaler(1, 3)
    assert scaler.wanted(0.0, replicas=1, loading=0, waiting=5) == 1
    assert scaler.wanted(GROW_S, replicas=1, loading=0, waiting=5) == 2
    assert scaler.wanted(GROW_S + 1, replicas=2, loading=0, waiting=5) == 2


def test_nothing_is_concluded_while_a_generator_is_still_loading() -> None:
    scaler = Autoscaler(1, 3)
    scaler.wanted(0.0, replicas=2, loading=0, waiting=5)
    assert scaler.wanted(GROW_S, replicas=2, loading=1, waiting=5) == 2
    assert scaler.wanted(GROW_S + 1, replicas=2, loading=0, waiting=5) == 2


def test_one_less_only_after_a_long_time_without_anything_waiting() -> None:
    scaler = Autoscaler(1, 3)
    assert scaler.wanted(0.0, replicas=3, loading=0, waiting=0) == 3
    assert scaler.wanted(SHRINK_S / 2, replicas=3, loading=0, waiting=1) == 3
    assert scaler.wanted(SHRINK_S, replicas=3, loading=0, waiting=0) == 3
    assert scaler.wanted(2 * SHRINK_S, replicas=3, loading=0, waiting=0) == 2


def test_the_bounds_hold() -> None:
    scaler = Autoscaler(2, 3)
    assert scaler.wanted(0.0, replicas=1, loading=0, waiting=0) == 2
    assert scaler.wanted(0.0, replicas=9, loading=9, waiting=9) == 3
    scaler.wanted(1.0, replicas=3, loading=0, waiting=9)
    assert scaler.wanted(1.0 + GROW_S, replicas=3, loading=0, waiting=9) == 3
    scaler.wanted(100.0, replicas=2, loading=0, waiting=0)
    assert scaler.wanted(100.0 + SHRINK_S, replicas=2, loading=0, waiting=0) == 2


def test_a_number_that_a_user_ordered_is_within_the_bounds_until_the_next_order() -> None:
    for ordered in (5, 1, 0):
        fixed, scaler = Autoscaler(3, 3), Autoscaler(2, 4)
        for each in (fixed, scaler):
            each.follow(ordered, replicas=ordered)
            assert each.wanted(0.0, replicas=ordered, loading=0, waiting=9) == ordered
        assert fixed.wanted(GROW_S, replicas=ordered, loading=0, waiting=9) == ordered, "no range was asked for"
        assert fixed.wanted(GROW_S, replicas=ordered + 1, loading=0, waiting=9) == ordered
        assert scaler.wanted(GROW_S, replicas=ordered, loading=0, waiting=9) == (5 if ordered == 5 else ordered + 1)
        scaler.follow(3, replicas=3)
        assert scaler.wanted(GROW_S, replicas=9, loading=0, waiting=9) == 4
    fixed.follow(99, replicas=0)
    assert fixed.wanted(GROW_S, replicas=0, loading=0, waiting=9) == 0, "the supervisor may have refused it"


class Replicas:
    """A supervisor with some generators."""

    def __init__(self, count: int = 1) -> None:
        self.count = count

    def replicas(self, role: str) -> int:
        return self.count

    def scale(self, role: str, count: int) -> None:
        self.count = count


@pytest.mark.parametrize(("role", "bundle", "gpus"), [("trainer", 0, 4.0), ("sft", 0, 4.0), ("reward", 1, 0.0)])
def test_ray_trains_the_first_model_where_the_trainer_will_run(role: str, bundle: int, gpus: float) -> None:
    pytest.importorskip("ray")
    cluster = object.__new__(RayCluster)
    cluster._options, cluster.gpus, cluster._group = Ray(), GpuPlan(4.0, 1.0, 1), object()
    cluster._ray = SimpleNamespace(remote=lambda _: SimpleNamespace(options=dict))
    asked = cluster._actor(role, role)
    assert (asked["scheduling_strategy"].placement_group_bundle_index, asked["num_gpus"]) == (bundle, gpus)


def test_why_ray_could_not_start_a_service_is_in_its_log(tmp_path: Path) -> None:
    class LostError(Exception):
        pass

    def get(answer: Any) -> int:
        raise LostError("The actor died:\n  ModuleNotFoundError: No module named 'deploy'\n")

    cluster = SimpleNamespace(wait=lambda answers, timeout: (answers, []), get=get, kill=lambda actor: None)
    cluster.exceptions = SimpleNamespace(RayError=LostError)
    call = SimpleNamespace(remote=object)
    log = tmp_path / "generator-0.log"
    service = RayService(cluster, SimpleNamespace(ready=call, wait=call), log)
    assert [service.poll(), service.poll()] == [Exit(-signal.SIGKILL)] * 2
    assert log.read_text() == "tidemill: Ray: The actor died: ModuleNotFoundError: No module named 'deploy'\n"


def test_ray_leaves_as_many_generators_as_a_user_ordered() -> None:
    status = make_status()
    cluster, scaler = object.__new__(RayCluster), Replicas(5)
    cluster._autoscaler = Autoscaler(3, 3)
    scaling = status.scaling.model_copy(update={"replicas": {"generator": 5}})
    cluster.tick(scaler, status.model_copy(update={"scaling": scaling}))
    assert scaler.count == 5


@pytest.mark.parametrize(("waiting", "pending", "wanted"), [(0, 4, 1), (4, 4, 2)])
def test_tasks_in_progress_do_not_ask_for_another_generator_tasks_that_wait_do(
    waiting: int, pending: int, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = make_status()
    tasks = status.streams[0].model_copy(update={"waiting": waiting, "pending": pending})
    generator = ServiceStatus.model_construct(role="generator", state="running")
    status = status.model_copy(update={"streams": [tasks], "services": [generator]})
    # Without a cluster: only what it concludes from the status.
    cluster, scaler = object.__new__(RayCluster), Replicas()
    cluster._autoscaler = Autoscaler(1, 8)
    for now in (0.0, GROW_S):
        monkeypatch.setattr("deploy.launchers.ray.time.monotonic", lambda now=now: now)
        cluster.tick(scaler, status)
    assert scaler.count == wanted


def test_machines_of_two_domains_have_services_of_two_names(monkeypatch: pytest.MonkeyPatch) -> None:
    names = set()
    for host in ("node.a", "node.b"):
        monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
        names.add(service_name("generator"))
    assert names == {"generator-node.a", "generator-node.b"}


def test_a_role_with_one_member_gives_its_name() -> None:
    assert service_name("trainer") == "trainer"
    assert service_name("reward", "reward-7") == "reward-7"
