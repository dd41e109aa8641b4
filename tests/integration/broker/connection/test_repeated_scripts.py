"""Every script gets the same call twice, as after a lost answer, in states that random histories reach."""

import itertools
from collections.abc import Callable

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from broker.client import Broker
from broker.connection.embedded import EmbeddedServer
from broker.connection.keys import Keys
from broker.connection.scripts import names
from broker.flow.ledger import SkippedTask
from broker.flow.owner import Owner
from broker.queues.dead_letters import UnusableTask
from broker.queues.tasks import eval_task_id
from schemas.codec import Array
from schemas.config import BrokerConfig
from schemas.messages import Heartbeat, Partial, Piece, Question, QuestionAnswer, Sampling, Score, Span
from tests.support.broker.prompt_groups import make_batch_record, make_task, make_trajectory, train_record
from tests.support.broker.repeats import RepeatingConnection
from tests.support.broker.trainer_sessions import take_over

DIFFERING = {
    "admit_tasks": "the answer names the next task, from which the feeder continues",
    "publish_scores": "the answer is only counted: the score is published in either case",
    "return_task": "the answer is for a log: the task waits for a generator in either case",
    "set_run_control": "the number of an order may be that of the repeat, which has the same effect",
    "add_version": "the publication looks whether the version that exists is its own",
    "answer_roll": "the answer is the time that is left",
    "close_roll": "the answer is the time that is left",
    "claim_scores": "what is read is pending for the reader, who claims it after a lost answer",
    "take_evaluations": "what is read is pending for the reader, who claims it after a lost answer",
    "take_question": "nothing depends on a question",
    "take_over": "each takeover is a new term",
    "open_evaluation": "the answer says whether this call opened it, for a log",
    "forget_consumers": "the answer says how many were deleted, and is not read",
    "append_telemetry": "the answer is the entry, and is not read",
    "dead_letter": "the answer is not read: the entry is gone in either case",
    "return_trajectory": "the answer is not read: the entry is gone in either case",
    "fail_sample": "the answer is not read: the sample has failed in either case",
    "fail_task": "the answer is not read: the entry is gone in either case",
    "begin_episode": "a user whose answer was lost begins another; the first one gets no reward",
    "register_episode": "the same record, with its fields in another order",
    "reward_episode": "the answer says whether this call stored it; the first reward counts in either case",
}
"""Scripts whose second answer may be another one, with the reason."""
CHANGING = {
    "take_over": "each takeover is a new term",
    "add_counts": "counters of faults, on which nothing depends",
    "append_telemetry": "a line of telemetry may appear twice",
    "keep_samples": "a shown sample may appear twice",
    "keep_eval_samples": "it is not called again after a lost answer",
    "note_verdict": "it is not called again after a lost answer",
    "set_run_control": "the services obey the last of equal orders",
    "answer_question": "a user's question is answered by the first answer",
    "take_question": "nothing depends on a question",
    "begin_episode": "a user whose answer was lost begins another conversation",
    "register_episode": "the same record, with its fields in another order",
    "publish_samples": "tokens of a repeated call are counted as generated again, on which nothing depends",
    "reclaim_scores": "it counts one more delivery to the trainer, which is not read",
    "take_evaluations": "the next tasks are claimed for the same generator, which asks for all that it claimed",
}
"""Scripts that may change data the second time, with the reason."""

_runs = itertools.count()
BODY = Piece(
    start=0,
    partial=Partial(sample=0, tokens=Array.of([1], "i4"), logprobs=Array.of([0.0], "f4"), spans=[Span(0, 0, 1)]),
)


class History:
    """A run whose services make the calls of the test, in any order, each call twice."""

    def __init__(self, url: str) -> None:
        config = BrokerConfig(max_deliveries=2)
        self.connection = RepeatingConnection(url, Keys("tidemill", f"twice-{next(_runs)}"), 10.0)
        self.broker = Broker(self.connection, config)
        self.training = take_over(self.broker, batch=1, staleness=3)
        self.queues = {name: self.broker.task_queue(name) for name in ("g0", "g1")}
        self.rewards = {name: self.broker.score_queue(name) for name in ("r0", "r1")}
        self.tasks = [*self.queues["g0"].read(1, 1)]
        self.items = [*self.rewards["r0"].read(1, 1)]
        self.outcomes = self.training.claim_scores(1)
        self.step, self.version, self.asked = 0, 0, 0
        self.keys, self.client = self.connection.keys, self.connection.client

    def admit(self, pick: int) -> None:
        following = self.broker.ledger.admit(make_task(1 << 31)).next
        tasks = [make_task(following + i, n=1 + pick % 2) for i in range(1 + pick % 3)]
        odd = {3: UnusableTask(following, 1, "no"), 4: SkippedTask(following)}.get(pick % 5)
        self.broker.ledger.admit_all([odd] if odd else tasks, prompts={following: 1})

    def generate(self, pick: int) -> None:
        queue = list(self.queues.values())[pick % 2]
        self.tasks += queue.claim_stale(0, 1) if pick % 5 == 0 else queue.read(2, 1)
        self.broker.connection.run_script("renew_tasks", "tasks", "g0", *(item.entry_id for item in self.tasks))
        for item in self.tasks[pick % 3 :][:2]:
            task = item.message
            found = [make_trajectory(task.task_id, k, kind=task.kind) for k in range(task.n)]
            if pick % 7 == 1:
                queue.fail_sample(task.task_id, 0, "no")
            elif pick % 7 == 2:
                self.broker.partials(f"g{pick % 2}").save_pieces([(task.task_id, item.entry_id, [(0, BODY)])])
            elif pick % 7 == 3:
                queue.return_task(item, task)
            elif pick % 7 == 4:
                queue.keep_images(task.task_id, {"a": b"image"})
            else:
                queue.publish(task.task_id, found[pick % task.n :])
        self.tasks = self.tasks[-6:]

    def spoil(self, pick: int) -> None:
        if pick % 3 == 0:
            self.client.xadd(self.keys.tasks, {"t": pick % 4, "v": 0, "b": b"garbage"})
        elif pick % 3 == 1:
            self.client.xadd(self.keys.trajectories, {"t": pick % 4, "s": 0, "b": "gone"})
        else:
            entries = self.client.xrange(self.keys.tasks, count=1)
            for entry, fields in entries:
                task = fields.get(b"t", b"")
                self.connection.run_script("fail_task", "tasks", entry, task, b"letter")

    def score(self, pick: int) -> None:
        queue = list(self.rewards.values())[pick % 2]
        self.items += queue.claim_stale(0, 1) if pick % 5 == 0 else queue.read(2, 1)
        ids = [item.entry_id for item in self.items]
        self.connection.run_script("renew_trajectories", "trajectories", "r0", *ids)
        some = self.items[pick % 2 :][:2]
        if pick % 4 == 0:
            queue.give_back(some)
        else:
            score = Score(reward=1.0) if pick % 4 < 3 else Score(status="error", reason="no")
            queue.publish([(item, score) for item in some])
            self.broker.eval_samples.keep([(item.message, score) for item in some])
        self.items = self.items[-6:]

    def train(self, pick: int) -> None:
        found = self.training.claim_scores(2)
        self.training.discard_scores([one for one in found if one.sample < 0])
        self.outcomes += [one for one in found if one.sample >= 0]
        task_id = self.outcomes[pick % len(self.outcomes)].task_id if self.outcomes else pick % 4
        some = [one for one in self.outcomes if one.task_id == task_id]
        self.training.read_pipeline()
        if pick % 5 == 0:
            outcome = ("dropped", "failed")[pick % 2]
            self.training.drop_group(task_id, "stale", [one.scored_id for one in some], outcome)
        elif pick % 5 == 1:
            self.training.discard_scores(some)
        elif some:
            record = train_record(self.training, make_batch_record(some, self.step))
            self.step += 1
            if pick % 2:
                self.training.commit_steps([record])
        self.connection.run_script("diagnose_group", task_id)
        self.connection.run_script("reclaim_scores", self.training.leader_term, "0-0", 10)
        self.outcomes = [one for one in self.outcomes if one not in some]

    def evaluate(self, pick: int) -> None:
        self.broker.evals.open(pick % 2, [make_task(eval_task_id(pick % 2, k), n=1 + k, kind="eval") for k in range(2)])
        self.tasks += self.queues["g0"].take_evaluations(pick % 2, 1, late=pick % 3 == 0).taken
        self.broker.evals.mend()
        self.broker.eval_samples.take("0-0", "")

    def order(self, pick: int) -> None:
        control = self.broker.run_control
        control.pause("freeze" if pick % 3 == 0 else "none", "me")
        control.evaluate(1, "me")
        control.scale("generator", pick % 3, "me")
        control.checkpoint("me")
        control.stop("me")
        self.broker.ledger.change_settings({"lr": 0.1 * pick, "staleness": 3})
        for letter, _ in self.client.xrange(self.keys.dead, count=2):
            self.connection.run_script("requeue_group", letter, pick % 4)

    def ask(self, pick: int) -> None:
        self.asked += 1
        self.broker.questions.ask(Question(id=str(self.asked), until=1e12, sampling=Sampling(), text="?"))
        if pick % 2 and (question := self.broker.questions.take()):
            self.broker.questions.answer(QuestionAnswer(id=question.id, generator="g0"))

    def converse(self, pick: int) -> None:
        live = self.broker.live_episodes(f"g{pick % 2}")
        live.register(f"{pick % 4}:0", f"http://g/{pick % 2}")
        live.release(f"{pick % 3}:0", "http://g/1")
        begun = live.begin("t")
        if begun is not None and pick % 3:
            live.reward(begun[0], "t", 1.0, 60.0)
        elif begun is not None:
            live.end(begun[0])

    def weigh(self, pick: int) -> None:
        call, term = self.connection.run_script, self.training.leader_term
        self.version += pick % 2
        call("put_chunk", term, f"w:{pick}", b"bytes")
        call("add_version", term, self.version + 1, b"manifest %d" % self.version)
        call("note_verdict", self.version, "g0", ("", "broken")[pick % 2])
        call("announce_peer", f"p{pick % 2}", b"record", 0 if pick % 5 == 0 else 100, b"key")
        call("find_peers")
        call("open_roll", term, f"w:{pick}", "gloo", 60_000 if pick % 3 else 0)
        call("answer_roll", f"g{pick % 2}", f"w:{pick}" if pick % 7 else "", 0, "gloo nccl")
        call("close_roll", term, f"w:{pick}", 0)
        call("meet", 1, "note", b"x" if pick % 2 else b"")

    def watch(self, pick: int) -> None:
        call = self.connection.run_script
        self.broker.heartbeats.claim(Heartbeat(service=f"s{pick % 2}", role="r", host="h", pid=1, state="running"), b"")
        beat = Heartbeat(service="s0", role="r", host="h", pid=1 + pick % 2, state="running", devices=1)
        beat.device_ms, beat.counted_ms = {"wait": 100 * pick}, {"wait": 50 * pick}
        self.broker.heartbeats.send(beat)
        call("append_telemetry", "events", "b", b"x", 10)
        call("add_counts", "fault", 1)
        call("keep_samples", 1, 10, 0, 0, b"score", b"body")
        call("drop_dead_letters", 1 << 20)
        call("measure_streams")
        call("forget_consumers", self.training.leader_term, 0 if pick % 2 else 60_000)

    def replace(self, pick: int) -> None:
        call = self.connection.run_script
        self.broker.owner.claim(Owner("", "folder", "host"))
        call("set_run_state", "cause", "test")
        if pick % 3 == 0:
            self.training.finish_run()
        self.training = take_over(self.broker, batch=1, staleness=3, fresh=False, step=self.step, version=self.step)
        self.outcomes = []


OPERATIONS: list[Callable[[History, int], None]] = [
    *[History.admit, History.generate, History.score, History.train] * 2,
    *[
        History.spoil,
        History.evaluate,
        History.order,
        History.ask,
        History.converse,
        History.weigh,
        History.watch,
        History.replace,
    ],
]


@settings(max_examples=6, derandomize=True, suppress_health_check=list(HealthCheck))
@given(steps=st.lists(st.tuples(st.integers(0, len(OPERATIONS) - 1), st.integers(0, 419)), min_size=20, max_size=40))
def test_a_repeated_call_answers_alike_and_has_no_effect(server: EmbeddedServer, steps: list[tuple[int, int]]) -> None:
    history = History(server.url)
    for operation, pick in steps:
        OPERATIONS[operation](history, pick)
    check(history)


def test_every_script_is_called_twice(server: EmbeddedServer) -> None:
    history = History(server.url)
    for pick in range(13):
        for operation in OPERATIONS:
            operation(history, pick)
    check(history)
    assert set(names()) - history.connection.called == set()


def check(history: History) -> None:
    history.broker.purge()
    found = history.connection
    assert {name: pair for name, pair in found.differing.items() if name not in DIFFERING} == {}
    assert {name: keys for name, keys in found.changed.items() if name not in CHANGING} == {}
