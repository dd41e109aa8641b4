"""The chaos suite's judge: every promise can be seen to break, in logs made by hand."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tools.chaos.judging import recovery
from tools.chaos.judging.evidence import EvidenceWriter, Line, Log, read_logs
from tools.chaos.judging.oracle import Judgement, Loss, Rules, cursor, gather, judge
from tools.chaos.judging.recovery import Hit
from tools.chaos.judging.surviving_steps import surviving_steps, trained_log
from tools.chaos.judging.watch import peaks
from tools.chaos.processes import ServiceExit, last_words

RULES = Rules(cursor=2, samples=2, staleness=1)
SAMPLES = [(task, sample) for task in range(2) for sample in range(2)]


def number(task: int, sample: int) -> int:
    """The digest of a sample in these tests."""
    return 100 * task + sample


def log(process: str, *lines: tuple[float, str, dict[str, Any]]) -> Log:
    return Log(process, [Line(at, kind, data) for at, kind, data in lines])


def publications(samples: list[tuple[int, int]] = SAMPLES, at: float = 1.0, name: str = "generator-0.1") -> Log:
    tries = [[task, sample, number(task, sample)] for task, sample in samples]
    return log(name, (at, "publish?", {"x": tries}), (at, "publish", {"x": [[*item, "ok"] for item in tries]}))


def step(at: float, index: int, tasks: list[int], leader_term: str = "1-a", version: int | None = None) -> Any:
    samples = [[task, sample, number(task, sample), index] for task in tasks for sample in range(2)]
    return (
        at,
        "step",
        {"step": index, "leader_term": leader_term, "version": index if version is None else version, "x": samples},
    )


def begin(at: float, leader_term: str) -> Any:
    return (at, "begin", {"leader_term": leader_term, "step": 0})


def trainer(*lines: Any, process: str = "trainer.9", leader_term: str = "1-a") -> Log:
    return log(process, begin(0.5, leader_term), *lines)


def broken(judgement: Judgement) -> list[str]:
    return [violation.promise for violation in judgement.violations]


GOOD = trainer(step(2.0, 0, [0]), step(3.0, 1, [1]))


def test_a_run_that_trained_everything_once_breaks_nothing() -> None:
    judgement = judge([publications(), GOOD], RULES)
    assert broken(judgement) == []
    assert (judgement.counts["published"], judgement.counts["trained"], judgement.steps) == (4, 4, 2)


def test_trained_twice() -> None:
    again = trainer(step(2.0, 0, [0]), step(3.0, 1, [1]), step(4.0, 2, [0], version=0))
    assert broken(judge([publications(), again], RULES)) == ["trained twice"] * 2


def test_a_step_repeated_after_a_crash_is_not_trained_twice() -> None:
    first = trainer(
        step(2.0, 0, [0]), (2.1, "saving", {"step": 1, "leader_term": 1}), step(3.0, 1, [1]), process="trainer.8"
    )
    second = log(
        "trainer.9",
        (4.0, "loaded", {"step": 1, "leader_term": 1}),
        begin(4.1, "2-b"),
        step(5.0, 1, [1], "2-b", version=1),
    )
    judgement = judge([publications(), first, second], RULES)
    assert broken(judgement) == []
    assert [(s.step, s.process) for s in surviving_steps([first, second])[0]] == [(0, "trainer.8"), (1, "trainer.9")]


def test_a_restart_without_a_checkpoint_begins_with_the_untrained_model() -> None:
    first = trainer(step(2.0, 0, [0]), process="trainer.8")
    second = trainer(step(5.0, 0, [0], "2-b"), step(6.0, 1, [1], "2-b"), process="trainer.9", leader_term="2-b")
    assert broken(judge([publications(), first, second], RULES)) == []


@pytest.mark.parametrize(
    "trainers",
    [
        [trainer(step(2.0, 0, [0]), step(3.0, 2, [1]))],
        [trainer(step(2.0, 1, [0]), step(3.0, 2, [1]))],
        [log("trainer.9", (1.0, "loaded", {"step": 1, "leader_term": 1}), begin(1.1, "2-b"), step(2.0, 1, [0, 1]))],
    ],
    ids=["a step is missing", "the first steps are missing", "a checkpoint that was never saved"],
)
def test_a_broken_chain_of_steps(trainers: list[Log]) -> None:
    assert "surviving_steps" in broken(judge([publications(), *trainers], RULES))


def test_phantom_made_up_sample() -> None:
    assert broken(judge([publications(SAMPLES[:3]), GOOD], RULES)) == ["phantom"]


def test_phantom_changed_contents() -> None:
    changed = trainer(step(2.0, 0, [0]), step(3.0, 1, [1]))
    changed.lines[-1].data["x"][0][2] = 7
    assert "phantom" in broken(judge([publications(), changed], RULES))


def test_a_sample_with_the_reward_of_another_one() -> None:
    at, kind, data = step(3.0, 1, [1])
    wrong = trainer(step(2.0, 0, [0]), (at, kind, data | {"wrong": [[1, 0]]}))
    judgement = judge([publications(), wrong], RULES)
    assert broken(judgement) == ["wrong reward"]
    assert "sample 1:0 in step 1" in judgement.violations[0].text


def test_a_bad_example_ends_its_group_when_the_feeder_was_the_one_that_admitted_it() -> None:
    end = {"t": 1, "how": "failed", "reason": "bad example"}
    for answer, skipped in (("ok", 0), ("no", 1)):
        feeder = log("feeder.4", (2.5, "end?", end), (2.6, "end", {**end, "a": answer}))
        judgement = judge([publications(), feeder, trainer(step(2.0, 0, [0]))], RULES)
        assert judgement.counts["skipped"] == skipped


def test_skipped_prompt() -> None:
    judgement = judge([publications(), trainer(step(2.0, 0, [0]))], RULES)
    assert broken(judgement) == ["skipped"]
    assert "task 1 was neither trained nor given up; 2 samples" in judgement.violations[0].text


@pytest.mark.parametrize(("answer", "skipped"), [("ok", 0), ("closed", 1), ("fenced", 1), (None, 0)])
def test_a_group_that_was_given_up_with_a_reason_is_not_skipped(answer: str | None, skipped: int) -> None:
    end = {"t": 1, "how": "dropped", "reason": "stale"}
    lines = [step(2.0, 0, [0]), (3.0, "end?", end)]
    if answer is not None:
        lines.append((3.1, "end", {**end, "a": answer}))
    judgement = judge([publications(), trainer(*lines)], RULES)
    assert judgement.counts["skipped"] == skipped
    if not skipped:
        ((reason, count),) = judgement.dropped.items()
        assert count == 1
        assert reason.startswith("dropped: stale")


def test_lost_member_of_a_trained_group() -> None:
    partial = trainer(step(2.0, 0, [0]), step(3.0, 1, [1]))
    partial.lines[-1].data["x"].pop()
    assert broken(judge([publications(), partial], RULES)) == ["lost"]


def test_a_sample_without_a_reward_is_excluded_not_lost() -> None:
    partial = trainer(step(2.0, 0, [0]), step(3.0, 1, [1]))
    partial.lines[-1].data["x"].pop()
    reward = log("reward-0.3", (1.5, "score", {"x": [[1, 1, "timeout", "ok"]]}))
    assert broken(judge([publications(), reward, partial], RULES)) == []


ERROR = [[1, 1, "error"]]
AGAIN = (1.7, "score", {"x": [[1, 1, "error", "dup"]]})


@pytest.mark.parametrize(
    ("lines", "promises"),
    [
        # The answer was lost, or the service was killed before it came.
        ([(1.6, "score?", {"x": ERROR}), AGAIN], []),
        ([(1.6, "score?", {"x": ERROR})], []),
        # It was scored by then: the late error changes nothing.
        ([(1.5, "score", {"x": [[1, 1, "ok", "ok"]]}), AGAIN], ["lost"]),
        ([(1.5, "score", {"x": [[1, 1, "ok", "closed"]]}), AGAIN], []),
        ([(1.6, "score?", {"x": [[1, 1, "ok"]]})], ["lost"]),
        # What was scored before it was admitted again was forgotten.
        ([(0.3, "score", {"x": [[1, 1, "ok", "ok"]]}), AGAIN], []),
    ],
)
def test_an_error_of_a_reward_excludes_a_sample_though_its_answer_was_lost(
    lines: list[tuple[float, str, dict[str, object]]], promises: list[str]
) -> None:
    partial = trainer(step(2.0, 0, [0]), step(3.0, 1, [1]))
    partial.lines[-1].data["x"].pop()
    feeder = log("feeder.4", (0.5, "admit", {"t": 1, "a": "ok", "c": 2}))
    assert broken(judge([publications(), feeder, log("reward-0.3", *lines), partial], RULES)) == promises


@pytest.mark.parametrize(("admitted", "promises"), [(0.5, ["lost"]), (1.2, [])])
def test_a_failure_whose_answer_was_lost_excludes_an_unpublished_sample(admitted: float, promises: list[str]) -> None:
    partial = trainer(step(2.0, 0, [0]), step(3.0, 1, [1]))
    partial.lines[-1].data["x"].pop()
    feeder = log("feeder.4", (admitted, "admit", {"t": 1, "a": "ok", "c": 2}))
    failing = {"t": 1, "s": 1, "how": "failed", "reason": "not generated"}
    generator = log("generator-1.5", (1.4, "end?", failing), (1.6, "end", {**failing, "a": "dup"}))
    assert broken(judge([publications(), feeder, generator, partial], RULES)) == promises


def made_again() -> list[Log]:
    """Sample 1:1 is acknowledged at 1.0 with other contents than those that are trained."""
    first = publications([(1, 1)], at=1.0, name="generator-1.2")
    first.lines[0].data["x"][0][2] = first.lines[1].data["x"][0][2] = 5
    return [first, publications(at=1.8), GOOD]


def test_an_acknowledged_sample_that_another_replaced_is_lost() -> None:
    assert broken(judge(made_again(), RULES)) == ["lost"]


def test_what_the_server_forgot_and_was_made_again_counts_apart() -> None:
    judgement = judge(made_again(), RULES, [Loss("cut aof", back_to=0.8, at=1.4)])
    assert broken(judgement) == []
    assert judgement.counts["made again after a loss"] == 1


def test_a_loss_explains_nothing_from_before_the_state_it_went_back_to() -> None:
    assert broken(judge(made_again(), RULES, [Loss("cut aof", back_to=1.9, at=2.4)])) == ["lost"]


def test_what_is_published_between_a_loss_and_the_trainers_takeover_may_be_forgotten_too() -> None:
    again = log("trainer.9", begin(0.5, "1-a"), begin(3.5, "2-b"), step(4.0, 0, [0]), step(5.0, 1, [1]))
    first = publications([(1, 1)], at=3.0, name="generator-1.2")
    first.lines[0].data["x"][0][2] = first.lines[1].data["x"][0][2] = 5
    judgement = judge([first, publications(), again], RULES, [Loss("flushall", back_to=0.0, at=2.0)])
    assert judgement.counts["lost"] == 0


def test_too_old_to_train() -> None:
    old = trainer(step(2.0, 0, [0]), step(3.0, 1, [1]))
    old.lines[-1].data["version"] = 3
    judgement = judge([publications(), old], RULES)
    assert broken(judgement) == ["staleness"] * 2
    assert judgement.max_staleness == 2


def test_a_zombie_that_goes_on() -> None:
    zombie = trainer(step(2.0, 0, [0]), step(6.0, 1, [1]), step(7.0, 2, [1]), process="trainer.8")
    second = trainer(step(5.0, 0, [0], "2-b"), step(6.0, 1, [1], "2-b"), process="trainer.9", leader_term="2-b")
    second.lines[0] = Line(4.0, "begin", {"leader_term": "2-b", "step": 0})
    assert broken(judge([publications(), zombie, second], RULES)) == ["zombie"]


def test_a_zombie_may_write_down_what_was_answered_before_it_was_stopped() -> None:
    zombie = trainer(step(6.0, 0, [0]), process="trainer.8")
    second = trainer(step(5.0, 0, [0], "2-b"), step(6.0, 1, [1], "2-b"), process="trainer.9", leader_term="2-b")
    second.lines[0] = Line(4.0, "begin", {"leader_term": "2-b", "step": 0})
    assert broken(judge([publications(), zombie, second], RULES)) == []


def test_the_cursor_is_what_feeders_were_told_before_the_end() -> None:
    feeder = log("feeder.4", (1.0, "admit", {"t": 0, "a": "ok", "c": 1}), (9.0, "admit", {"t": 1, "a": "ok", "c": 2}))
    assert (cursor([feeder], until=5.0), cursor([feeder])) == (1, 2)


def test_the_products_own_log_voids_steps_that_a_later_leader_term_repeats() -> None:
    lines = [
        {"resumed": 0, "leader_term": "1-a"},
        {"step": 0, "leader_term": "1-a", "samples": [[0, 0]]},
        {"step": 1, "leader_term": "1-a", "samples": [[1, 0]]},
        {"resumed": 1, "leader_term": "2-b"},
        {"step": 1, "leader_term": "2-b", "samples": [[2, 0]]},
        {"step": 2, "leader_term": "1-a", "samples": [[9, 0]]},
    ]
    assert trained_log(lines) == [(0, (0, 0)), (1, (2, 0))]


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    evidence = EvidenceWriter(tmp_path, "reward-0")
    evidence.write("started")
    file = next(tmp_path.iterdir())
    file.write_bytes(file.read_bytes() + b'{"at": 1.0, "k"')
    (found,) = read_logs(tmp_path)
    assert (found.role, found.name, [line.kind for line in found.lines]) == ("reward", "reward-0", ["started"])


def test_refusals_are_counted() -> None:
    tries = [[0, 0, 1, "dup"], [0, 1, 2, "closed"]]
    facts = gather([log("generator-0.1", (1.0, "publish", {"x": tries}))])
    assert facts.refusals == {"dup": 1, "closed": 1}
    assert facts.known == {(0, 0)}


def test_recovery_is_from_the_kill_to_the_successors_first_accepted_work() -> None:
    before = log("generator-0.1", (0.0, "started", {}))
    work: Callable[[str], dict[str, Any]] = lambda answer: {"x": [[0, 0, 1, answer]]}  # noqa: E731
    after = log(
        "generator-0.2",
        (10.5, "started", {}),
        (11.0, "ready", {}),
        (11.2, "answered", {}),
        (12.0, "publish", work("dup")),
        (13.0, "publish", work("ok")),
    )
    hits = [Hit("kill generator", "generator-0", 10.0, 10.0), Hit("network reset", "all", 20.0, 20.0)]
    row = recovery.summary(hits, [before, after])["generator"]
    assert (row["kills"], row["interrupted"]) == (1, 0)
    assert (row["total_p50"], row["without_load_p50"], row["back_p50"], row["undisturbed_p50"]) == (3.0, 2.5, 0.7, 2.5)
    row = recovery.summary([*hits, Hit("stop redis", "redis", 11.0, 12.0)], [before, after])["generator"]
    assert row["undisturbed_n"] == 0


def test_a_successor_that_is_killed_before_its_first_work_is_an_interrupted_recovery() -> None:
    after = log("reward-0.2", (10.5, "started", {}))
    row = recovery.summary([Hit("kill reward", "reward-0", 10.0, 10.0)], [after])["reward"]
    assert (row["kills"], row["interrupted"]) == (1, 1)


def test_recovery_of_the_server_is_until_the_first_publication_it_acknowledges() -> None:
    hits = [Hit("kill redis", "redis", 1.5, 1.7)]
    logs = [
        publications(at=1.0),
        publications(at=1.6, name="generator-1.1"),
        publications(at=3.0, name="generator-0.2"),
    ]
    assert recovery.server_recoveries(hits, logs) == [1.5]


@pytest.mark.parametrize(
    ("asked", "code", "silent", "expected"),
    [
        ("term", 0, False, True),
        ("term", -15, True, True),
        ("term", -15, False, False),
        ("", -15, True, False),
        ("kill", -9, False, True),
        ("kill", 1, False, False),
    ],
)
def test_a_process_may_end_by_sigterm_before_it_has_begun(asked: str, code: int, silent: bool, expected: bool) -> None:
    assert ServiceExit(0.0, "generator-guest1", 7, code, asked, "", silent=silent).expected == expected


def test_last_words_of_a_crash_are_those_of_the_innermost_error() -> None:
    trace = "  + Exception Group Traceback\n  | x\n    | ValueError: invalid literal\n    +------------"
    crash = json.dumps({"event": "service crashed", "exception": trace}, separators=(", ", ": "))
    assert last_words(f"something\n{crash}\n") == ("ValueError: invalid literal", True)
    assert last_words('{"event": "x"}\ntidemill: no broker\n') == ("no broker", False)
    assert last_words("") == ("no last words", False)


@pytest.mark.parametrize(("share", "expected"), [(0.5, 50), (0.99, 99), (1.0, 100)])
def test_percentile(share: float, expected: int) -> None:
    assert recovery.percentile(range(1, 101), share) == expected
    assert recovery.percentile([], share) is None


def test_most_live_groups_and_unbalanced_looks() -> None:
    looks = [
        Line(1.0, "look", {"tasks": 3, "trajectories": 8, "scored": 0, "balanced": True}),
        Line(2.0, "look", {"tasks": 1, "trajectories": 10, "scored": 4, "balanced": False}),
    ]
    found = peaks(looks, samples=2)
    assert (found.most, found.own, found.worst, found.unbalanced, found.looks) == (5.0, 5.0, looks[1], 1, 2)
    assert found.uncounted == 0.0
    assert peaks([*looks, Line(3.0, "look", {**looks[0].data, "uncounted": 0.02})], samples=2).uncounted == 0.02
    uses = {"generator": {"compute": 6000.0, "wait": 3595.0, "held": 9900.0}, "trainer": {"load": 100.0, "held": 100.0}}
    look = Line(3.0, "look", {**looks[0].data, "devices": uses, "device_seconds": 9700.0})
    assert peaks([*looks, look], samples=2).devices_off == pytest.approx(0.03), "9,695 of 10,000, less 5"
    # What the suite itself has put in shortly before is not the run's.
    found = peaks(looks, samples=2, poison=[1.5])
    assert (found.most, found.own, found.worst) == (5.0, 4.0, looks[0])
