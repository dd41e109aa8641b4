"""The reward of the first prompt, tried before a run and by `tidemill doctor`: what it is, or why it fails or waits."""

from collections.abc import Callable
from pathlib import Path

import pytest

from deploy.checks import preflight, user_code
from deploy.checks.finding import Finding, run_check
from schemas.config import TidemillConfig, load_config

Changed = Callable[..., TidemillConfig]
MINE = {"terms": [{"name": "mine.py:mine"}]}


def first_reward(config: TidemillConfig, thorough: bool) -> Finding:
    """What the check of a first reward finds, after those before it."""
    for name, look in user_code.checks(config, thorough):
        found = run_check(name, look)
        if name == "first reward":
            return found
    raise AssertionError("the reward was not tried")


@pytest.mark.parametrize(("thorough", "level"), [(True, "fail"), (False, "warn")])
def test_a_reward_that_raises_is_told_by_doctor_and_before_a_run(
    folder: Path, changed: Changed, monkeypatch: pytest.MonkeyPatch, thorough: bool, level: str
) -> None:
    monkeypatch.setattr(user_code, "QUICK_S", 60.0)
    (folder / "mine.py").write_text("def mine(prompt, completion, prompt_ids, completion_ids):\n    return 1 / 0\n")
    found = first_reward(changed(reward=MINE), thorough)
    assert (found.level, found.advice) == (level, "fix the reward function; the row gives it the fields answer")
    assert found.text.startswith(
        "no reward for the reference answer of the first prompt: mine.py:mine: ZeroDivisionErr"
    )


def test_up_warns_of_a_reward_that_fails_on_the_first_prompt(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    (folder / "prompts.jsonl").write_text('{"prompt": "1+1=", "solution": "2"}\n' * 40)
    preflight.check(load_config(Path("config.yaml"), ["train.args.answer=null"]))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("tidemill: warning: no reward for an empty answer of the first prompt: exact: TypeError: ")


def test_no_run_waits_for_rewards_that_need_a_server_or_are_slow(
    folder: Path, changed: Changed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_code, "QUICK_S", 0.2)
    (folder / "mine.py").write_text(
        "import time\n"
        "async def asks(prompt, completion, prompt_ids, completion_ids):\n    return 1 / 0\n"
        "def slow(prompt, completion, prompt_ids, completion_ids):\n    time.sleep(30)\n"
    )
    for terms, text in (
        ([{"name": "mine.py:asks"}], "skipped: it needs a server, a model or the workflow"),
        ([{"name": "mine.py:asks"}, {"name": "exact"}], "1 for the reference answer of the first prompt"),
        ([{"name": "mine.py:slow"}], "skipped: it takes longer than 0.2 s"),
    ):
        found = first_reward(changed(reward={"terms": terms}), thorough=False)
        assert (found.level, found.text) == ("ok", text)


def test_doctor_names_the_form_of_an_answer_that_a_rule_expects(
    folder: Path, changed: Changed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_code, "QUICK_S", 60.0)
    (folder / "mine.py").write_text("def mine(completion, answer):\n    return float(completion == f'#### {answer}')\n")
    answer = "0 for the reference answer of the first prompt, 1 for '#### "
    assert first_reward(changed(reward=MINE), thorough=True).text.startswith(answer)
    assert first_reward(changed(reward=MINE), thorough=False).text == answer.partition(",")[0]


def test_doctor_tries_the_reward_of_an_episode_with_one_that_the_workflow_gave(folder: Path, changed: Changed) -> None:
    (folder / "mine.py").write_text(
        "def said(prompt, completion, prompt_ids, completion_ids, messages):\n"
        "    return len(messages) + float(messages[-1]['content'] == '1')\n"
    )
    generator = {"engine": "scripted", "workflow": {"name": "agent"}}
    config = changed(generator=generator, reward={"terms": [{"name": "episode"}, {"name": "mine.py:said"}]})
    value = "4 for the reference answer of the first prompt, if the workflow's reward is 1"
    assert first_reward(config, thorough=True).text == value
    assert first_reward(config, thorough=False).text.startswith("skipped: ")


def test_a_return_that_an_environment_gives_is_no_reward_that_a_run_could_try() -> None:
    config = load_config(Path(__file__).parents[4] / "examples" / "cartpole" / "config.yaml")
    assert first_reward(config, thorough=False).text.startswith("skipped: ")
