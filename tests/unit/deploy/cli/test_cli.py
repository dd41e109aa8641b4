"""The command line: quick to answer, and one line for a wrong configuration or a built-in name out of place."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deploy.checks.names import check_names
from deploy.cli import app
from schemas.config import parse_config
from schemas.errors import RUN_FAILED_EXIT, ConfigError, RunFailed
from tests.support.models.model_folders import write_model_files
from tests.support.models.tiny_model import make_tiny_model
from tests.support.runs.command_line import run_tidemill

CONFIG = """
run: {name: clitest}
model: {path: model}
train: {name: arithmetic}
reward: {terms: [{name: exact}]}
control: {port: 0}
"""


@pytest.fixture
def config(tmp_path: Path) -> str:
    write_model_files(tmp_path / "model")
    file = tmp_path / "config.yaml"
    file.write_text(CONFIG)
    return str(file)


def test_help_names_every_command() -> None:
    done = run_tidemill("--help")
    assert done.returncode == 0
    for command in (
        "up",
        "feeder",
        "generator",
        "reward",
        "trainer",
        "sft",
        "dpo",
        "reward-model",
        "eval",
        "export",
        "replay",
        "doctor",
        "status",
        "runs",
    ):
        assert command in done.stdout


@pytest.mark.parametrize("command", ["up", "feeder", "generator", "reward", "trainer", "prepare", "sft", "eval"])
def test_a_wrong_configuration_is_one_line_and_exit_code_2(command: str, config: str, tmp_path: Path) -> None:
    done = run_tidemill(command, config, "trainer.stepps=5", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == "tidemill: trainer.stepps: unknown key, did you mean 'steps'?\n"
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.path=./none", "model.path ./none does not exist"),
        ("reward.terms.0.name=exakt", "unknown reward 'exakt' (did you mean 'exact'?)"),
        ("train.name=jsonn", "unknown dataset 'jsonn' (did you mean 'jsonl'?)"),
        ("generator.engine=vlm", "unknown generator.engine 'vlm' (did you mean 'vllm'?)"),
        ("generator.workflow.name=none", "unknown workflow 'none'"),
        ("sampling.top_p=0.9", "sampling.top_p 0.9 cuts the distribution"),
        ("sampling.n=1", "sampling.n is 1"),
    ],
)
def test_what_cannot_work_is_refused_at_the_start(override: str, message: str, config: str, tmp_path: Path) -> None:
    done = run_tidemill("up", config, override, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "runs").exists()


def test_a_configuration_that_is_not_there(tmp_path: Path) -> None:
    done = run_tidemill("up", str(tmp_path / "none.yaml"))
    assert done.returncode == 2
    assert done.stderr.startswith("tidemill: cannot read the configuration")
    assert len(done.stderr.splitlines()) == 1


def test_a_warm_start_that_is_not_configured(config: str, tmp_path: Path) -> None:
    done = run_tidemill("sft", config, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == "tidemill: the configuration has no warm_start section: add one to train a model\n"


@pytest.mark.parametrize("command", ["agent", "eval"])
def test_a_command_says_how_the_model_is_made_that_it_needs(command: str, config: str, tmp_path: Path) -> None:
    data = "{name: arithmetic}"
    warm_start = f"{{model: 'mine.py:build', dataset: {data}, eval: {data}}}"
    changes = ["model.path=./made", f"warm_start={warm_start}", f"eval={{dataset: {data}}}"]
    done = run_tidemill(command, config, *changes, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (
        2,
        "tidemill: model.path ./made does not exist yet: warm_start creates it: run `tidemill sft` with this"
        " configuration first\n",
    )


def test_an_evaluation_without_a_broker_is_told_as_json(config: str, tmp_path: Path) -> None:
    held_out = "{dataset: {name: arithmetic, label: sums, args: {split: heldout}, limit: 3}, sampling: {n: 2}}"
    changes = ["generator={engine: scripted}", f"eval={held_out}", f"model.path={make_tiny_model(tmp_path / 'tiny')}"]
    done = run_tidemill("eval", config, *changes, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert (answer["engine"], set(answer["datasets"])) == ("scripted", {"sums"})
    figures = answer["datasets"]["sums"]
    assert (figures["samples"], figures["failed"]) == (6, 0)
    assert 0 <= figures["accuracy"] <= 1


def test_two_runs_cannot_share_a_folder(config: str, tmp_path: Path) -> None:
    import fcntl

    folder = tmp_path / "runs" / "clitest"
    folder.mkdir(parents=True)
    with (folder / "up.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = run_tidemill("up", config, cwd=tmp_path)
    assert done.returncode == 1, "it may be tried again"
    assert "another `tidemill up` uses the folder" in done.stderr


def test_a_run_without_a_warm_start_is_prepared_when_its_model_is_there(config: str, tmp_path: Path) -> None:
    assert run_tidemill("prepare", config, cwd=tmp_path).returncode == 0
    done = run_tidemill("prepare", config, "model.path=./none", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("tidemill: model.path ./none does not exist")


@pytest.mark.parametrize(("content", "message"), [(None, "cannot read REDIS_URL_FILE"), ("\n", "is empty")])
def test_a_secret_file_that_holds_no_url_is_one_line(
    content: str | None, message: str, config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = tmp_path / "redis_url"
    if content is not None:
        secret.write_text(content)
    monkeypatch.delenv("REDIS_URL", raising=False)
    monkeypatch.setenv("REDIS_URL_FILE", str(secret))
    done = run_tidemill("feeder", config, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_readiness_of_an_unknown_role_is_one_line(config: str) -> None:
    done = run_tidemill("ready", config, "trayner")
    assert done.returncode == 2
    assert done.stderr == "tidemill: unknown role 'trayner': one of control, feeder, generator, reward, trainer\n"


@pytest.mark.parametrize(
    ("error", "code"),
    [(RunFailed("all fail"), RUN_FAILED_EXIT), (ExceptionGroup("", [RunFailed("all fail")]), RUN_FAILED_EXIT)],
    ids=["plain", "in a task group"],
)
def test_a_run_in_which_everything_fails_ends_with_one_line_and_a_code_of_its_own(
    error: Exception, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(app, "app", fail)
    with pytest.raises(SystemExit) as ended:
        app.main()
    assert (ended.value.code, capsys.readouterr().err) == (code, "tidemill: all fail\n")


def test_a_command_on_a_run_loads_no_broker_and_no_web_server_before_it_knows_what_to_ask(tmp_path: Path) -> None:
    """Each of these takes as long as Python itself needs to start, or longer. So do types that are not used."""
    heavy = {"redis", "numpy", "fastapi", "torch", "vllm", "transformers", "pandas", "matplotlib", "yaml"}
    heavy |= {"schemas.config", "structlog", "rich.progress"}
    environment = {"PYTHONPATH": str(Path(__file__).parents[4]), "PATH": "/usr/bin:/bin"}
    code = (
        "import sys; from deploy.cli.app import main; import schemas.control_api.status as api\n"
        "sys.argv[1:] = ['status', 'none']\n"
        "try: main()\nexcept SystemExit as end: print(end.code)\n"
        f"print(sorted({heavy} & set(sys.modules)), api.RunStatus.__pydantic_complete__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=tmp_path, env=environment
    )
    assert done.stdout == "2\n[] False\n", done.stdout + done.stderr


@pytest.mark.parametrize(
    ("trainer", "message"),
    [
        ({"loss": {"name": "grpo"}}, r"trainer.loss.name 'grpo' is a choice for .*: set trainer.advantage.name=grpo; "),
        ({"advantage": {"name": "dapo"}}, r"trainer.advantage.name 'dapo' is .*: set trainer.loss.name=dapo; "),
        ({"loss": {"name": "gropo"}}, r"unknown trainer.loss.name 'gropo'"),
    ],
)
def test_an_algorithm_under_the_wrong_setting_is_sent_to_the_right_one(trainer: dict[str, Any], message: str) -> None:
    data = {"model": {"path": "m"}, "train": {"name": "arithmetic"}, "reward": {"terms": [{"name": "exact"}]}}
    with pytest.raises(ConfigError, match=message):
        check_names(parse_config({**data, "trainer": trainer}))
