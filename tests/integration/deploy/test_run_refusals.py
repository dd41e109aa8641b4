"""Starting and deleting runs: one line for what is refused, and what is alive or not ours stays as it is."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from shutil import copytree

import pytest
import yaml

from broker.client import Broker
from broker.connection.embedded import EmbeddedServer
from broker.flow.owner import Owner
from broker.heartbeat import refuse_copy
from deploy.control_plane.files.run_folder import RunFolder
from deploy.run.folder import forget_run, refuse_foreign, sole_user
from deploy.services.main import ROLES, command, run_role
from schemas.config import load_config
from schemas.errors import CONFIG_EXIT, ConfigError
from schemas.messages import Heartbeat
from schemas.run_record import claim_folder, read_record
from tests.support.models.tiny_model import make_tiny_model
from tests.support.runs.command_line import Finished, run_tidemill
from tests.support.runs.up_runs import make_decoys

GRACE_S = 300
LAUNCHER = """
import sys
from deploy.run import up
from deploy.supervisor.process import Processes

OTHER = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
FEEDER = '''
import sys, time
others = ["trainer", "generator-0", "reward-0"]
deadline = time.monotonic() + 60
while time.monotonic() < deadline and not all("up" in open(f"{sys.argv[1]}/{name}.log").read() for name in others):
    time.sleep(0.02)
print("tidemill: no file data.jsonl", file=sys.stderr)
sys.exit(2)
'''

class Mine(Processes):
    '''Services that are stand-ins: the feeder finds a mistake, the others do not end when they are asked to.'''

    def launch(self, config, fresh=False):
        up.check = lambda config, here, cards: None
        return up.run_up(config, self, fresh)

    def start(self, argv, name, role, log, environment, mark):
        argv = [sys.executable, "-c", FEEDER if role == "feeder" else OTHER, str(log.parent)]
        return super().start(argv, name, role, log, environment, mark)
"""
RANKS = 'import sys; from deploy.services.torchrun import launch; sys.exit(launch(2, ["--version"], 5))'


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    return make_tiny_model(folder / "a", hidden=32, layers=1), make_tiny_model(folder / "b", hidden=64, layers=1)


@pytest.fixture
def shared(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> Broker:
    """A server that several users share."""
    monkeypatch.setenv("REDIS_URL", broker.connection.url)
    return broker


def write_config(folder: Path, model: Path, run: str) -> Path:
    folder.mkdir(exist_ok=True)
    file = folder / "my.yaml"
    data = {
        "run": {"name": run, "folder": str(folder / "run")},
        "model": {"path": str(model), "dtype": "float32", "max_length": 64},
        "train": {"name": "arithmetic"},
        "reward": {"terms": [{"name": "exact"}]},
        "sampling": {"max_tokens": 16},
        "generator": {"engine": "transformers"},
        "launcher": {"name": "local"},
        "control": {"enabled": False},
    }
    file.write_text(yaml.safe_dump(data))
    return file


def refused(done: Finished, code: int = 2) -> str:
    assert (done.returncode, done.stderr.count("\n")) == (code, 1), done.stderr
    return done.stderr


def files(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def beat(broker: Broker, service: str = "trainer") -> None:
    broker.heartbeats.send(Heartbeat(service=service, role=service, host="h", pid=1, state="running"))


@pytest.mark.parametrize("fresh", [(), ("--fresh",)], ids=["start", "fresh"])
def test_a_second_run_of_the_same_name_is_refused_by_name_and_the_first_stays(
    shared: Broker, models: tuple[Path, Path], tmp_path: Path, fresh: tuple[str, ...]
) -> None:
    shared.owner.claim(Owner("theirs", "/home/else/runs/a", "node7"))
    file = write_config(tmp_path / "mine", models[0], shared.connection.keys.run)
    line = refused(run_tidemill("up", str(file), *fresh))
    assert "by the run in /home/else/runs/a on node7 since 20" in line
    assert "another run.name" in line
    assert not (tmp_path / "mine" / "run").exists(), "nothing is written"
    owner = shared.owner.read()
    assert owner is not None
    assert owner.id == "theirs"


def test_a_run_continues_with_its_own_model_only(shared: Broker, models: tuple[Path, Path], tmp_path: Path) -> None:
    run = shared.connection.keys.run
    file = write_config(tmp_path / "mine", models[0], run)
    claim_folder(load_config(file))
    folder = tmp_path / "mine" / "run"
    (folder / "summary.json").write_text('{"exit_reason": "finished", "steps": 9}')
    (folder / "config.yaml").write_text("as it was")
    before = files(folder)
    line = refused(run_tidemill("up", str(file), f"model.path={models[1]}"))
    assert f"model.path {models[0]}, which cannot become {models[1]}" in line
    assert files(folder) == before
    assert refused(run_tidemill("trainer", str(file), "run.seed=8")).count("run.seed 0, which cannot become 8") == 1
    assert files(folder) == before
    assert shared.owner.read() is None


def test_without_its_checkpoints_a_run_needs_fresh(shared: Broker, models: tuple[Path, Path], tmp_path: Path) -> None:
    file = write_config(tmp_path / "mine", models[0], shared.connection.keys.run)
    config = load_config(file)
    shared.owner.claim(Owner.of("the one before", config.folder))
    line = refused(run_tidemill("up", str(file)))
    assert "checkpoints/RUN.json is gone" in line
    assert "--fresh" in line
    refuse_foreign(config, fresh=True)
    with sole_user(config.folder):
        forget_run(config)
    assert shared.owner.read() is None


@pytest.mark.parametrize("role", ["trainer", "generator"])
def test_a_copied_folder_takes_nothing_over_while_the_run_is_alive(
    shared: Broker, models: tuple[Path, Path], tmp_path: Path, role: str
) -> None:
    name = shared.connection.keys.run
    first = load_config(write_config(tmp_path / "mine", models[0], name))
    shared.owner.claim(Owner.of(claim_folder(first).id, first.folder))
    file = write_config(tmp_path / "copy", models[0], name)
    copy = load_config(file)
    copytree(first.folder, copy.folder)
    refuse_foreign(copy, fresh=False)
    beat(shared, role)
    refuse_foreign(first, fresh=False)
    if role == "generator":
        refuse_foreign(copy, fresh=False)
        return
    for program in ("up", "trainer"):
        line = refused(run_tidemill(program, str(file)))
        assert f"{copy.folder} is a copy of a run that is alive in {first.folder}" in line
        assert "set another run.name to fork it" in line
    owner = Owner.of(claim_folder(first).id, first.folder)
    moved = replace(owner, host="another")
    refuse_copy(shared, moved, any_host=True)
    with pytest.raises(ConfigError, match=f"alive in {first.folder} on {owner.host}"):
        refuse_copy(shared, moved)
    owner = shared.owner.read()
    assert owner is not None
    assert owner.folder == str(first.folder)


def test_fresh_deletes_nothing_of_a_live_run(shared: Broker, models: tuple[Path, Path], tmp_path: Path) -> None:
    file = write_config(tmp_path / "mine", models[0], shared.connection.keys.run)
    record = claim_folder(load_config(file))
    shared.owner.claim(Owner.of(record.id, tmp_path / "mine" / "run"))
    beat(shared)
    before = files(tmp_path / "mine" / "run")
    line = refused(run_tidemill("up", str(file), "--fresh"))
    assert "is alive, with heartbeats of trainer in the last 15 s" in line
    assert {name: body for name, body in files(tmp_path / "mine" / "run").items() if "up.lock" not in name} == before
    assert shared.owner.read() is not None


def test_a_run_that_is_alive_is_purged_by_force_only(make_broker: Callable[..., Broker]) -> None:
    broker = make_broker()
    broker.owner.claim(Owner("ours", "/runs/a", "here"))
    beat(broker, "generator-3")
    purge = ("purge", broker.connection.keys.run, "--url", broker.connection.url, "--yes")
    line = refused(run_tidemill(*purge), code=5)
    assert "is alive, with heartbeats of generator-3" in line
    assert broker.owner.read() is not None
    assert run_tidemill(*purge, "--force").returncode == 0
    assert broker.owner.read() is None


def test_a_run_whose_services_fell_silent_is_purged(
    make_broker: Callable[..., Broker], monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = make_broker()
    broker.owner.claim(Owner("ours", "/runs/a", "here"))
    beat(broker)
    monkeypatch.setattr("deploy.control_plane.status.run_state.LIVE_S", 0.0)
    assert run_tidemill("purge", broker.connection.keys.run, "--url", broker.connection.url, "--yes").returncode == 0


def test_runs_that_ended_long_ago_are_purged_and_no_others(make_broker: Callable[..., Broker]) -> None:
    old, new, running, alive, quiet = (make_broker() for _ in range(5))
    at = {old: 40, new: 1, running: 40, alive: 40}
    for broker, days in at.items():
        broker.owner.claim(Owner("ours", "/runs/a", "here"))
        client, keys = broker.connection.client, broker.connection.keys
        client.hset(keys.ctl, "state", "running" if broker is running else "finished")
        client.xadd(keys.events, {"event": b""}, id=f"{int((time.time() - days * 86_400) * 1000)}-0")
    quiet.owner.claim(Owner("ours", "/runs/a", "here"))
    beat(alive, "generator-3")
    purge = ("purge", "--ended", "30", "--url", old.connection.url)
    assert "give either RUN or --ended DAYS" in refused(run_tidemill("purge", "--yes"))
    assert "give either RUN or --ended DAYS" in refused(run_tidemill(*purge, "mine"))
    done = run_tidemill(*purge, "--yes")
    assert done.returncode == 0
    assert old.connection.keys.run in done.stdout
    assert "is alive, with heartbeats of generator-3" in done.stderr
    assert [each.owner.read() is None for each in (old, new, running, alive, quiet)] == [True] + 4 * [False]
    assert "no run ended 60 or more days ago" in run_tidemill("purge", "--ended", "60", "--url", purge[-1]).stdout


def test_files_of_a_run_are_deleted_where_they_are_its_own(
    make_broker: Callable[..., Broker], models: tuple[Path, Path], tmp_path: Path
) -> None:
    mine, other, elsewhere = (make_broker() for _ in range(3))
    config = load_config(write_config(tmp_path / "mine", models[0], mine.connection.keys.run))
    folder, checkpoint = config.folder, config.folder / "checkpoints" / "step-00000004-t0001"
    checkpoint.mkdir(parents=True)
    (folder / "notes of mine.txt").write_text("stays")
    mine.owner.claim(Owner.of(claim_folder(config).id, folder))
    other.owner.claim(Owner.of("another", folder))
    elsewhere.owner.claim(Owner("another", "/there/run", "far"))
    for broker in (other, elsewhere):
        purge = ("purge", broker.connection.keys.run, "--url", broker.connection.url, "--yes", "--files")
        assert "--files deletes nothing: " in refused(run_tidemill(*purge))
        assert broker.owner.read() is not None
    purge = ("purge", mine.connection.keys.run, "--url", mine.connection.url, "--files")
    with sole_user(folder):
        assert "another `tidemill up` uses the folder" in refused(run_tidemill(*purge, "--yes"), 1)
    assert "nothing was deleted" in run_tidemill(*purge, answer="n\n").stdout
    assert checkpoint.is_dir()
    done = run_tidemill(*purge, "--yes", "--json")
    assert json.loads(done.stdout)["deleted_folder"] == str(folder)
    assert [path.name for path in folder.iterdir()] == ["notes of mine.txt"]


def test_of_several_ranks_the_first_alone_records_the_run(
    shared: Broker, models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ROLES, "trainer", "builtins:print")
    config = load_config(write_config(tmp_path / "mine", models[0], "ranks"))
    monkeypatch.setenv("RANK", "1")
    run_role("trainer", config, None)
    assert read_record(config.folder) is None
    monkeypatch.setenv("RANK", "0")
    run_role("trainer", config, None)
    assert read_record(config.folder) is not None


def test_a_wrong_configuration_ends_all_services_with_one_line(tmp_path: Path, server: EmbeddedServer) -> None:
    (tmp_path / "mine.py").write_text(LAUNCHER)
    folder = tmp_path / "run"
    folder.mkdir()
    before = json.dumps({"exit_reason": "finished", "steps": 3})
    (folder / "summary.json").write_text(before)
    config = {
        "run": {"name": tmp_path.name.lower(), "folder": str(folder)},
        "model": {"path": "m"},
        "train": {"name": "arithmetic"},
        "reward": {"terms": [{"name": "exact"}]},
        "broker": {"url": server.url},
        "control": {"enabled": False},
        "supervisor": {"grace_s": GRACE_S},
        "launcher": {"name": "mine.py:Mine"},
    }
    file = tmp_path / "config.yaml"
    file.write_text(json.dumps(config))
    # Much less than the grace that services have.
    done = subprocess.run(command("up", str(file)), capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == CONFIG_EXIT, done.stdout + done.stderr
    log = folder / "logs" / "feeder.log"
    assert done.stderr == f"tidemill: feeder failed (exit code 2): no file data.jsonl [log: {log}]\n"
    assert "data.jsonl" not in done.stdout
    assert "accuracy" not in done.stdout
    # The run before has its summary still, kept aside; that of this one says why there is nothing else.
    assert (folder / "summary.json.1").read_text() == before
    left = RunFolder(folder).head()
    assert left is not None
    assert (left.state, left.cause) == ("failed", f"feeder failed (exit code 2): no file data.jsonl [log: {log}]")


@pytest.mark.parametrize("argv", [command("--version"), [sys.executable, "-P", "-c", RANKS]], ids=["service", "ranks"])
def test_processes_start_beside_folders_named_like_our_packages(argv: list[str], tmp_path: Path) -> None:
    done = subprocess.run(argv, cwd=make_decoys(tmp_path), capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "tidemill 0.1" in done.stdout
