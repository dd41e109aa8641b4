"""The sandbox: what a program gets in it, what it is kept from, and that nothing of it is left."""

import json
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from schemas.errors import ConfigError, InfraError
from schemas.system.sandbox import bubblewrap, others
from schemas.system.sandbox.jail import Sandbox, choose, why_not
from schemas.system.sandbox.limits import Limits, Mount, find_interpreter
from schemas.system.sandbox.probe import probe
from tests.support.user_code.sandboxes import LIMITS, left_with, mark, processes_with, run_python, sandbox

SPINNING = "import os, sys\nprint('begun', flush=True)\nwhile True: pass"


both = pytest.mark.parametrize("name", ["bwrap", "sandlock"])


@both
def test_a_program_gets_its_input_and_its_files_and_says_what_it_found(name: str) -> None:
    code = "import sys; print(sys.stdin.read().upper()); print('no', file=sys.stderr); sys.exit(3)"
    outcome = run_python(code, name, stdin=b"ab")
    assert (outcome.end, outcome.code, outcome.stdout, outcome.stderr) == ("exit", 3, b"AB\n", b"no\n")


def test_a_program_sees_no_environment_and_is_an_ordinary_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_URL", "redis://secret")
    code = "import json, os; print(json.dumps([sorted(os.environ), os.getuid(), open('/proc/1/environ').read()]))"
    names, uid, environment_of_bwrap = json.loads(run_python(code).stdout)
    assert set(names) <= {"HOME", "LANG", "LC_CTYPE", "PATH", "PWD"}
    assert uid == bubblewrap.UID
    assert "secret" not in environment_of_bwrap


@both
def test_the_probe_finds_that_nothing_gets_through(name: str) -> None:
    probed = probe(sandbox(name))
    assert probed.allowed == []
    assert {"fork loops", "unix sockets"} <= set(probed.blocked)


def test_the_probe_finds_what_gets_through_where_there_is_no_sandbox() -> None:
    probed = probe(Sandbox("none"))
    assert {"files", "writing", "network", "unix sockets", "other processes", "fork loops"} <= set(probed.allowed)
    # The environment is cleared and the address space limited in any case.
    assert probed.blocked == ["environment", "allocations"]


def test_only_tmp_can_be_written_and_holds_no_more_than_its_size() -> None:
    code = """
        import os
        written = []
        for folder, below, _ in os.walk("/"):
            if folder in ("/usr", "/proc") or "bin" in below and folder != "/":
                below.clear()
            try:
                open(folder + "/written", "w").close()
                written.append(folder)
            except OSError:
                pass
        print(*sorted(written))
        try:
            for n in range(64):
                with open(f"/tmp/{n}", "wb") as file:
                    file.write(bytes(1 << 20))
        except OSError as error:
            print(n, error.strerror)
    """
    outcome = run_python(textwrap.dedent(code), limits=Limits(disk_mb=8))
    assert outcome.stdout.decode().splitlines() == ["/dev/shm /tmp", "8 No space left on device"]


@pytest.mark.parametrize(
    ("code", "limits", "end"),
    [
        (SPINNING, Limits(cpu_s=1), "time"),
        ("import time; time.sleep(60)", Limits(wall_s=0.5), "time"),
        ("while True: print('x' * 1000)", Limits(output_bytes=4096), "output"),
    ],
    ids=["computes", "waits", "prints"],
)
@both
def test_a_program_is_ended_at_its_limits(name: str, code: str, limits: Limits, end: str) -> None:
    outcome = run_python(code, name, limits)
    # sandlock does not say by which signal a program ended.
    assert outcome.end == end or (name == "sandlock" and code == SPINNING and outcome.code > 128)
    assert len(outcome.stdout) <= limits.output_bytes


@both
def test_nothing_is_left_of_a_program_that_leaves_its_session(name: str) -> None:
    word = mark()
    code = f"""
        import os, time
        for n in range(3):
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0:
                    os.execv("/usr/bin/sleep", ["{word}", "1000"])
                os._exit(0)
    """
    assert run_python(textwrap.dedent(code), name).end == "exit"
    assert not left_with(word)
    assert run_python(textwrap.dedent(code) + "time.sleep(100)", name, Limits(wall_s=1)).end == "time"
    assert not left_with(word)


@both
def test_nothing_is_left_of_a_program_that_is_killed_while_its_sandbox_is_made(name: str) -> None:
    word = mark()
    way = sandbox(name)
    for n in range(40):
        running = way.start(["/usr/bin/sleep", "1000", word])
        time.sleep(n * 0.0005)
        running.close()
    assert not left_with(word)


@both
def test_a_program_dies_with_the_process_that_started_it(name: str, tmp_path: Path) -> None:
    sandbox(name)
    word = mark()
    code = f"""
        from schemas.system.sandbox.jail import Sandbox
        running = Sandbox("{name}").start(["/bin/sh", "-c", "echo begun; exec sleep 1000", "{word}"])
        print(running.stdout.read(6), flush=True)
        input()
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert parent.stdin is not None
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"b'begun\\n'\n"
    jailed = processes_with(word)
    assert jailed
    parent.send_signal(signal.SIGKILL)
    parent.communicate()
    assert not psutil.wait_procs(jailed, timeout=10)[1]


def test_a_sandbox_that_cannot_be_started_is_an_infrastructure_error() -> None:
    with pytest.raises(InfraError, match=r"the sandbox could not be started: .*nowhere"):
        sandbox().run(["/usr/bin/true"], mounts=[Mount(Path("/nowhere"))])


def test_auto_takes_what_works_and_refuses_with_the_fix_where_nothing_does(monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox()
    assert choose("auto").name == "bwrap"
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(others, "has_sandlock", lambda: False)
    why_not.cache_clear()
    try:
        with pytest.raises(ConfigError, match=r"bwrap: not installed; sandlock: not installed\): install bubblewrap"):
            choose("auto")
        assert choose("none").name == "none"
        with pytest.raises(ConfigError, match="sandbox 'docker' must be one of auto, bwrap, sandlock, gvisor, none"):
            choose("docker")
    finally:
        why_not.cache_clear()


def test_another_interpreter_brings_its_packages() -> None:
    python = find_interpreter(sys.executable)
    outcome = sandbox().run(
        [*python.command, "-c", "import msgspec; print(msgspec.json.decode(b'[1]'))"],
        limits=LIMITS,
        mounts=python.mounts,
    )
    assert outcome.stdout == b"[1]\n"
    with pytest.raises(ConfigError, match="python 'nothing' must be an interpreter"):
        find_interpreter("nothing")
