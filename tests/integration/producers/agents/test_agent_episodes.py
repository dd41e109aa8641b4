"""An agent's episode: what it is given and may say, what its end means, and which unfinished calls are kept."""

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from broker.queues.consumer_group import Delivery
from producers.agents.outcomes import WINDOW, EpisodeFailure, EpisodeOutcome, FailureAlarm, judge
from producers.agents.workers import start
from producers.agents.workers.notes import Notes
from producers.agents.workers.pool import AgentWorkers
from producers.agents.workers.protocol import AgentResult
from producers.agents.workers.start import AgentProgram, check_agent
from producers.conversation.calls import with_earlier
from producers.generator.rollout import NotFinite, Rollout, check_finite, head, longest
from producers.workflows.trajectory_builder import SampledCompletion
from schemas.codec import Array
from schemas.config import AgentsConfig
from schemas.errors import ConfigError
from schemas.messages import Call, FinishReason, Partial, Span, Task
from schemas.system.lifecycle import StopFlag
from tests.support.broker.prompt_groups import make_task
from tests.support.producers.agent_workers import AGENT, job, play, with_workers

RAISED = AgentResult("raised", error="KeyError: 'x'", error_type="builtins.KeyError")


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "agent.py").write_text(AGENT)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_function_a_plain_one_and_a_class_run_as_episodes(base: Path):
    jobs = [job("wait", name=str(k), seconds=0.0) for k in range(8)]
    assert {(result.kind, result.reward) for result in play(base, *jobs, processes=2)} == {("returned", 1.0)}
    (plain,) = play(base, job("value", value=2), run="agent.py:plain")
    assert (plain.kind, plain.reward) == ("returned", 2.0)
    built = play(base, *(job("x", name=str(k), value=k) for k in range(3)), run="agent:Built", args={"factor": 10})
    assert sorted((result.reward, result.metrics["calls"]) for result in built) == [(0, 1), (10, 2), (20, 3)]


@pytest.mark.parametrize(
    ("what", "reward"),
    [("None", None), ("0.5", 0.5), ("True", 1.0), ("{'reward': 2}", 2.0), ("{}", None), ("{'turns': {'a': 1}}", None)],
)
def test_an_agent_returns_none_a_number_or_a_mapping(base: Path, what: str, reward: float | None):
    (result,) = play(base, job("returns", what=what))
    assert (result.kind, result.reward) == ("returned", reward)


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("'1'", "the result of run, unless it is a dict or None, must be a number, is str"),
        ("float('nan')", "the result of run, unless it is a dict or None, must be finite, is nan"),
        ("{'score': 1}", "run returned 'score': a dict may have reward, turns, metrics and data"),
        ("{'metrics': {'a': 'b'}}", "metrics['a'] must be a number, is str"),
        ("{'data': {'a': {1}}}", "data must be JSON: TypeError: Object of type set is not JSON serializable"),
        ("{'data': [1]}", "data must be a dict, is list"),
    ],
)
def test_any_other_result_is_an_error_of_one_line(base: Path, what: str, reason: str):
    (result,) = play(base, job("returns", what=what))
    assert (result.kind, result.error) == ("raised", reason)


@pytest.mark.parametrize(
    ("what", "found"),
    [
        ("{'data': {'a': chr(0xd800)}}", {"a": "\\ud800"}),
        ("{'metrics': {chr(0xd800): 1}}", {}),
        ("{'data': {'a': 'x' * (65 << 20)}}", "a result has 6815749"),
        ("{'x' * (65 << 20): 1}", "run returned 'xxxx"),
    ],
    ids=["half a character", "half a character in a name", "too much", "a long name"],
)
def test_an_agent_that_says_what_cannot_be_told_costs_its_neighbour_nothing(base: Path, what: str, found: object):
    async def work(workers: AgentWorkers) -> tuple[AgentResult, AgentResult]:
        neighbour = asyncio.create_task(workers.run(job("waits_for_its_neighbour")))
        result = await workers.run(job("returns", what=what))
        (base / "over").touch()
        return result, await neighbour

    result, neighbour = with_workers(work, base)
    assert neighbour.kind == "returned"
    assert (result.kind, result.data) == ("returned", found) if isinstance(found, dict) else result.kind == "raised"
    assert isinstance(found, dict) or result.error.startswith(found)


def test_what_an_agent_says_is_kept_even_when_it_does_not_end(base: Path):
    ended, late = play(base, job("says"), job("says", name="late", deadline_s=0.5, then="hang"))
    assert (ended.kind, ended.reward, ended.data) == ("returned", 0.25, {"log": ["a"]})
    assert ended.turns == {"chatcmpl-1": 1.0, "chatcmpl-2": 0.5}
    assert ended.metrics == {"steps": 3.0, "tools": 2.0}
    assert (late.kind, late.reward, late.turns) == ("deadline", 0.25, {"chatcmpl-1": 1.0})


def test_a_side_effect_happens_once_in_all_attempts(base: Path):
    notes = Notes()

    async def work(workers: AgentWorkers) -> list[AgentResult]:
        return [await workers.run(job("buys", attempt=attempt), notes) for attempt in range(2)]

    died, bought = with_workers(work, base)
    assert (died.kind, bought.kind, bought.data) == ("died", "returned", {"ticket": 7})
    assert notes == {"ticket": '{"ticket": 7}'}
    assert (base / "bought").read_text() == "x"


def test_results_of_side_effects_that_are_too_large_are_refused(base: Path):
    notes = Notes()
    result = with_workers(lambda workers: workers.run(job("hoards"), notes), base)
    assert (result.kind, list(notes)) == ("raised", ["small"])
    assert "once of one episode would have 1048591 bytes as JSON, the most is 1048576" in result.error


def test_an_agent_sees_its_episode_and_no_secret_of_the_service(base: Path, monkeypatch: pytest.MonkeyPatch):
    hidden = {"REDIS_URL", "REDIS_URL_FILE", "TIDEMILL_CONTROL_TOKEN", "TIDEMILL_BROKER__URL", "HF_TOKEN"}
    for name in (*hidden, "SEARCH_KEY"):
        monkeypatch.setenv(name, "x")
    (result,) = play(base, job("seen", name="t-1", attempt=2, deadline_s=20), env=["SEARCH_KEY"])
    assert (result.data["id"], result.data["attempt"], result.data["task"]) == ("t-1", 2, {"do": "seen"})
    assert 15 < result.data["left"] <= 20
    assert not hidden & set(result.data["env"])
    assert {"SEARCH_KEY", "PATH"} <= set(result.data["env"])


def test_what_an_agent_prints_is_log_and_no_message(base: Path, capfd: pytest.CaptureFixture[str]):
    (result,) = play(base, job("prints"))
    assert result.kind == "returned"
    out, err = capfd.readouterr()
    assert "printed" not in out
    assert "printed\n" in err
    assert "spoken\n" in err


@pytest.mark.parametrize(
    ("run", "args", "reason"),
    [
        ("missing.py:run", {}, "missing.py:run cannot be imported: no file"),
        ("agent.py:missing", {}, "agent.py:missing: agent.py has no 'missing'"),
        ("broken.py:run", {}, "broken.py:run cannot be imported: ZeroDivisionError: division by zero"),
        ("nowhere.agents:run", {}, "nowhere.agents:run cannot be imported: ModuleNotFoundError"),
        ("agent.py:Built", {}, "agent.py:Built cannot be built with args {}: missing a required argument: 'factor'"),
        ("wrong.py:other", {}, "wrong.py:other: parameter prompt is not one of task, client, base_url, api_key"),
        ("wrong.py:stream", {}, "wrong.py:stream: run must return its result, it yields"),
        ("wrong.py:fine", {"depth": 1}, "wrong.py:fine takes no args 'depth'"),
        ("wrong.py:Fails", {}, "wrong.py:Fails cannot be built: OSError: no tools"),
        ("wrong.py:NUMBER", {}, "wrong.py:NUMBER must be a function or a class, is int"),
    ],
)
def test_an_agent_that_cannot_be_loaded_is_one_line_at_first(base: Path, run: str, args: dict[str, Any], reason: str):
    (base / "broken.py").write_text("1 / 0\n")
    (base / "wrong.py").write_text(
        "NUMBER = 1\ndef other(task, prompt): ...\nasync def stream(task):\n    yield 1\ndef fine(task): ...\n"
        "class Fails:\n    def __init__(self): raise OSError('no tools')\n    def run(self, task): ...\n"
    )
    with pytest.raises(ConfigError) as caught:
        play(base, run=run, args=args)
    assert str(caught.value).startswith(f"generator.workflow.args.run: {reason}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("run", "args", "reason"),
    [
        ("agent.py:run", {}, ""),
        ("agent.py:Built", {"factor": 1}, ""),
        ("agent.py:Exits", {}, ""),
        (
            "agent.py:Built",
            {"factors": 1},
            "agent.py:Built cannot be built with args {'factors': 1}: missing a required",
        ),
        ("other.py:run", {}, "other.py:run cannot be imported: no file"),
        ("ends.py:run", {}, "ends.py:run cannot be checked: its process ended with exit code 3"),
        ("hangs.py:run", {}, "hangs.py:run cannot be checked: it is not loaded after 1 s"),
    ],
)
@pytest.mark.parametrize("python", [None, sys.executable])
def test_an_agent_is_checked_and_not_run_before_anything_else_begins(
    base: Path, monkeypatch: pytest.MonkeyPatch, run: str, args: dict[str, Any], reason: str, python: str | None
):
    (base / "agent.py").write_text(
        AGENT + "class Exits:\n    def __init__(self): os._exit(1)\n    def run(self): ...\n"
    )
    (base / "ends.py").write_text("import os\nos._exit(3)\n")
    (base / "hangs.py").write_text("import time\ntime.sleep(3600)\n")
    monkeypatch.setattr(start, "CHECK_TIMEOUT_S", 1.0 if run == "hangs.py:run" else 20.0)
    settings = AgentsConfig(python=None if python is None else Path(python))
    if not reason:
        check_agent(AgentProgram(run, None, args, base, settings))
        return
    with pytest.raises(ConfigError) as caught:
        check_agent(AgentProgram(run, None, args, base, settings))
    assert str(caught.value).startswith(f"generator.workflow.args.run: {reason}")


def test_a_program_or_an_interpreter_that_is_not_there_is_told_before_anything_else_begins(base: Path):
    (base / "mine").write_text("#!/bin/sh\n")
    check_agent(AgentProgram(None, ["sh", "-c", "exit 1"], {}, base, AgentsConfig()))
    with pytest.raises(ConfigError, match=r"args\.command: '\./mine' is not a program that can be run"):
        check_agent(AgentProgram(None, ["./mine"], {}, base, AgentsConfig()))
    (base / "mine").chmod(0o755)
    check_agent(AgentProgram(None, ["./mine"], {}, base, AgentsConfig()))
    with pytest.raises(ConfigError, match=r"agents\.python: .*/env/python is not a program that can be run"):
        check_agent(AgentProgram("agent.py:run", None, {}, base, AgentsConfig(python=Path("env/python"))))


@pytest.mark.parametrize(
    ("result", "limit", "settings", "found"),
    [
        (AgentResult("returned", reward=0.5), None, {}, EpisodeOutcome(None, 0.5)),
        (AgentResult("returned"), None, {}, EpisodeOutcome(None, None)),
        (AgentResult("returned", reward=0.5), "length", {}, EpisodeOutcome("length", 0.5, "length")),
        (AgentResult("deadline"), None, {}, EpisodeOutcome("deadline", None, "deadline")),
        (AgentResult("deadline", reward=0.2), "calls", {}, EpisodeOutcome("deadline", 0.2, "deadline")),
        (RAISED, "calls", {}, EpisodeOutcome("calls", None, "calls")),
        (RAISED, None, {}, EpisodeFailure("raised", "KeyError: 'x'")),
        (RAISED, None, {"outcomes": {"builtins.KeyError": -1.0}}, EpisodeOutcome(None, -1.0, "declared")),
        (AgentResult("died", error="SIGKILL"), None, {}, EpisodeFailure("died", "SIGKILL", again=True)),
        (AgentResult("died", error="SIGKILL"), "length", {}, EpisodeFailure("died", "SIGKILL", again=True)),
        (AgentResult("neighbour", error="n"), None, {}, EpisodeFailure("neighbour", "n", again=True)),
    ],
)
def test_an_outcome_is_what_the_policy_did_a_failure_what_happened_to_it(
    result: AgentResult, limit: Any, settings: dict[str, Any], found: EpisodeOutcome | EpisodeFailure
) -> None:
    assert judge(result, limit, AgentsConfig(**settings)) == found


@pytest.mark.parametrize(("result", "limit"), [(AgentResult("deadline"), None), (AgentResult("returned"), "calls")])
def test_episodes_that_reach_a_limit_are_excluded_where_that_is_asked_for(result: AgentResult, limit: Any) -> None:
    found = judge(result, limit, AgentsConfig(late="exclude"))
    assert isinstance(found, EpisodeFailure)
    assert not found.again
    assert "generator.agents.late is exclude" in found.reason


def test_an_alarm_comes_once_until_it_has_become_better() -> None:
    alarm = FailureAlarm(0.2)
    failure, outcome = EpisodeFailure("raised", "KeyError: 'x'"), EpisodeOutcome(None, 1.0)
    assert [alarm.add(failure) for _ in range(20)] == [None] * 20
    text = alarm.add(failure)
    assert text == "21 of the last 21 episodes failed (21 raised), last: KeyError: 'x'"
    assert [alarm.add(failure) for _ in range(5)] == [None] * 5
    assert [alarm.add(outcome) for _ in range(WINDOW)] == [None] * WINDOW
    assert [alarm.add(failure) for _ in range(20)] == [None] * 20
    assert alarm.add(failure) is not None


def call(key: str, length: int = 3, finish: FinishReason = "stop", version: int = 0) -> Call:
    tokens, logprobs = Array.of(np.arange(length), "i4"), Array.of(np.zeros(length), "f4")
    return Call(key=key.encode(), tokens=tokens, logprobs=logprobs, spans=[Span(version, 0, length)], finish=finish)


def episode(*calls: Call, **notes: str) -> Partial:
    none, no_logprobs = Array.of([], "i4"), Array.of([], "f4")
    return Partial(sample=0, tokens=none, logprobs=no_logprobs, spans=[], calls=list(calls), notes=notes)


def keys(partial: Partial) -> str:
    return "".join(item.key.decode() for item in partial.calls)


def test_an_episode_that_starts_again_keeps_the_calls_it_has_not_come_to_yet() -> None:
    earlier = episode(call("a"), call("b"), call("c"), n="1", m="2")
    assert keys(with_earlier(episode(), earlier)) == "abc"
    assert keys(with_earlier(episode(call("b")), earlier)) == "bac"
    assert keys(with_earlier(episode(call("a"), call("b"), call("c"), call("d")), earlier)) == "abcd"
    assert with_earlier(episode(call("a"), n="3"), earlier).notes == {"n": "3", "m": "2"}
    assert with_earlier(episode(call("a")), None) == episode(call("a"))


def test_an_episode_that_goes_another_way_drops_its_earlier_calls_once_it_has_as_much() -> None:
    earlier = episode(call("a", 4), call("b", 4))
    assert keys(with_earlier(episode(call("a", 4), call("x", 3)), earlier)) == "axb"
    assert keys(with_earlier(episode(call("a", 4), call("x", 4)), earlier)) == "ax"


def test_a_growing_call_replaces_what_was_saved_of_it() -> None:
    earlier = episode(call("a"), call("b", 2, "abort"))
    assert with_earlier(episode(call("a"), call("b", 1, "abort")), earlier).calls[1].tokens == call("b", 1).tokens


def test_the_longest_partial_of_a_sample_has_the_notes_of_all() -> None:
    short, long = episode(call("a"), n="1", m="1"), episode(call("a"), call("b"), n="2")
    for partials in ([short, long], [long, short]):
        (found,) = longest(partials)
        assert (keys(found), found.notes) == ("ab", {"n": "2", "m": "1"})
    (found,) = longest([episode(n="1"), episode()])
    assert found.notes == {"n": "1"}


def test_the_first_tokens_of_a_call_are_a_call_that_grows() -> None:
    whole = msgspec.structs.replace(call("a", 5), spans=[Span(1, 0, 3), Span(2, 3, 5)])
    assert head(whole, 5) is whole
    cut = head(whole, 4)
    assert (cut.finish, cut.tokens.numpy().tolist(), cut.spans) == (
        "abort",
        [0, 1, 2, 3],
        [Span(1, 0, 3), Span(2, 3, 4)],
    )


def test_all_calls_are_kept_wherever_their_tokens_stand() -> None:
    """The tokens of a helper stand behind those of the main agent, though they are older."""
    sample = SampledCompletion(
        index=0,
        tokens=[1, 2, 3, 4],
        loss_mask=[1, 1, 1, 1],
        logprobs=[-1.0, -1.0, -1.0, -1.0],
        spans=[Span(4, 0, 2), Span(3, 2, 4)],
        turns=[],
        finish="abort",
        prompt="",
        completion="",
        calls=[call("a", version=3), call("b", version=4)],
        notes={"n": "1"},
    )
    assert sample.to_partial(0) == episode(*sample.calls, n="1")
    sample.logprobs[2] = float("nan")
    with pytest.raises(NotFinite, match="version 3"):
        check_finite(sample, 4)


class Checked:
    """Of a generator, the weights whose probe is passed, and what it saves."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.config = SimpleNamespace(trace=None)
        self.updates = self.weights = self.saver = self.orders = self
        self.times_lent = 0
        self.saved: list[Partial] = []
        self.checked = asyncio.Event()

    def trusted_length(self, spans: Sequence[Span], length: int) -> int:
        return min((span.start for span in spans if span.version > self.version), default=length)

    async def wait_trusted(self, spans: Sequence[Span], length: int) -> int:
        await self.checked.wait()
        return length

    def save_soon(self, delivery: Delivery[Task], partial: Partial) -> asyncio.Future[bool]:
        self.saved.append(partial)
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        done.set_result(True)
        return done


async def test_no_token_of_weights_that_are_not_checked_yet_is_saved_and_who_waits_waits_for_the_check() -> None:
    async with asyncio.timeout(10):
        context = Checked(version=1)
        rollout = Rollout(cast(Any, context), Delivery(b"1-1", "tasks", make_task(0)), cast(Any, None), StopFlag())
        mixed = msgspec.structs.replace(call("b", 5), spans=[Span(1, 0, 3), Span(2, 3, 5)])
        rollout._save(episode(call("a", version=2)))
        assert context.saved == []
        whole = episode(call("a", version=1), mixed, call("c", version=2), call("d", version=1))
        saving = asyncio.ensure_future(rollout._save(whole))
        (saved,) = context.saved
        assert [(item.key, len(item.tokens), item.finish) for item in saved.calls] == [
            (b"a", 3, "stop"),
            (b"b", 3, "abort"),
            (b"d", 3, "stop"),
        ]
        await asyncio.sleep(0.01)
        assert not saving.done()
        context.version = 2
        context.checked.set()
        await saving
        assert context.saved[1:] == [whole]
