"""Environments of the package verifiers, both generations of its API, against imitations of them.

TIDEMILL_VERIFIERS names interpreters that have the real package, with ``:`` between them; they play the same then.
"""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from producers.datasets.base import Example
from producers.episodes.environments.verifiers.dataset import VerifiersTasks
from producers.workflows.base import FailedSample
from producers.workflows.trajectory_builder import SampledCompletion
from schemas.errors import ConfigError, DataError
from schemas.messages import ChatMessage, Sampling, Task
from tests.support.producers.played_episodes import SpeakingEngine, chat_tokenizer, loop_config, play

ASK = """
import asyncio, json, urllib.request

def post(url, body):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]

async def ask(url, messages):
    body = {"model": "policy", "messages": messages}
    return await asyncio.to_thread(post, url + "/chat/completions", body)
"""
FIRST = """
import importlib, inspect
from asking import ask

def load_environment(name, **args):
    return importlib.import_module(name.replace("-", "_")).load_environment(**args)

class Rubric:
    has_group_rewards = False

    def __init__(self, funcs, together=False):
        self.funcs, self.has_group_rewards = funcs, together

    async def score(self, **fields):
        total = 0.0
        for function in self.funcs:
            taken = {name: fields[name] for name in inspect.signature(function).parameters if name in fields}
            try:
                total += float(await function(**taken))
            except Exception:
                total += 0.0
        return total

class SingleTurnEnv:
    def __init__(self, dataset, rubric):
        self.rows = [{**row, "prompt": [{"role": "user", "content": row["question"]}]} for row in dataset]
        self.rubric = rubric

    def get_dataset(self):
        return self.rows

    async def run_rollout(self, row, client, model, sampling):
        said = await ask(client.api_base_url, row["prompt"])
        if said == "lost":
            return {"reward": 0.0, "error": {"error_chain_str": "SandboxError -> no sandbox"}}
        completion = [{"role": "assistant", "content": said}]
        return {"reward": await self.rubric.score(completion=completion, answer=row["answer"]), "metrics": {"turns": 1}}
"""
TYPES = """
class ClientConfig:
    def __init__(self, api_base_url, api_key_var, timeout): self.api_base_url = api_base_url
"""
SECOND = """
import contextlib, importlib, inspect, types
from asking import ask

class TaskData:
    prompt, system_prompt = None, None
    def __init__(self, **fields): self.__dict__.update(fields)
    def __class_getitem__(cls, given): return cls
    def model_dump(self, mode): return dict(self.__dict__)
    @classmethod
    def model_validate(cls, row): return cls(**row)

class Task:
    def __class_getitem__(cls, given): return type("Task", (cls,), {"kind": given})
    def __init__(self, data, config=None): self.data, self.config = data, config
    @classmethod
    def data_type(cls): return cls.kind

class TasksetConfig: task = None
class AgentConfig: ...

class Taskset:
    bounded = True
    def __class_getitem__(cls, given): return type("Taskset", (cls,), {"kinds": given})
    def __init__(self, config): self.config = config
    def __iter__(self): return iter(self.load())
    @classmethod
    def task_type(cls): return cls.kinds[0]

def reward(function): function.reward = True; return function

def resolve_env_config(told):
    try:
        module = importlib.import_module(told["taskset"]["id"])
    except ModuleNotFoundError:
        raise ModuleNotFoundError(f"taskset {told['taskset']['id']!r} not found") from None
    taskset = getattr(module, module.__all__[0])
    config = type("Config", (), {"model_fields": {"agent": None}, "agent": AgentConfig()})()
    config.taskset = taskset.kinds[1]()
    config.taskset.__dict__.update(told["taskset"])
    config.made = taskset
    return config

class Env:
    served = 0
    def __init__(self, config): self.config, self.taskset = config, config.made(config.taskset)

    @contextlib.asynccontextmanager
    async def serving(self):
        self.served += 1
        assert self.served == 1
        yield

    async def run_episode(self, task, context):
        assert self.served == 1
        said = await ask(context.client.base_url, [{"role": "user", "content": task.data.prompt}])
        trace = types.SimpleNamespace(last_reply=said, metrics={"turns": 1}, rewards={}, errors=[], reward=0.0)
        try:
            if said == "lost":
                raise OSError("no sandbox")
            trace.reward = await task.right(trace=trace)
        except Exception as raised:
            trace.errors.append(types.SimpleNamespace(type=type(raised).__name__, message=str(raised)))
        return types.SimpleNamespace(ok=not trace.errors, errors=[], traces=[trace])

load_environment = Env
EvalClientConfig = ModelContext = types.SimpleNamespace
"""
SUMS_OLD = """
import verifiers as vf
try:
    from datasets import Dataset
    rows = Dataset.from_list
except ImportError:
    rows = list

def right(completion, answer, **rest):
    if completion[-1]["content"] == "crash":
        raise ConnectionError("the scorer's server is down")
    return float(completion[-1]["content"] == answer)

def load_environment(largest=9, together=False):
    pairs = [(a, b) for a in range(largest + 1) for b in range(largest + 1)]
    found = rows([{"question": f"{a}+{b}=?", "answer": str(a + b)} for a, b in pairs])
    return vf.SingleTurnEnv(dataset=found, rubric=vf.Rubric([right], **({"together": True} if together else {})))
"""
SUMS_NEW = """
import verifiers.v1 as vf

__all__ = ["Sums"]

class SumData(vf.TaskData):
    answer: str = ""

class Sum(vf.Task[SumData]):
    @vf.reward
    async def right(self, trace) -> float:
        if trace.last_reply == "crash":
            raise ConnectionError("the scorer's server is down")
        return float(trace.last_reply == self.data.answer)

class SumsConfig(vf.TasksetConfig):
    largest: int = 9

class Sums(vf.Taskset[Sum, SumsConfig]):
    def load(self):
        for a in range(self.config.largest + 1):
            for b in range(self.config.largest + 1):
                yield Sum(SumData(prompt=f"{a}+{b}=?", answer=str(a + b)), self.config.task)
"""
AGENT = {"agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}}
GENERATIONS = {"sums_old": {"largest": 2}, "sums_new": {"taskset": {"largest": 2}, **AGENT}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with an environment of each generation."""
    (tmp_path / "sums_old.py").write_text(SUMS_OLD, encoding="utf-8")
    (tmp_path / "sums_new.py").write_text(SUMS_NEW, encoding="utf-8")
    return tmp_path


@pytest.fixture
def imitated(folder: Path) -> Path:
    """The same, and beside them packages that can do as much of verifiers as they need."""
    (folder / "verifiers").mkdir()
    for name, text in {"verifiers/__init__": FIRST, "verifiers/types": TYPES, "verifiers/v1": SECOND}.items():
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
    (folder / "asking.py").write_text(ASK, encoding="utf-8")
    (folder / "datasets.py").write_text("raise ImportError('not here')", encoding="utf-8")
    return folder


def episodes(folder: Path, example: Example, *says: str, **agents: str | list[str]) -> list[object]:
    """What the agent makes of a task when the policy says this."""
    tokenizer = chat_tokenizer(folder)
    said = iter(says)
    engine = SpeakingEngine(tokenizer, lambda prompt: next(said))
    sampling = Sampling(max_tokens=50)
    task = Task(task_id=5, kind="train", n=len(says), sampling=sampling, messages=example.messages, data=example.data)
    config = loop_config(folder, "agent", {"run": "verifiers"}, **agents)
    return list(asyncio.run(play(config, engine, tokenizer, task)))


@pytest.mark.parametrize("env", GENERATIONS)
def test_tasks_of_an_environment_are_a_dataset(imitated: Path, env: str) -> None:
    dataset = VerifiersTasks(imitated, env=env, args=GENERATIONS[env])
    assert len(dataset) == 9
    example = dataset[5]
    assert example.messages == [ChatMessage("user", "1+2=?")]
    assert example.data["verifiers"]["row"]["answer"] == "3"


def test_a_task_without_a_prompt_that_can_be_read_is_an_error_of_its_own(imitated: Path) -> None:
    broken = (
        SUMS_OLD.replace("vf.SingleTurnEnv(", "Broken(")
        + """
class Broken(vf.SingleTurnEnv):
    def get_dataset(self):
        return [{**row, "prompt": 7} if row["answer"] == "1" else row for row in self.rows]
"""
    )
    (imitated / "broken.py").write_text(broken, encoding="utf-8")
    dataset = VerifiersTasks(imitated, env="broken", args={"largest": 1})
    with pytest.raises(DataError, match="dataset 'verifiers': TypeError: 'int' object is not iterable"):
        dataset[1]
    assert dataset[3].messages == [ChatMessage("user", "1+1=?")]


@pytest.mark.parametrize("env", GENERATIONS)
def test_the_policy_is_scored_and_what_happens_to_it_is_not(imitated: Path, env: str) -> None:
    """A rubric of the first generation makes a 0 of what its functions raise; here it is an error."""
    example = VerifiersTasks(imitated, env=env, args=GENERATIONS[env])[5]
    found = episodes(imitated, example, "3", "4", "crash", "lost")
    samples = [one for one in found if isinstance(one, SampledCompletion)]
    assert sorted(one.reward or 0.0 for one in samples) == [0.0, 1.0]
    reasons = sorted(one.reason for one in found if isinstance(one, FailedSample))
    assert len(reasons) == 2
    assert any("the scorer's server is down" in reason for reason in reasons)
    assert any("no sandbox" in reason for reason in reasons)


def test_an_environment_that_cannot_be_used_is_refused_with_the_reason(imitated: Path) -> None:
    with pytest.raises(ConfigError, match="scores all samples of a prompt together"):
        VerifiersTasks(imitated, env="sums_old", args={"together": True})
    with pytest.raises(ConfigError, match=r"python 'no/python' must be an interpreter"):
        VerifiersTasks(imitated, env="sums_old", python="no/python")


def test_what_is_not_installed_is_named_with_the_command_that_installs_it(folder: Path) -> None:
    (folder / "needy.py").write_text("import a_module_of_nobody", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"'sums_new' needs the module 'verifiers'.*-m pip install verifiers uv$"):
        VerifiersTasks(folder, env="sums_new")
    with pytest.raises(ConfigError, match=r"needs the module 'a_module_of_nobody'.*pip install a_module_of_nobody$"):
        VerifiersTasks(folder, env="needy")


def test_an_environment_that_is_not_installed_is_refused_with_the_command_of_the_hub(imitated: Path) -> None:
    """The second generation looks for a taskset itself, and its error has no name of a module."""
    with pytest.raises(ConfigError) as refused:
        VerifiersTasks(imitated, env="org/none-of-it@2")
    words = f"'org/none-of-it@2' needs the module 'none_of_it', which {sys.executable}"
    assert words in str(refused.value)
    assert str(refused.value).endswith("prime env install org/none-of-it@2, or put it beside the configuration")


@pytest.mark.skipif("TIDEMILL_VERIFIERS" not in os.environ, reason="TIDEMILL_VERIFIERS names no interpreter")
@pytest.mark.timeout(600)
def test_the_real_package_plays_the_same(folder: Path) -> None:
    for python in os.environ["TIDEMILL_VERIFIERS"].split(os.pathsep):
        asked = [python, "-c", "import importlib.metadata as m; print(m.version('verifiers'))"]
        version = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
        env = "sums_old" if version.startswith("0.1.") else "sums_new"
        dataset = VerifiersTasks(folder, env=env, python=python, args=GENERATIONS[env])
        assert dataset[5].messages is not None
        found = episodes(folder, dataset[5], "3", "4", "crash", python=python)
        assert sorted(one.reward for one in found if isinstance(one, SampledCompletion)) == [0.0, 1.0]
        assert len([one for one in found if isinstance(one, FailedSample)]) == 1
