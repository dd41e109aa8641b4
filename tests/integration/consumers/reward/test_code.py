"""The reward ``code``: what counts as passed, what an infrastructure failure is, and what programs can't cheat with."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.rewards.code import KINDS, measure_code
from consumers.reward.rewards.clock import CLOCK, CallClock
from consumers.reward.rewards.programs.score import code, extract, read_cases
from consumers.reward.rewards.terms import RewardInput, resolve
from schemas.config import RewardTerm
from schemas.errors import ConfigError, InfraError
from schemas.system.sandbox import jail
from tests.support.user_code.sandboxes import sandbox

ADD = "def add(a, b):\n    return a + b\n"
CALLS = {"cases": [{"call": "f(1)", "equals": 1}, {"call": "f(2)", "equals": 2}]}
STDIN = {"cases": [{"stdin": "1", "stdout": "1"}, {"stdin": "2", "stdout": "2"}]}
ADD_TESTS = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0", "assert add(2, 2) == 5"]


@pytest.fixture(autouse=True, params=["bwrap", pytest.param("sandlock", marks=pytest.mark.matrix("another sandbox"))])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The sandbox that ``auto`` takes: sandlock where there is no bubblewrap."""
    name = str(request.param)
    sandbox(name)
    if name == "sandlock":
        which = shutil.which
        monkeypatch.setattr(shutil, "which", lambda name: None if name == "bwrap" else which(name))
    jail.why_not.cache_clear()
    assert jail.choose("auto").name == name
    yield name
    jail.why_not.cache_clear()


def score(completion: str, **given: Any) -> float:
    return code(completion, **given)


def test_partial_credit_is_the_share_of_the_cases_that_pass() -> None:
    assert score(ADD, tests=ADD_TESTS) == pytest.approx(2 / 3)
    assert score(ADD, tests=ADD_TESTS, partial=False) == 0.0
    assert score(ADD, tests=ADD_TESTS[:2], partial=False) == 1.0


@pytest.mark.parametrize(
    ("program", "value"),
    [
        ("print(sum(map(int, input().split())))", 1.0),
        ("print(3, '  ')\nprint()", 0.5),
        ("print(sum(map(int, input().split())))\nraise SystemExit(1)", 0.0),
        ("print('3", 0.0),
        ("", 0.0),
    ],
    ids=["right", "half", "fails after the answer", "no program", "nothing"],
)
def test_what_a_program_prints_is_compared_line_by_line(program: str, value: float) -> None:
    cases = [{"stdin": "1 2\n", "stdout": "3\n"}, {"stdin": "4 5", "stdout": "9"}]
    assert score(program, cases=cases) == value


@pytest.mark.parametrize("given", [CALLS, STDIN], ids=["calls", "stdin"])
def test_a_program_that_hangs_is_wrong_before_its_worker_is_killed(given: dict[str, Any]) -> None:
    """A policy that learns to wait must be told; a killed worker would exclude the sample instead."""
    token = CLOCK.set(CallClock(6.0))
    try:
        assert score("import time\ntime.sleep(600)\n", timeout_s=30.0, **given) == 0.0
        assert CLOCK.get().left() > 0.0, "in time for the answer"
    finally:
        CLOCK.reset(token)


def test_a_call_that_hangs_leaves_time_for_the_others() -> None:
    program = "import time\ndef f(n):\n    return time.sleep(600) if n == 1 else n"
    token = CLOCK.set(CallClock(9.0))
    try:
        cases = [{"call": f"f({n})", "equals": n} for n in range(4)]
        assert score(program, timeout_s=30.0, cases=cases) == 0.75
    finally:
        CLOCK.reset(token)


def test_the_value_of_a_call_is_compared_outside() -> None:
    program = "def halves(*numbers):\n    return {'all': [n / 2 for n in numbers]}"
    cases = [
        {"call": "halves(1, 2)", "equals": {"all": [0.5, 1]}},
        {"call": "halves(1)", "equals": {"all": [1]}},
        {"call": "halves()", "equals": {"all": []}},
        {"call": "halves('a')", "equals": None},
    ]
    assert score(program, cases=cases) == 0.5


def test_a_call_does_not_see_what_another_has_done() -> None:
    program = "seen = []\ndef f(n):\n    seen.append(n)\n    return seen"
    assert score(program, cases=[{"call": "f(1)", "equals": [1]}, {"call": "f(2)", "equals": [2]}]) == 1.0


@pytest.mark.parametrize(
    "program",
    [
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "print('passed')\nraise SystemExit",
        "class Same(int):\n    def __eq__(self, other): return True\ndef add(a, b): return object()",
        "import os; os.write(1, b'x' * 100)",
    ],
)
def test_a_program_that_ends_early_has_not_passed(program: str) -> None:
    assert score(program, tests=ADD_TESTS) == 0.0
    assert score(program, cases=[{"call": "add(1, 2)", "equals": 3}]) == 0.0


def test_a_case_over_its_limits_has_failed_and_the_rest_is_not_run_after_two() -> None:
    program = "def f(n):\n    while n: pass\n    return bytearray(1 << 30) if n is None else n"
    cases = [{"call": call, "equals": 0} for call in ("f(0)", "f(1)", "f(None)", "f(2)", "f(0)")]
    assert score(program, cases=cases, timeout_s=1, memory_mb=128) == pytest.approx(1 / 5)


def test_the_program_is_the_last_block_of_the_answer() -> None:
    assert (
        extract("<think>```\nno\n```</think>First\n```python\na = 1\n```\nthen\n```py\nb = 2\n```\nDone.") == "b = 2\n"
    )
    assert extract("```python\ncut") == "cut"
    assert extract("a + b") == "a + b"


def test_rows_of_other_datasets_are_read() -> None:
    human_eval = {"tests": "def check(candidate):\n    assert candidate(2) == 4", "entry_point": "double"}
    assert score("def double(n): return 2 * n", **human_eval) == 1.0
    assert score("def double(n): return 3 * n", **human_eval) == 0.0
    assert score("x = 1", tests=["assert y + x == 3"], setup="y = 2") == 1.0
    assert score("return 2 * n", tests=["assert double(2) == 4"], prefix="def double(n):\n    ") == 1.0
    apps = '{"inputs": [[1, 2]], "outputs": [[3]], "fn_name": "add"}'
    assert score(ADD, input_output=apps) == 1.0
    assert read_cases({"input_output": {"inputs": [["1", "2"]], "outputs": ["3\n"]}}) == [
        {"stdin": "1\n2", "stdout": "3\n"}
    ]


def test_a_row_without_cases_cannot_be_judged() -> None:
    with pytest.raises(ValueError, match="the row has no cases, tests or input_output"):
        score("x = 1")
    with pytest.raises(ValueError, match="must have stdin and stdout, call and equals, or test"):
        score("x = 1", cases=[{"input": "1"}])


def test_programs_of_another_language_read_stdin() -> None:
    command = ["/bin/sh", "{file}"]
    cases = [{"stdin": "7", "stdout": "7!"}]
    assert score('read n; echo "$n!"', cases=cases, command=command) == 1.0
    with pytest.raises(ValueError, match="needs Python"):
        score("x", tests=["assert True"], command=command)


def test_the_data_of_a_task_does_not_choose_the_sandbox(tmp_path: Path) -> None:
    (term,) = resolve([RewardTerm(name="code")], tmp_path)
    told = {"cases": [{"stdin": "", "stdout": "no"}], "sandbox": "none", "python": "/nowhere", "timeout_s": -1}
    secret = tmp_path / "secret"
    secret.touch()
    program = f"try: print(open({str(secret)!r}).read())\nexcept OSError: print('no')"
    assert term.call(RewardInput("", program, [], [], told)).value == 1.0


@pytest.mark.parametrize(
    ("args", "wrong"),
    [
        ({"sandbox": "jail"}, "sandbox 'jail' must be one of auto, bwrap, sandlock, gvisor, none"),
        ({"timeout_s": 0}, "'timeout_s': 0 is not allowed, must be greater than 0"),
        ({"memory_mb": 1.5}, "'memory_mb': 1.5 is not allowed, must be a valid integer"),
        ({"command": "node"}, "'command': 'node' is not allowed, must be a valid list"),
        ({"command": ["node"]}, r"command \['node'\] must be a list that has {file}"),
        ({"time": 1}, "unknown argument 'time'"),
    ],
)
def test_a_wrong_setting_is_found_before_the_run(args: dict[str, Any], wrong: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=wrong.replace("{", r"\{")):
        resolve([RewardTerm(name="code", args=args)], tmp_path)


def test_a_sandbox_that_fails_excludes_the_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise InfraError("the sandbox could not be started: no more processes")

    (term,) = resolve([RewardTerm(name="code")], tmp_path)
    monkeypatch.setattr(jail.Sandbox, "run", fails)
    result = term.call(RewardInput("", ADD, [], [], {"tests": ADD_TESTS}))
    assert (result.status, result.reason) == (
        "error",
        "InfraError: the sandbox could not be started: no more processes",
    )


def test_the_benchmark_counts_the_cases_of_right_programs(way: str) -> None:
    for kind in KINDS:
        found = measure_code(way, kind, seconds=0.1)
        assert found["programs"] >= 1
        assert found["cases_per_s_per_core"] > 0
