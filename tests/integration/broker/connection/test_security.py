"""Each role has a user of its own that can do its work and nothing else, on its own run and on no other."""

import contextlib
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis

from broker.client import Broker
from broker.connection import acl
from broker.connection.connection import Connection, open_client
from broker.connection.embedded import EmbeddedServer, wait_ready
from broker.connection.keys import Keys
from broker.connection.runs import list_runs
from broker.connection.scripts import names
from broker.flow.ledger import SkippedTask
from broker.queues.tasks import eval_task_id
from broker.weights.collective.roll import RollCall
from broker.weights.peers.node import PeerNode
from broker.weights.transports import PeerOrigin, PeerReader
from schemas.config import BrokerConfig
from schemas.config.publish import PeerConfig
from schemas.digests import digest
from schemas.errors import ConfigError
from schemas.messages import ChatMessage, ContentPart, Event, Image, Sampling, Score, Task
from tests.support.broker.one_group import fetch_weights, move_one_group, publish_weights
from tests.support.broker.prompt_groups import claim_batch, make_task, make_trajectory
from tests.support.broker.trainer_sessions import take_over

ROOT = Path(__file__).resolve().parents[4]
KEYS, OTHER = Keys("tidemill", "mine"), Keys("tidemill", "mine-2")
TRAINERS = ("leader_term", "journal")


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Every role's URL on a server of its own, which knows the roles of two runs; ``default`` may do everything."""
    server = EmbeddedServer(tmp_path_factory.mktemp("acl"))
    url = server.start()
    passwords = acl.new_passwords()
    client: Any = open_client(url)
    for keys in (KEYS, OTHER):
        for line in acl.acl_lines(keys, passwords):
            assert client.execute_command(*line.split()) in (b"OK", True, "OK")
    yield {"default": url} | {
        role: f"unix://{acl.user(role, KEYS)}:{password}@{server.socket}" for role, password in passwords.items()
    }
    server.stop()


@pytest.fixture
def roles(urls: dict[str, str]) -> dict[str, Broker]:
    """A broker for each role, on an empty server."""
    open_client(urls["default"]).flushall()
    return {role: connect(url) for role, url in urls.items() if role != "default"}


def connect(url: str, keys: Keys = KEYS, **settings: object) -> Broker:
    config = BrokerConfig.model_validate(settings | {"deadline_s": 5})
    return Broker(Connection(url, keys, config.deadline_s), config)


def test_a_group_passes_every_hop_each_service_under_its_own_user(roles: dict[str, Broker], tmp_path: Path) -> None:
    training = move_one_group(roles, tmp_path)
    publish_weights(roles["trainer"], training.leader_term, 2, tmp_path)
    assert fetch_weights(roles["generator"], tmp_path).version == 2
    training.read_pipeline()
    for role in ("feeder", "generator", "reward", "trainer"):
        roles[role].heartbeats.remove(role)


def test_weights_go_from_peer_to_peer_under_each_role(roles: dict[str, Broker], tmp_path: Path) -> None:
    training = take_over(roles["trainer"])
    reading = roles["generator"]
    with (
        contextlib.closing(PeerOrigin(roles["trainer"].connection, tmp_path, PeerConfig())) as origin,
        contextlib.closing(PeerReader(reading.connection, PeerNode(reading.connection, "g", PeerConfig()))) as reader,
    ):
        publish_weights(roles["trainer"], training.leader_term, 1, tmp_path, transport=origin)
        reading.weights.serve(reader)
        assert fetch_weights(reading, tmp_path).version == 1
    for role in ("feeder", "reward"):
        with pytest.raises(redis.exceptions.NoPermissionError):
            roles[role].connection.client.hgetall(KEYS.peers)


def test_trainer_and_generators_meet_for_a_broadcast_and_only_the_trainer_calls(roles: dict[str, Broker]) -> None:
    term = take_over(roles["trainer"]).leader_term
    trainer, generator = (RollCall(roles[role].connection, role) for role in ("trainer", "generator"))
    # Who was heard of once is waited for: the roll closes when it answers.
    assert generator.answer("v0-t1.safetensors", 0, ["gloo"], lambda: False) is None
    trainer.open(term, "v1-t1.safetensors", "gloo", 60.0)
    with ThreadPoolExecutor(1) as threads:
        answering = threads.submit(generator.answer, "v1-t1.safetensors", 0, ["gloo"], lambda: False)
        called = trainer.close(term, "v1-t1.safetensors", 0, 60.0)
        answered = answering.result(10)
    assert called is not None
    assert answered is not None
    assert (answered.communicator, answered.rank, answered.size) == (called.communicator, 1, 2)
    generator.tell(called.communicator, "0/1", b"address")
    assert trainer.find_note(called.communicator, "0/1", time.monotonic() + 5) == b"address"
    with pytest.raises(redis.exceptions.NoPermissionError):
        roles["reward"].connection.client.hgetall(KEYS.roll)
    with pytest.raises(ConfigError):
        generator.open(term, "v2-t1.safetensors", "gloo", 0.2)


def test_generators_may_all_that_their_work_asks(roles: dict[str, Broker]) -> None:
    training = take_over(roles["trainer"])
    for task_id in (0, 1):
        assert roles["feeder"].ledger.admit(make_task(task_id)).answer == "ok"
    dead, alive = roles["generator"].task_queue("dead"), roles["generator"].task_queue("alive")
    first, second = dead.read(10, 10)
    dead.renew_leases()
    assert dead.return_task(second, second.message)
    assert alive.find_missing(first.message) == [0, 1]
    assert {item.message.task_id for item in alive.claim_stale(0.0, 10) + alive.read(10, 10)} == {0, 1}
    alive.fail_sample(0, 0, "an impossible prompt")
    alive.publish_all([(0, [make_trajectory(0, 1)]), (1, [make_trajectory(1, 0), make_trajectory(1, 1)])])
    assert len(training.claim_scores(10)) == 1


def test_a_task_that_nobody_can_make_is_given_up_and_asked_for_again_by_the_operator(urls: dict[str, str]) -> None:
    open_client(urls["default"]).flushall()
    roles = {role: connect(url, max_deliveries=1) for role, url in urls.items()}
    take_over(roles["trainer"])
    roles["feeder"].ledger.admit(make_task(0))
    roles["generator"].task_queue("a").read(1, 10)
    for name in ("b", "c"):
        roles["generator"].task_queue(name).claim_stale(0.0, 10)
    (letter,) = roles["observer"].dead_letters.page(1000, None, newest=False)[0]
    assert roles["operator"].dead_letters.requeue(letter.id) == "ok"
    assert roles["feeder"].ledger.admit(make_task(0)).answer == "ok"


def test_images_are_stored_and_read_by_those_who_need_them(roles: dict[str, Broker]) -> None:
    training, image = take_over(roles["trainer"]), b"a picture"
    name = digest(image)
    task = Task(
        task_id=0,
        kind="train",
        n=2,
        sampling=Sampling(),
        messages=[ChatMessage("user", [ContentPart("image")])],
        images=[Image(name, 28, 28, len(image))],
    )
    assert roles["feeder"].ledger.admit_all([task], images={name: image}).answer == "ok"
    for role in ("generator", "trainer"):
        assert roles[role].images.fetch([name]) == {name: image}
    seen = {digest(b"seen"): b"seen"}
    roles["generator"].task_queue("g").keep_images(0, seen)
    assert roles["trainer"].images.fetch(seen) == seen
    assert training.drop_group(0, "stale", [])
    assert roles["trainer"].images.fetch([name, *seen]) == {}
    held_out = msgspec.structs.replace(task, task_id=eval_task_id(0, 0), kind="eval")
    assert roles["feeder"].evals.open(0, [held_out], images={name: image})
    assert roles["generator"].images.fetch([name]) == {name: image}


def test_rewards_may_all_that_their_work_asks(roles: dict[str, Broker], urls: dict[str, str]) -> None:
    training = take_over(roles["trainer"])
    roles["feeder"].ledger.admit(make_task(0))
    evaluation = [make_task(eval_task_id(0, 0), n=2, kind="eval")]
    assert roles["feeder"].evals.open(0, evaluation)
    for item in roles["generator"].task_queue("g").read(10, 10):
        kind, number = item.message.kind, item.message.task_id
        roles["generator"].task_queue("g").publish(number, [make_trajectory(number, i, kind=kind) for i in range(2)])
    open_client(urls["default"]).xadd(KEYS.trajectories, {"hello": "world"})
    dead, alive = roles["reward"].score_queue("dead"), roles["reward"].score_queue("alive")
    dead.read(10, 10)
    dead.renew_leases()
    items = alive.claim_stale(0.0, 10)
    assert len(items) == 4
    scores = [Score(reward=1.0), Score(status="error", reason="no")] * 2
    assert alive.publish(list(zip(items, scores, strict=True))) == ["ok"] * 4
    assert [result.complete for result in roles["trainer"].evals.read_results()] == [True]
    assert len(training.claim_scores(10)) == 2
    assert roles["observer"].ledger.read_state().dead_letters == 3


def test_the_trainer_ends_groups_and_takes_over_from_another(roles: dict[str, Broker]) -> None:
    training = take_over(roles["trainer"])
    roles["feeder"].ledger.admit(make_task(0))
    roles["generator"].task_queue("g").publish(0, [make_trajectory(0, 0), make_trajectory(0, 1)])
    rewards = roles["reward"].score_queue("r")
    rewards.publish([(item, Score(reward=1.0)) for item in rewards.read(10, 10)])
    claim_batch(training)
    training = take_over(roles["trainer"], fresh=False)
    outcomes = training.claim_scores(10)
    assert training.drop_group(0, "stale", [outcome.scored_id for outcome in outcomes])
    training.discard_scores(outcomes)
    position = roles["trainer"].ledger.change_position()
    roles["trainer"].ledger.wait_change(position, 1)
    training.finish_run()
    assert roles["feeder"].ledger.read_state().balanced


def test_the_operator_steers_lists_and_deletes_a_run(roles: dict[str, Broker]) -> None:
    take_over(roles["trainer"])
    operator = roles["operator"]
    operator.run_control.pause("freeze", "t")
    assert operator.ledger.change_settings({"staleness": 3})
    assert [run.name for run in list_runs(operator.connection.client)] == ["mine"]
    assert operator.purge() > 0


WRITES: Mapping[str, tuple[object, ...]] = {
    "string": ("SET", "x"),
    "hash": ("HSET", "f", "x"),
    "stream": ("XADD", "*", "f", "x"),
    "sorted set": ("ZADD", "1", "x"),
    "deletion": ("DEL",),
    "quiet deletion": ("UNLINK",),
    "field deletion": ("HDEL", "f"),
    "expiry": ("EXPIRE", "1"),
    "restore": ("RESTORE", "0", "x"),
    "acknowledgement": ("XACK", "trainer", "1-1"),
}
FORBIDDEN = {
    "feeder": (*TRAINERS, "run_control", "recent", "weights", "chunks", "scored", "trajectories"),
    "generator": (*TRAINERS, "ctl", "run_control", "recent", "weights", "chunks", "readmit"),
    "reward": (
        *TRAINERS,
        "ctl",
        "run_control",
        "recent",
        "weights",
        "chunks",
        "tasks",
        "slots",
        "readmit",
        "failed",
        "events",
    ),
    "operator": (*TRAINERS, "weights", "chunks", "tasks", "trajectories", "scored"),
    "observer": tuple(name for name in vars(KEYS) if name != "base"),
}


@pytest.mark.parametrize("role", FORBIDDEN)
def test_a_role_cannot_write_what_is_not_its_own(roles: dict[str, Broker], role: str) -> None:
    client: Any = roles[role].connection.client
    for name in FORBIDDEN[role]:
        for command, *rest in WRITES.values():
            if role == "operator" and command == "UNLINK":
                continue  # A purge deletes whole keys.
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.execute_command(str(command), KEYS.named([name])[0], *rest)
        if role != "observer":
            # Commands of a user's own script are checked like any others.
            sha = client.script_load(f"return redis.call('HSET', '{KEYS.named([name])[0]}', 'f', 'x')")
            with pytest.raises(redis.exceptions.ResponseError, match=r"(?i)permission|can't"):
                client.evalsha(sha, 0)
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.evalsha(sha, 1, KEYS.named([name])[0])


def test_generators_and_rewards_cannot_even_read_the_journal_and_control(roles: dict[str, Broker]) -> None:
    for role in ("generator", "reward"):
        client: Any = roles[role].connection.client
        for key in (KEYS.journal, KEYS.ctl, KEYS.leader_term):
            for command in ("HGETALL", "GET", "EXISTS", "DUMP"):
                with pytest.raises(redis.exceptions.NoPermissionError):
                    client.execute_command(command, key)


CALLS: Mapping[str, Callable[[Broker], object]] = {
    "admit": lambda broker: broker.ledger.admit(make_task(0)),
    "take_over": take_over,
    "weights": lambda broker: broker.connection.run_script("add_version", "1-x", 9, b"x"),
    "score": lambda broker: broker.score_queue("x").read(1, 1),
    "generate": lambda broker: broker.task_queue("x").read(1, 1),
    "metrics": lambda broker: broker.metrics.append({}),
    "change": lambda broker: broker.ledger.change_settings({"batch": 9}),
    "purge": lambda broker: broker.purge(),
    "event": lambda broker: broker.events.emit(Event(name="x", service="x")),
}
ALLOWED = {
    "feeder": {"admit", "event", "metrics"},
    "generator": {"generate", "event", "metrics"},
    "reward": {"score"},
    "observer": set(),
    "operator": {"change", "purge", "event", "metrics"},
}


@pytest.mark.parametrize("role", ALLOWED)
def test_the_work_of_another_role_is_refused_in_one_line_at_once(roles: dict[str, Broker], role: str) -> None:
    take_over(roles["trainer"])
    for name, call in CALLS.items():
        if name not in ALLOWED[role]:
            with pytest.raises(ConfigError, match="refuses") as refused:
                call(roles[role])
            assert "\n" not in str(refused.value)


@pytest.mark.parametrize("role", acl.ROLES)
def test_another_run_is_out_of_reach(roles: dict[str, Broker], urls: dict[str, str], role: str) -> None:
    client: Any = roles[role].connection.client
    for name, key in vars(OTHER).items():
        if name != "base":
            for command, *rest in (*WRITES.values(), ("TYPE",), ("DUMP",), ("HGETALL",), ("GET",), ("EXISTS",)):
                with pytest.raises(redis.exceptions.NoPermissionError):
                    client.execute_command(str(command), key, *rest)
    for script in ("heartbeat", "journal_batch", "set_run_state", "publish_samples"):
        with pytest.raises(ConfigError, match="refuses"):
            connect(urls[role], OTHER).connection.run_script(script, "x", "y", "z", "0")
    with pytest.raises(ConfigError, match="refuses"):
        connect(urls[role], OTHER).ledger.set_run_state("paused", 1)


@pytest.mark.parametrize("role", acl.ROLES)
def test_nobody_may_administer_the_server(roles: dict[str, Broker], urls: dict[str, str], role: str) -> None:
    client: Any = roles[role].connection.client
    for words in (
        "FLUSHALL", "FLUSHDB", "KEYS *", "CONFIG GET *", "ACL LIST", "SHUTDOWN NOSAVE", "MONITOR",
        "CLIENT LIST", "SCRIPT FLUSH", "SUBSCRIBE x", "PUBLISH x y", "REPLICAOF NO ONE", "SAVE", "SWAPDB 0 1",
        "FUNCTION LIST", "MODULE LIST", "SCRIPT KILL",
    ):  # fmt: skip
        with pytest.raises(redis.exceptions.NoPermissionError):
            client.execute_command(*words.split())
    with pytest.raises(redis.exceptions.NoPermissionError):
        client.eval("return 1", 0)
    listed: Any = open_client(urls["default"]).acl_cat("dangerous")
    dangerous = {name.decode() if isinstance(name, bytes) else name for name in listed}
    assert {"info", "flushall", "config|get", "debug"} <= dangerous
    granted = {rule.lstrip("(").removeprefix("+") for rule in acl.rules(role, KEYS) if "+" in rule}
    assert granted & dangerous <= {"info"}


def test_a_wrong_password_is_refused_at_once_and_not_repeated_in_the_message(urls: dict[str, str]) -> None:
    url = re.sub(r":[^:@]*@", ":secret@", urls["trainer"])
    with pytest.raises(ConfigError, match="refuses") as refused:
        connect(url).ledger.read_state()
    assert "secret" not in str(refused.value)


def test_every_script_is_some_roles() -> None:
    assert {name for role in acl.ROLES.values() for name in role.scripts.split()} == set(names())


def test_lines_for_the_server_hold_no_password() -> None:
    passwords = acl.new_passwords()
    assert set(passwords) == set(acl.ROLES)
    text = "\n".join(acl.acl_lines(KEYS, passwords))
    assert not any(password in text for password in passwords.values())


def test_users_of_two_runs_never_have_one_name() -> None:
    pairs = [("x", "a-b"), ("x-a", "b"), ("x", "a_b"), ("x.a", "b"), ("x", "a")]
    assert len({acl.user(role, Keys(*pair)) for pair in pairs for role in acl.ROLES}) == len(pairs) * len(acl.ROLES)


def test_the_lines_are_an_aclfile_too(tmp_path: Path) -> None:
    lines = acl.acl_file_lines(KEYS, {"trainer": "t", "operator": "o"}, "a")
    file = tmp_path / "users.acl"
    file.write_text("".join(f"{line}\n" for line in lines))
    server = EmbeddedServer(tmp_path)
    server.prepare()
    command = [*server.command(), "--aclfile", str(file)]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        wait_ready(f"unix://default:a@{server.socket}", 30)
        take_over(connect(f"unix://{acl.user('trainer', KEYS)}:t@{server.socket}"))
        assert connect(f"unix://{acl.user('operator', KEYS)}:o@{server.socket}").purge() > 0
    finally:
        process.terminate()
        process.wait(10)


def test_an_oversized_message_is_refused_by_its_sender_and_by_its_reader(urls: dict[str, str]) -> None:
    open_client(urls["default"]).flushall()
    small, large = connect(urls["default"], max_message_bytes=1024), connect(urls["default"])
    take_over(large)
    big = make_task(0)
    big.text = "x" * 2000
    assert small.ledger.admit(big).answer == "ok"
    assert large.task_queue("g").read(10, 10) == []
    assert large.ledger.read_state().failed == {"dead_letter": 1}
    big.task_id = 1
    assert large.ledger.admit(big).answer == "ok"
    assert small.task_queue("g").read(10, 10) == []
    assert large.ledger.read_state().failed == {"dead_letter": 2}
    assert all(
        "over the limit of 1024" in filed.letter.reason
        for filed in large.dead_letters.page(1000, None, newest=False)[0]
    )


def test_nothing_in_the_tree_unpickles() -> None:
    reads = re.compile(
        r"^\s*(import|from) (pickle|dill|cloudpickle|shelve|marshal)\b|\bpickle\.loads?\(|allow_pickle=True"
        r"|weights_only=False|\byaml\.(unsafe_)?load\("
    )
    # It reads parts of checkpoints, by an unpickler that knows a dozen names of PyTorch's; store.py names its error.
    checked = [ROOT / f"consumers/trainer/checkpoint/{name}.py" for name in ("reader", "store")]
    for package in ("schemas", "broker", "producers", "consumers", "deploy", "examples"):
        for file in (ROOT / package).rglob("*.py"):
            found = [line for line in file.read_text(encoding="utf-8").splitlines() if reads.search(line)]
            assert not found or (file in checked and found == ["import pickle"]), f"{file}: {found}"


def test_every_role_may_do_with_statistics_of_prompts_what_it_has_to(roles: dict[str, Broker]) -> None:
    training = take_over(roles["trainer"])
    assert roles["feeder"].ledger.read_prompts([0]) == [b""]
    roles["feeder"].ledger.admit_all([make_task(0), SkippedTask(1)], prompts={0: 0})
    training.drop_group(0, "test", [], "dropped", 0.5)
    assert training.read_prompts() == bytes([128, 1, 0, 0]) == roles["feeder"].ledger.read_prompts([0])[0]
