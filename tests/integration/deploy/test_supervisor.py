"""The local supervisor with real processes: restarts, orderly ends, and nothing left behind whatever happens."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.supervisor import supervisor as supervisor_module
from deploy.supervisor.process import Process, Processes
from deploy.supervisor.restart_policy import State
from deploy.supervisor.services import Change, ServiceSpec
from deploy.supervisor.supervisor import RunOutcome, Supervisor
from schemas.config import SupervisorConfig
from schemas.errors import CONFIG_EXIT, ConfigError, InfraError

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")

DEADLINE_S = 30.0

FAMILY = """
import os, subprocess, sys, time
# A child in this process group, and a grandchild that got away into a session of its own.
child = "import os, subprocess, sys, time; subprocess.Popen(['setsid', 'sleep', '1000']); time.sleep(1000)"
subprocess.Popen([sys.executable, "-c", child])
{more}
print("ready", flush=True)
{end}
"""
SLEEP = "time.sleep(1000)"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)"


def script(text: str) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(text)]


def family(more: str = "", end: str = SLEEP) -> list[str]:
    return script(FAMILY.format(more=more, end=end))


def wait_for(what: str, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {DEADLINE_S} s for {what}"
        time.sleep(0.02)


def marked(token: str) -> list[int]:
    """Live processes whose environment holds the token, zombies left out."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if f"TOKEN={token}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def zombies() -> list[int]:
    """Dead children of this process that are not collected yet."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, parent = (entry / "stat").read_bytes().rpartition(b")")[2].split()[:2]
            except OSError:
                continue
            if state == b"Z" and int(parent) == os.getpid():
                found.append(int(entry.name))
    return found


@pytest.fixture
def token(tmp_path: Path) -> Iterator[str]:
    """Marks the processes of one test; none may be left at its end."""
    yield str(tmp_path)
    left = marked(str(tmp_path))
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, "processes were left behind"


class Rig:
    """A supervisor whose services carry the token."""

    def __init__(self, folder: Path, token: str, starter: Processes | None = None, **policy: float) -> None:
        self.folder = folder
        self.token = token
        self.changes: list[Change] = []
        self.on_change: Callable[[Change], object] = lambda change: None
        config = SupervisorConfig.model_validate({"backoff_s": 0.02, "grace_s": 10, **policy})
        self.supervisor = Supervisor(config, folder / "logs", self._note, starter)

    def _note(self, change: Change) -> None:
        self.changes.append(change)
        self.on_change(change)

    def spec(self, name: str, argv: list[str], **more: object) -> ServiceSpec:
        return ServiceSpec(name, argv, environment={"TOKEN": self.token}, **more)  # type: ignore[arg-type]

    def run_until(self, what: str, condition: Callable[[], bool]) -> None:
        def poll() -> bool:
            assert self.supervisor.poll() is None
            return condition()

        wait_for(what, poll)

    def run(self) -> RunOutcome:
        deadline = time.monotonic() + DEADLINE_S

        def tick() -> None:
            assert time.monotonic() < deadline, "the run has no outcome"

        return self.supervisor.run(tick)

    def log(self, name: str) -> str:
        file = self.folder / "logs" / f"{name}.log"
        return file.read_text() if file.exists() else ""

    def texts(self, name: str) -> list[str]:
        return [change.text for change in self.changes if change.service == name]

    def pid_soon(self, name: str) -> int:
        """Its process id, as soon as the guardian has told it."""
        wait_for("a process id", lambda: all(s.pid is not None for s in self.supervisor.services if s.name == name))
        return self.pid(name)

    def pid(self, name: str) -> int:
        pids = [s.pid for s in self.supervisor.services if s.name == name]
        assert pids[0] is not None
        return pids[0]


def test_the_run_is_done_when_the_finishing_service_is(tmp_path: Path, token: str) -> None:
    rig = Rig(tmp_path, token)
    with rig.supervisor as supervisor:
        supervisor.add(rig.spec("feeder", family()))
        supervisor.add(rig.spec("trainer", script("print('trained')"), finishes=True))
        assert rig.run() == RunOutcome("finished")
        supervisor.stop()
        assert [s.state for s in supervisor.services] == [State.STOPPED, State.FINISHED]
    assert "trained" in rig.log("trainer")


def test_what_dies_is_started_again_and_counted(tmp_path: Path, token: str) -> None:
    rig = Rig(tmp_path, token)
    with rig.supervisor as supervisor:
        supervisor.add(rig.spec("reward", family()))
        for life in (1, 2):
            rig.run_until("the service", lambda life=life: rig.log("reward").count("ready") == life)
            os.kill(rig.pid("reward"), signal.SIGKILL)
        rig.run_until("its third life", lambda: rig.log("reward").count("ready") == 3)
        assert supervisor.services[0].restarts == 2
        # Three processes of this life and its guardian; nothing of the former two.
        wait_for("a full family", lambda: len(marked(token)) == 4)
    assert any(text.startswith("killed by SIGKILL") for text in rig.texts("reward"))


def test_a_service_that_writes_very_much_keeps_its_newest_lines_and_its_reason(
    tmp_path: Path, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "MOST_LOG_BYTES", 100_000)
    monkeypatch.setattr(supervisor_module, "LOGS_EVERY_S", 0.0)
    rig = Rig(tmp_path, token, max_restarts=0)
    newest, go = tmp_path / "logs" / "reward.log.1", tmp_path / "go"
    code = f"""
    import os
    while not os.path.exists({str(go)!r}):
        print("x" * 1000, flush=True)
    raise SystemError("no more to say")
    """
    with rig.supervisor as supervisor:
        supervisor.add(rig.spec("reward", script(code)))
        rig.run_until("a log that was cut", newest.exists)
        go.touch()
        outcome = rig.run()
    assert (outcome.reason, "no more to say" in str(outcome.cause)) == ("failed", True)
    assert 0 < newest.stat().st_size < 100_000


def test_what_dies_again_and_again_is_given_up_with_its_reason(tmp_path: Path, token: str) -> None:
    rig = Rig(tmp_path, token, max_restarts=2)
    with rig.supervisor as supervisor:
        supervisor.add(rig.spec("feeder", family()))
        supervisor.add(rig.spec("trainer", script("raise ValueError('no such column')"), finishes=True))
        outcome = rig.run()
    assert outcome.reason == "failed"
    assert outcome.cause is not None
    assert str(outcome.cause) == (
        f"trainer failed (exit code 1): ValueError: no such column [log: {tmp_path}/logs/trainer.log]"
    )
    assert rig.log("trainer").count("Traceback") == 3


def test_the_first_to_fail_is_named_not_those_that_failed_after_it(tmp_path: Path, token: str) -> None:
    # Long enough for the follower to fail permanently while the broker waits for its second life.
    rig = Rig(tmp_path, token, max_restarts=1, backoff_s=DEADLINE_S)
    seen = tmp_path / "seen"
    rig.on_change = lambda change: seen.touch() if "disk full" in change.text else None
    follower = f"""
        import os, sys, time
        while not os.path.exists({str(seen)!r}): time.sleep(0.01)
        sys.exit({CONFIG_EXIT})
    """
    with rig.supervisor as supervisor:
        supervisor.add(rig.spec("trainer", script(follower)))
        supervisor.add(rig.spec("broker", script("raise OSError('disk full')")))
        outcome = rig.run()
    assert outcome.cause is not None
    assert outcome.cause.service == "broker"
    assert outcome.cause.line == "OSError: disk full"
    assert any("not restarted" in text for text in rig.texts("trainer"))


def test_a_configuration_error_is_not_tried_again(tmp_path: Path, token: str) -> None:
    rig = Rig(tmp_path, token)
    fails = "import sys; print('tidemill: model.path: required and missing', file=sys.stderr); sys.exit(2)"
    with rig.supervisor as supervisor:
        supervisor.add_role(
            "generator", lambda i: rig.spec(f"generator-{i}", script(fails), role="generator", essential=False), 2
        )
        outcome = rig.run()
    assert outcome.cause is not None
    assert outcome.cause.line == "model.path: required and missing"
    assert all(s.restarts == 0 for s in supervisor.services)


def test_the_run_goes_on_while_one_replica_is_left(tmp_path: Path, token: str) -> None:
    rig = Rig(tmp_path, token, max_restarts=0)

    def replica(index: int) -> ServiceSpec:
        return rig.spec(f"generator-{index}", family(), role="generator", essential=False)

    with rig.supervisor as supervisor:
        supervisor.add_role("generator", replica, 2)
        rig.run_until("both", lambda: all("ready" in rig.log(f"generator-{i}") for i in (0, 1)))
        os.kill(rig.pid("generator-0"), signal.SIGKILL)
        rig.run_until("its end", lambda: supervisor.services[0].state is State.FAILED)
        os.kill(rig.pid("generator-1"), signal.SIGKILL)
        outcome = rig.run()
    assert outcome.reason == "failed"
    assert outcome.cause is not None
    assert outcome.cause.service == "generator-0"


def test_the_last_generator_of_a_pool_may_fail_while_another_pool_has_one(tmp_path: Path, token: str) -> None:
    rig = Rig(tmp_path, token, max_restarts=0)

    def replica(pool: str) -> Callable[[int], ServiceSpec]:
        return lambda index: rig.spec(
            f"generator-{pool}-{index}", family(), role="generator", pool=pool, essential=False
        )

    with rig.supervisor as supervisor:
        supervisor.add_role("generator.a", replica("a"), 1)
        supervisor.add_role("generator.b", replica("b"), 2)
        names = ["generator-a-0", "generator-b-0", "generator-b-1"]
        rig.run_until("all", lambda: all("ready" in rig.log(name) for name in names))
        os.kill(rig.pid("generator-a-0"), signal.SIGKILL)
        rig.run_until("its end", lambda: supervisor.services[0].state is State.FAILED)
        assert supervisor.poll() is None
        supervisor.scale("generator.b", 1)
        rig.run_until("one to end", lambda: supervisor.services[2].state is State.STOPPED)
        os.kill(rig.pid("generator-b-0"), signal.SIGKILL)
        assert rig.run().reason == "failed"


def test_replicas_come_and_go(tmp_path: Path, token: str) -> None:
    rig = Rig(tmp_path, token)

    def replica(index: int) -> ServiceSpec:
        return rig.spec(f"generator-{index}", family(), role="generator", essential=False)

    def living() -> list[str]:
        return [s.name for s in supervisor.services if s.state is State.RUNNING]

    with rig.supervisor as supervisor:
        supervisor.add_role("generator", replica, 1)
        supervisor.scale("generator", 3)
        assert living() == ["generator-0", "generator-1", "generator-2"]
        supervisor.scale("generator", 1)
        rig.run_until("two to end", lambda: [s.state for s in supervisor.services].count(State.STOPPED) == 2)
        assert living() == ["generator-0"]
        supervisor.scale("generator", 2)
        assert living() == ["generator-0", "generator-1"]
        supervisor.scale("generator", 0)
        rig.run_until("all to end", lambda: not marked(token))
        with pytest.raises(ConfigError, match="'trainer' cannot be scaled"):
            supervisor.scale("trainer", 2)


def test_services_are_stopped_in_order_and_the_kept_one_lives_on(tmp_path: Path, token: str) -> None:
    rig = Rig(tmp_path, token)
    ends = tmp_path / "ends"
    polite = """
        import signal, sys, time
        def end(*_):
            with open({ends!r}, "a") as file: file.write({name!r} + " ")
            sys.exit(0)
        signal.signal(signal.SIGTERM, end)
        print("ready", flush=True)
        time.sleep(1000)
    """
    names = ["broker", "trainer", "generator", "feeder"]
    with rig.supervisor as supervisor:
        for order, name in zip((9, 3, 1, 0), names, strict=True):
            argv = script(polite.format(ends=str(ends), name=name))
            supervisor.add(rig.spec(name, argv, stop_order=order))
        rig.run_until("all", lambda: all("ready" in rig.log(name) for name in names))
        supervisor.stop(keep=["broker"])
        assert ends.read_text().split() == ["feeder", "generator", "trainer"]
        assert supervisor.services[0].state is State.RUNNING
        supervisor.stop()
    assert ends.read_text().split()[-1] == "broker"


def test_the_services_of_a_finished_run_are_stopped_together(tmp_path: Path, token: str) -> None:
    """Each ends only once all were asked to."""
    rig = Rig(tmp_path, token, grace_s=DEADLINE_S)
    waits = """
        import pathlib, signal, sys, time
        def end(*_):
            folder = pathlib.Path({folder!r})
            (folder / {name!r}).touch()
            while len(list(folder.iterdir())) < 2: time.sleep(0.01)
            sys.exit(0)
        signal.signal(signal.SIGTERM, end)
        print("ready", flush=True)
        time.sleep(1000)
    """
    (asked := tmp_path / "asked").mkdir()
    with rig.supervisor as supervisor:
        for order, name in enumerate(("feeder", "control")):
            argv = script(waits.format(folder=str(asked), name=name))
            supervisor.add(rig.spec(name, argv, stop_order=order))
        rig.run_until("both", lambda: all("ready" in rig.log(name) for name in ("feeder", "control")))
        supervisor.add(rig.spec("trainer", script("print('trained')"), finishes=True))
        assert rig.run() == RunOutcome("finished")
        supervisor.stop()
    assert rig.texts("feeder")[-1] == rig.texts("control")[-1] == "stopped"


def test_who_ignores_sigterm_is_killed_after_its_grace(tmp_path: Path, token: str) -> None:
    rig = Rig(tmp_path, token, grace_s=0.3)
    with rig.supervisor as supervisor:
        supervisor.add(rig.spec("generator", family(STUBBORN)))
        rig.run_until("the service", lambda: "ready" in rig.log("generator"))
        supervisor.stop()
        assert not marked(token)
    assert rig.texts("generator")[-1] == "did not end within 0.3 s, killed"


def test_grandchildren_of_a_service_that_ends_well_are_gone_too(tmp_path: Path, token: str) -> None:
    rig = Rig(tmp_path, token)
    with rig.supervisor as supervisor:
        supervisor.add(rig.spec("trainer", family(end="time.sleep(0.3)"), finishes=True))
        assert rig.run().reason == "finished"
        assert not marked(token)


def test_a_killed_guardian_takes_its_service_along(tmp_path: Path, token: str) -> None:
    rig = Rig(tmp_path, token)
    with rig.supervisor as supervisor:
        supervisor.add(rig.spec("reward", family()))
        rig.run_until("the service", lambda: "ready" in rig.log("reward"))
        wait_for("a full family", lambda: len(marked(token)) == 4)
        first = set(marked(token))
        guardian = os.getsid(rig.pid("reward"))
        os.kill(guardian, signal.SIGKILL)
        rig.run_until("the next life", lambda: rig.log("reward").count("ready") == 2)
        rig.run_until("the end of the former one", lambda: not first & set(marked(token)))
        # Other tests' children do not count.
        rig.run_until("the collection of the former guardian", lambda: not ({guardian} | first) & set(zombies()))


def test_a_guardian_does_not_look_like_its_service(tmp_path: Path, token: str) -> None:
    rig = Rig(tmp_path, token)
    with rig.supervisor as supervisor:
        supervisor.add(rig.spec("reward", family()))
        guardian = Path(f"/proc/{os.getsid(rig.pid_soon('reward'))}/cmdline").read_bytes()
    assert guardian.rstrip(b"\0").endswith(b"reward")
    assert b"subprocess" not in guardian


SUPERVISE = """
import sys
from pathlib import Path
from deploy.supervisor.services import ServiceSpec
from deploy.supervisor.supervisor import Supervisor
from schemas.config import SupervisorConfig

with Supervisor(SupervisorConfig(grace_s=float(sys.argv[2])), Path(sys.argv[1])) as supervisor:
    for name in ("one", "two"):
        supervisor.add(ServiceSpec(name, [sys.executable, "-c", sys.argv[3]]))
    outcome = supervisor.run()
    print("outcome", outcome.reason, flush=True)
    supervisor.stop()
    print("stopped", flush=True)
"""


def supervise(folder: Path, token: str, program: str, grace_s: float = 20) -> subprocess.Popen[str]:
    """A supervisor in a process of its own, both services ready."""
    process = subprocess.Popen(
        [sys.executable, "-c", SUPERVISE, str(folder), str(grace_s), program],
        env={**os.environ, "TOKEN": token},
        stdout=subprocess.PIPE,
        text=True,
    )
    logs = [folder / "one.log", folder / "two.log"]
    wait_for("both services", lambda: all(log.exists() and "ready" in log.read_text() for log in logs))
    wait_for("both families", lambda: len(marked(token)) == 9)
    return process


@pytest.mark.parametrize("more", ["", STUBBORN], ids=["polite", "ignoring SIGTERM"])
def test_nothing_is_left_when_the_supervisor_is_killed(tmp_path: Path, token: str, more: str) -> None:
    process = supervise(tmp_path, token, FAMILY.format(more=more, end=SLEEP))
    process.kill()
    process.communicate(timeout=DEADLINE_S)
    wait_for("all processes to end", lambda: not marked(token))


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_everything(tmp_path: Path, token: str, signum: signal.Signals) -> None:
    process = supervise(tmp_path, token, FAMILY.format(more="", end=SLEEP))
    process.send_signal(signum)
    output, _ = process.communicate(timeout=DEADLINE_S)
    assert output.split("\n")[:2] == ["outcome stopped", "stopped"]
    assert process.returncode == 0
    assert not marked(token)


def test_a_second_interrupt_kills_at_once(tmp_path: Path, token: str) -> None:
    # Without the second interrupt these would have ten minutes.
    process = supervise(tmp_path, token, FAMILY.format(more=STUBBORN, end=SLEEP), grace_s=600)
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None
    assert process.stdout.readline() == "outcome stopped\n"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=DEADLINE_S)
    assert not marked(token)


def test_a_replica_for_which_there_is_no_room_is_refused_and_the_run_goes_on(tmp_path: Path, token: str) -> None:
    class Full(Processes):
        def start(self, argv: Any, name: str, *rest: Any) -> Process:
            if name == "generator-1":
                raise ConfigError("no GPU is left")
            return super().start(argv, name, *rest)

    supervisor = Supervisor(SupervisorConfig(), tmp_path / "logs", starter=Full())
    with supervisor:
        supervisor.add_role(
            "generator",
            lambda i: ServiceSpec(f"generator-{i}", script("import time; time.sleep(1000)"), role="generator"),
            1,
        )
        with pytest.raises(ConfigError, match="no GPU is left"):
            supervisor.scale("generator", 2)
        assert supervisor.poll() is None
        assert [s.name for s in supervisor.services] == ["generator-0"]


def test_a_restart_that_this_machine_has_no_room_for_is_retried_and_the_run_goes_on(tmp_path: Path, token: str) -> None:
    class Short(Processes):
        starts = 0

        def start(self, argv: Any, name: str, *rest: Any) -> Process:
            self.starts += name == "reward"
            if self.starts in (2, 3):
                raise InfraError(f"cannot start {name}: Resource temporarily unavailable")
            return super().start(argv, name, *rest)

    rig = Rig(tmp_path, token, starter=Short())
    with rig.supervisor as supervisor:
        supervisor.add(rig.spec("reward", family()))
        rig.run_until("the service", lambda: "ready" in rig.log("reward"))
        os.kill(rig.pid("reward"), signal.SIGKILL)
        rig.run_until("its second life", lambda: rig.log("reward").count("ready") == 2)
        assert supervisor.services[0].restarts == 3
    assert rig.texts("reward").count("restarted") == 1
    failed = [text for text in rig.texts("reward") if "Resource temporarily unavailable" in text]
    assert [text.partition(" in ")[0] for text in failed] == [
        f"exit code 1: cannot start reward: Resource temporarily unavailable; restart {restart}" for restart in (2, 3)
    ]
