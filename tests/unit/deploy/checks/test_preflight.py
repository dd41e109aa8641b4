"""What cannot work is reported before anything starts: one line, exit code 2, and nothing is loaded or left behind."""

import importlib.util
import json
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deploy.checks import preflight, user_code
from deploy.checks.finding import Finding, run_check
from deploy.checks.thorough import measure_model, measure_prompts
from schemas.config import TidemillConfig, parse_config
from schemas.errors import ConfigError
from tests.support.models.model_folders import write_model_files
from tests.support.models.tiny_model import make_tiny_model
from tests.support.runs.command_line import run_tidemill

Changed = Callable[..., TidemillConfig]
CHAT = "{% for m in messages %}{{ m.content }}{% endfor %}"


def refused(folder: Path, *overrides: str, command: str = "up") -> str:
    """The one line of a command that exits with 2, and prints nothing else and leaves nothing behind."""
    done = run_tidemill(command, "config.yaml", *overrides, cwd=folder)
    assert (done.returncode, len(done.stderr.splitlines()), done.stdout) == (2, 1, ""), done.stderr
    assert not (folder / "runs").exists()
    return done.stderr


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.loss.name=pppo", "unknown trainer.loss.name 'pppo' (did you mean 'ppo'?)"),
        ("trainer.advantage.name=grpoo", "unknown trainer.advantage.name 'grpoo' (did you mean 'grpo'?)"),
        ("trainer.kl.estimator=k9", "unknown trainer.kl.estimator 'k9'"),
        ("trainer.rejection=[{measure: k9, upper: 1}]", "unknown trainer.kl.estimator 'k9'"),
        ("generator.engine=sglang", "unknown generator.engine 'sglang'"),
        ("generator={engine: vllm, args: {tensor_parallel: 2}}", "did you mean tensor_parallel_size?"),
        ("generator.workflow.name=nope", "unknown workflow 'nope'"),
        ("launcher.name=k8s", "unknown launcher 'k8s'"),
        ("launcher.args={gpus: 2}", "launcher.args of 'local'"),
        ("model.path=./none", "model.path ./none does not exist"),
        ("trainer.kl={coef: 0.1, model: ./none}", "trainer.kl.model ./none does not exist"),
        ("run.name=MyRun", "lower-case letters, digits, - and _"),
        ("run.folder=/proc/nope", "run.folder /proc/nope cannot be written in /proc: No such file or directory"),
        ("run.folder=prompts.jsonl", "prompts.jsonl cannot be written: it is a file"),
        ("run.folder=prompts.jsonl/run", "it is a file"),
        ("control.host=0.0.0.0", "control.host 0.0.0.0 is reachable from other machines, so a token is needed"),
    ],
)
def test_a_mistake_is_told_without_running_anything_of_the_user(
    folder: Path, override: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "_check_user_code", lambda *_: pytest.fail("this needs no child"))
    assert message in refused(folder, override)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.loss.name=pppo", "unknown trainer.loss.name 'pppo' (did you mean 'ppo'?)"),
        ("model.path=./none", "model.path ./none does not exist"),
        ("train.args.path=none.jsonl", "none.jsonl"),
        ("reward.terms=[{name: 'mine.py:f'}]", "mine.py"),
    ],
)
def test_slurm_writes_no_script_of_a_run_that_cannot_work(folder: Path, override: str, message: str) -> None:
    assert message in refused(folder, override, command="slurm")


@pytest.mark.parametrize(
    "words",
    [
        ["control.host=0.0.0.0"],
        ["reward.terms=[{name: 'elsewhere:f'}]", "--setup", "module load tidemill"],
        ["model.path=/models/small", "--container", "run-in {role}.sif"],
    ],
    ids=["address", "another environment", "image"],
)
def test_slurm_is_not_refused_for_what_only_the_nodes_of_its_jobs_have(folder: Path, words: list[str]) -> None:
    done = run_tidemill("slurm", "config.yaml", *words, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].endswith("submit.sh")


def broken_folders(folder: Path) -> dict[str, str]:
    """Folders that are not model folders, and the errors about them."""
    made = {
        name: write_model_files(folder / name) for name in ("empty", "text", "no-type", "no-weights", "no-tokenizer")
    }
    (made["empty"] / "config.json").unlink()
    (made["text"] / "config.json").write_text("model_type: qwen2")
    (made["no-type"] / "config.json").write_text("{}")
    (made["no-weights"] / "model.safetensors").unlink()
    (made["no-tokenizer"] / "tokenizer.json").unlink()
    return {
        "empty": "has no config.json",
        "text": "is not valid JSON",
        "no-type": "config.json has no model_type",
        "no-weights": "has no weights",
        "no-tokenizer": "no tokenizer in",
    }


def test_a_model_is_judged_by_its_files(folder: Path) -> None:
    for name, message in broken_folders(folder).items():
        assert message in refused(folder, f"model.path={name}")


def test_the_model_that_a_warm_start_begins_with_is_judged_too(folder: Path) -> None:
    (folder / "model/model.safetensors").unlink()
    for name, message in (("./none", "./none does not exist"), ("model", "model has no weights")):
        warm_start = f"{{model: {name}, dataset: {{name: arithmetic}}, eval: {{name: arithmetic}}}}"
        assert f"warm_start.model {message}" in refused(folder, "model.path=made", f"warm_start={warm_start}")


def test_a_hub_id_is_one_question_and_one_line_without_a_network(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def ask(self: Any, path: str, **options: Any) -> None:
        asked.append(path)
        raise RuntimeError("Name or service not known\nmore of it")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", ask)
    line = "tidemill: model.path qwen/none: no such folder, and the Hub answered: Name or service not known\n"
    assert refused(folder, "model.path=qwen/none") == line
    assert asked == ["qwen/none"]


def test_a_missing_package_is_told_where_services_run_here(changed: Changed, monkeypatch: pytest.MonkeyPatch) -> None:
    """On other machines, as Ray starts them, packages are theirs."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    config = changed(generator={"engine": "vllm"})
    with pytest.raises(ConfigError, match=r"^the trainer needs the package torch: pip install 'tidemill\[train\]'$"):
        preflight.check_packages(config)
    assert preflight.check_packages(config, here=False) == "engine vllm"


@pytest.mark.parametrize(
    ("trainer", "setting"),
    [
        ({"optimizer": {"name": "adamw_8bit"}}, "trainer.optimizer"),
        ({"critic": {"optimizer": {"name": "adamw_8bit"}}, "advantage": {"name": "gae"}}, "trainer.critic.optimizer"),
    ],
)
def test_an_optimizer_whose_package_is_missing_is_told_before_anything_starts(
    changed: Changed, trainer: dict[str, Any], setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "torchao" else there(name))
    config = changed(trainer=trainer, generator={"engine": "scripted"})
    with pytest.raises(
        ConfigError, match=f"^{setting}.name adamw_8bit needs the package torchao: pip install torchao$"
    ):
        preflight.check_packages(config)
    assert preflight.check_packages(config, here=False) == "engine scripted"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: there("torch" if name == "torchao" else name))
    assert preflight.check_packages(config) == "engine scripted"


def test_several_processes_of_vllm_on_a_cpu_are_refused(changed: Changed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "is_cpu_build", lambda: True)
    config = changed(generator={"engine": "vllm", "args": {"tensor_parallel_size": 2}})
    with pytest.raises(ConfigError, match=r"^generator\.args: tensor_parallel_size 2: vLLM on a CPU runs"):
        preflight.check_packages(config)
    assert preflight.check_packages(config, here=False) == "engine vllm"


def test_a_parser_of_answers_that_there_is_not_is_told_before_anything_starts(changed: Changed) -> None:
    for engine, names in (("vllm", "one of "), ("scripted", "one of hermes, and with generator.engine vllm")):
        config = changed(generator={"engine": engine, "agents": {"tool_parser": "hermse"}})
        with pytest.raises(ConfigError, match=r"^unknown generator\.agents\.tool_parser 'hermse'") as error:
            preflight.check_packages(config, here=engine == "scripted")
        assert names in str(error.value)


Find = Callable[..., list[Finding]]


@pytest.fixture
def find(changed: Changed) -> Find:
    """Makes the findings of the part that runs in a child process in this one, up to the first that fails."""

    def find(**sections: Any) -> list[Finding]:
        findings = []
        for name, look in user_code.checks(changed(**sections)):
            findings.append(run_check(name, look))
            if findings[-1].level == "fail":
                break
        return findings

    return find


def agent(**args: Any) -> dict[str, Any]:
    return {"generator": {"engine": "scripted", "workflow": {"name": "agent", "args": args}}}


def jsonl(folder: Path, text: str, **args: Any) -> dict[str, Any]:
    (folder / "data.jsonl").write_text(text)
    return {"name": "jsonl", "args": {"path": "data.jsonl", **args}}


def test_data_are_opened_and_every_line_is_read(folder: Path, find: Find) -> None:
    good = '{"prompt": "1+1=", "answer": "2"}\n'
    for text, args, message in (
        ("", {}, "there is no row in "),
        (good * 3 + "{broken\n", {}, "data.jsonl:4: not JSON"),
        (good, {"answer": "gold"}, "no field 'gold'"),
        (good, {"prompts": "x"}, "unknown argument 'prompts', did you mean 'prompt'?"),
    ):
        (found,) = find(train=jsonl(folder, text, **args))
        assert (found.name, found.level) == ("dataset", "fail")
        assert message in found.text
    (found,) = find(train={"name": "jsonl", "args": {"path": "none.jsonl"}})
    assert found.text == f"dataset 'jsonl': path 'none.jsonl': no file {folder / 'none.jsonl'}"


def test_whatever_a_users_dataset_raises_is_one_line(folder: Path, find: Find) -> None:
    (folder / "mine.py").write_text("class Data:\n    def __init__(self):\n        raise KeyError('split\\nby')\n")
    (found,) = find(train={"name": "mine.py:Data"})
    assert (found.level, found.text) == ("fail", "dataset: KeyError: 'split\\nby'")


def test_messages_need_a_chat_template_that_can_be_read(folder: Path, find: Find) -> None:
    rows = jsonl(folder, '{"prompt": "1+1=", "answer": "2"}', chat=True)
    assert "has no chat template" in find(train=rows)[-1].text
    write_model_files(folder / "model", "{% for m in messages %}")
    assert "the chat template in" in find(train=rows)[-1].text
    marked = CHAT + "{% generation %}{% break %}{% endgeneration %}"
    for template in (CHAT, marked.replace("{% break %}", "")):
        write_model_files(folder / "model", template)
        assert find(train=rows)[-1].level == "ok"


def test_a_batch_of_more_prompts_than_there_are_is_a_warning(find: Find) -> None:
    found = find(trainer={"batch_groups": 41})[0]
    assert found.level == "warn"
    assert found.text.startswith("trainer.batch_groups 41 exceeds the 40 prompts of jsonl: prompts repeat within")


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"reward": {"terms": [{"name": "exact", "args": {"stripp": True}}]}}, "unknown argument 'stripp'"),
        ({"generator": {"engine": "scripted", "workflow": {"name": "single_turn", "args": {"a": 1}}}}, "workflow.args"),
        ({"generator": {"engine": "scripted", "args": {"token": 1}}}, "unexpected keyword argument 'token'"),
        (agent(run="none.py:run"), "generator.workflow.args.run: none.py:run cannot be imported: no file"),
        (agent(command=["./none", "x"]), "generator.workflow.args.command: './none' is not a program"),
        (agent(), "give one of run (file.py:name) and command"),
        ({"trainer": {"loss": {"args": {"clip_hi": 0.2}}}}, "trainer.loss.args {'clip_hi': 0.2}"),
        ({"trainer": {"advantage": {"name": "grpo", "args": {"ep": 1}}}}, "trainer.advantage.args {'ep': 1}"),
        (
            {"trainer": {"loss": {"args": {"clip_low": "small"}}}},
            "trainer.loss.args: argument 'clip_low': 'small' is not allowed, must be a valid number",
        ),
        (
            {"trainer": {"advantage": {"name": "gae", "args": {"lam": [1]}}, "critic": {}}},
            "trainer.advantage.args: argument 'lam': [1] is not allowed, must be a valid number",
        ),
        (
            {"generator": {"engine": "scripted", "args": {"token_s": "slow"}}},
            "generator.args: argument 'token_s': 'slow' is not allowed, must be a valid number",
        ),
        (
            {"reward": {"terms": [{"name": "exact"}, {"name": "gsm8k", "args": {"last_number": "never"}}]}},
            "reward 'gsm8k': argument 'last_number': 'never' is not allowed, must be a valid boolean",
        ),
        (agent(command="node agent.js"), "argument 'command': 'node agent.js' is not allowed, must be a valid list"),
        ({"trainer": {"loss": {"name": "m2po", "args": {"second_moment": 0}}}}, "second_moment 0 must be above 0"),
        ({"trainer": {"aggregation": "none.py:mean"}}, "trainer.aggregation 'none.py:mean' cannot be imported"),
        ({"trainer": {"trackers": ["none.py:Mine"]}}, "trainer.trackers 'none.py:Mine' cannot be imported"),
    ],
)
def test_arguments_are_bound_as_services_will_bind_them(find: Find, sections: dict[str, Any], message: str) -> None:
    found = find(**{"trainer": {"batch_groups": 8}, **sections})[-1]
    assert found.level == "fail"
    assert message in found.text


@pytest.mark.parametrize(
    ("setting", "code", "message"),
    [
        ({"loss": {"name": "mine.py:f"}}, "def f(inputs, *, beta): ...", "missing a required argument: 'beta'"),
        ({"loss": {"name": "mine.py:f"}}, "f = 3", "trainer.loss"),
        ({"advantage": {"name": "mine.py:f"}}, "def f(rewards): ...", "callable with (rewards, groups)"),
        ({"aggregation": "mine.py:f"}, "def f(lengths): ...", "callable with (lengths, groups, totals)"),
        ({"kl": {"estimator": "mine.py:f"}}, "def f(): ...", "trainer.kl.estimator must be callable with (difference)"),
    ],
)
def test_a_users_algorithms_must_be_callable(
    folder: Path, find: Find, setting: dict[str, Any], code: str, message: str
) -> None:
    (folder / "mine.py").write_text(code)
    found = find(trainer={"batch_groups": 8, **setting})[-1]
    assert (found.name, found.level) == ("algorithm", "fail")
    assert message in found.text


def test_examples_of_algorithms_pass_the_check(folder: Path, find: Find) -> None:
    code = "def loss(inputs, *, beta=1.0): ...\ndef advantage(rewards, groups): ...\ndef kl(difference): ...\n"
    (folder / "mine.py").write_text(code)
    for own in ("mine.py:advantage", "reinforce_pp", "grpo"):
        trainer = {"loss": {"name": "mine.py:loss", "args": {"beta": 2}}, "advantage": {"name": own}, "batch_groups": 8}
        found = find(trainer=trainer | {"kl": {"estimator": "mine.py:kl"}, "aggregation": "prompt_mean"})
        assert found[-1].level == "ok", found[-1]


def test_built_in_algorithms_without_arguments_need_no_pytorch(folder: Path) -> None:
    """So that a start pays seconds only for what can be wrong."""
    code = (
        "import sys, json; from schemas.config import load_config; from deploy.checks import user_code, preflight\n"
        "for name, look in user_code.checks(load_config('config.yaml')): look()\n"
        "print([m for m in ('torch', 'transformers', 'vllm', 'datasets', 'fastapi') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            "print('hello')\nraise ValueError('no such split')\n",
            "dataset 'mine.py:Data' cannot be imported: ValueError",
        ),
        ("import sys\nprint('hello')\nsys.exit(0)\n", "dataset 'mine.py:Data' cannot be imported: SystemExit: 0"),
        ("import os\nprint('hello', flush=True)\nos._exit(0)\n", "dataset: the check ended: hello"),
        ("import os\nos._exit(7)\n", "dataset: the check ended: exit code 7"),
    ],
)
def test_the_users_code_can_not_end_the_check_without_a_word(folder: Path, code: str, message: str) -> None:
    (folder / "mine.py").write_text(code)
    assert message in refused(folder, "train={name: 'mine.py:Data'}")


def test_a_port_that_is_taken_is_told_to_people_and_ends_nothing(changed: Changed, capsys: Any) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        preflight.check(changed(control={"port": port}))
    assert capsys.readouterr().err == (
        f"tidemill: warning: control.port {port} is in use on 127.0.0.1: the control plane will use a free one\n"
    )


def test_a_check_that_hangs_ends_in_time(folder: Path, changed: Changed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "USER_CODE_DEADLINE_S", 0.2)
    (folder / "mine.py").write_text("import time\ntime.sleep(60)\n")
    with pytest.raises(ConfigError, match=r"^[\w ]+: no answer within 0 s$"):
        preflight.check(changed(train={"name": "mine.py:Data"}))


@pytest.mark.parametrize(
    ("fail", "code", "line"),
    [
        (lambda folder: (folder / "prompts.jsonl" / "x").mkdir(), 2, "{folder}/prompts.jsonl/x: Not a directory"),
        (lambda folder: Path("/dev/full").write_text("x"), 1, "No space left on device"),
    ],
    ids=["refused", "full disk, and no name"],
)
def test_what_the_system_refuses_is_one_line(folder: Path, fail: Callable[[Path], None], code: int, line: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("deploy.cli.offline.config_of", lambda run: fail(folder))
        done = run_tidemill("export", "checked", cwd=folder)
    assert (done.returncode, done.stderr) == (code, f"tidemill: {line.format(folder=folder)}\n")


def test_doctor_makes_the_same_check_and_answers_in_json(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.doctor.doctor.check_libraries", list)
    calls: list[bool] = []

    def check_user_code(config: Any, thorough: bool, step_s: float | None) -> list[Finding]:
        calls.append(thorough)
        return []

    monkeypatch.setattr(preflight, "_check_user_code", check_user_code)
    done = run_tidemill("doctor", "config.yaml", "--json", cwd=folder)
    assert (done.returncode, calls) == (0, [True]), done.stdout
    found = {finding["name"]: finding for finding in json.loads(done.stdout)}
    assert found.keys() >= {"names", "folders", "model", "launcher"}
    assert (found["sandbox"]["level"] == "ok") == found["sandbox"]["text"].startswith("bwrap blocks: files, ")
    done = run_tidemill("doctor", "config.yaml", "trainer.loss.name=pppo", "launcher.name=k8s", "--json", cwd=folder)
    wrong = {finding["name"]: finding["text"] for finding in json.loads(done.stdout) if finding["level"] == "fail"}
    assert (done.returncode, set(wrong)) == (2, {"names", "launcher"})


def test_a_model_is_measured_without_its_weights(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    (model / "model.safetensors").write_bytes(b"no weights are read")
    data = {
        "model": {"path": str(model)},
        "train": {"name": "arithmetic"},
        "reward": {"terms": [{"name": "exact"}]},
        "trainer": {"lora": {"targets": ["q_proj"]}},
    }
    assert str(measure_model(parse_config(data))).endswith("M parameters, adapter on q_proj")
    data["trainer"] = {"lora": {"targets": ["none"]}}
    with pytest.raises(ConfigError, match=r"'none' is no linear layer"):
        measure_model(parse_config(data))


@pytest.mark.parametrize(
    ("prompts", "level", "text"),
    [
        (["1+1="], "ok", "up to 4 tokens in the first 1; model.max_length is 16"),
        (["1+1=", "1+1+1+1+1+1="], "warn", "up to 12 tokens in the first 2; model.max_length is 16; 1 leave less than"),
        (["1+1=", "1+" * 8], "warn", "1 of the first 2 prompts cannot be used with model.max_length 16: example 1"),
        (["", "1+" * 8], "fail", "2 of the first 2 prompts cannot be used with model.max_length 16: task 0 has an"),
    ],
)
def test_doctor_counts_the_tokens_of_prompts(
    folder: Path, changed: Changed, prompts: list[str], level: str, text: str
) -> None:
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": p, "answer": "2"}) + "\n" for p in prompts))
    model = {"path": str(make_tiny_model(folder / "tiny")), "max_length": 16}
    config = changed(model=model, sampling={"max_tokens": 5})
    found = run_check("prompts", lambda: measure_prompts(config))
    assert found.level == level
    assert found.text.startswith(text), found.text
