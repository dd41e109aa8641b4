"""Two runs of one name, or one that another version of Tidemill wrote: refused in one line, and harmless."""

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import structlog
from typer.testing import CliRunner

from broker.client import Broker
from broker.connection.embedded import EmbeddedServer
from broker.flow.owner import Owner
from broker.queues.tasks import eval_task_id
from broker.telemetry.stream_lag import read_stream_lags
from consumers.reward.scorer import Scorer
from consumers.reward.service import RewardService
from deploy.cli.app import app
from deploy.services.finished_run import FinishedRunWatch
from producers.datasets.arithmetic import Arithmetic
from producers.datasets.mixture import DatasetPart, Mixture
from producers.engines.base import Engine
from producers.feeder import Feeder
from producers.generator.orders import OrderFollower
from schemas.codec import SCHEMA_VERSION
from schemas.config import RewardConfig, RewardTerm, TidemillConfig
from schemas.errors import ConfigError, InfraError
from schemas.messages import Score
from schemas.run_record import JoinedRun, claim_folder
from schemas.system.lifecycle import StopFlag
from tests.support.broker.leadership import configuration_in, leadership_in
from tests.support.broker.prompt_groups import claim_batch, generate_and_score, make_task, make_trajectory, train_record
from tests.support.broker.trainer_sessions import FIRST, change_request, take_over, take_over_as

OURS, OTHER = Owner("ours", "/runs/a", "here"), Owner("other", "/runs/b", "there")


def train_one(broker: Broker) -> None:
    training, _ = take_over_as(broker, change_request(FIRST, owner=OURS))
    broker.ledger.admit(make_task(0))
    generate_and_score(broker, 0, (Score(reward=1.0), Score(reward=0.0)))
    train_record(training, claim_batch(training))


def test_a_trainer_of_another_run_is_refused_whatever_the_journal_holds(broker: Broker) -> None:
    train_one(broker)
    before = broker.ledger.read_state()
    for other in (
        change_request(FIRST, owner=OTHER),
        change_request(FIRST, owner=OTHER, fresh=False, leader_term_floor=7),
    ):
        with pytest.raises(ConfigError, match=r"by the run in /runs/a on here since 20.*run\.name.*tidemill purge"):
            take_over_as(broker, other)
    assert broker.ledger.read_state() == before, "nothing changed, the journal is whole and the first trainer leads"
    _, again = take_over_as(broker, change_request(FIRST, owner=OURS, fresh=False, leader_term_floor=1))
    assert not again.lost
    assert again.step == 1


def test_a_name_is_taken_before_any_service_starts_and_found_by_its_owner_only(broker: Broker) -> None:
    broker.owner.claim(OURS)
    with pytest.raises(ConfigError, match="by the run in /runs/a on here"):
        broker.owner.claim(OTHER)
    broker.owner.claim(OURS)
    owner = broker.owner.read()
    assert owner is not None
    assert (owner.id, owner.folder, owner.since > 0) == ("ours", "/runs/a", True)
    with pytest.raises(ConfigError):
        take_over_as(broker, change_request(FIRST, owner=OTHER))
    _, taken = take_over_as(broker, change_request(FIRST, owner=OURS))
    assert not taken.lost, "a name that is taken is no run that was lost"


def test_a_broker_that_forgot_everything_learns_whose_run_it_is_from_the_trainer(broker: Broker) -> None:
    take_over_as(broker, change_request(FIRST, owner=OURS))
    broker.purge()
    take_over_as(broker, change_request(FIRST, owner=OURS, fresh=False))
    assert broker.ledger.read_state().run_id == "ours"
    orders = broker.run_control.read()
    assert orders is not None
    assert orders.run_id == "ours"
    broker.purge()
    take_over_as(broker, change_request(FIRST, owner=OTHER))
    with pytest.raises(ConfigError):
        take_over_as(broker, change_request(FIRST, owner=OURS, fresh=False))


def test_a_new_attempt_does_not_show_how_the_last_one_ended(broker: Broker) -> None:
    train_one(broker)
    broker.ledger.set_run_state("state", "failed")
    broker.ledger.set_run_state("cause", "trainer failed")
    broker.owner.claim(OURS)
    state = broker.ledger.read_state()
    assert (state.state, state.cause, state.step) == ("starting", "", 1)


def test_checkpoints_of_another_run_are_not_gone_on_with(broker: Broker, tmp_path: Path) -> None:
    leadership = leadership_in(tmp_path, broker)
    leadership.restore(from_checkpoint=False)
    leadership.take_over(saved=0)
    record = claim_folder(configuration_in(tmp_path))
    assert broker.ledger.read_state().run_id == record.id
    copied = leadership_in(tmp_path, broker, run_id="another")
    with pytest.raises(ConfigError, match=r"are of another run than .*RUN\.json"):
        copied.restore(from_checkpoint=True)


def test_a_feeder_of_another_runs_folder_admits_nothing(broker: Broker, tmp_path: Path) -> None:
    take_over_as(broker, change_request(FIRST, owner=OURS))
    config = configuration_in(tmp_path)
    claim_folder(config)
    with pytest.raises(ConfigError, match="another run of this name"):
        Feeder(config, broker, Mixture([DatasetPart("arithmetic", [Arithmetic()])]), []).run(StopFlag())
    assert broker.ledger.read_state().admitted == 0


async def test_a_generator_ends_when_the_run_that_it_works_for_is_replaced(broker: Broker, tmp_path: Path) -> None:
    engine = cast(Engine, SimpleNamespace())
    follower = OrderFollower(broker, engine, run=JoinedRun(tmp_path / "elsewhere"))

    take_over_as(broker, change_request(FIRST, owner=OURS))
    await follower.follow(broker.run_control.read())
    broker.purge()
    await follower.follow(broker.run_control.read())
    take_over_as(broker, change_request(FIRST, owner=OURS, fresh=False))
    await follower.follow(broker.run_control.read())
    broker.purge()
    take_over_as(broker, change_request(FIRST, owner=OTHER))
    with pytest.raises(InfraError, match="another run of this name"):
        await follower.follow(broker.run_control.read())


async def test_a_generator_in_another_runs_folder_is_refused(broker: Broker, tmp_path: Path) -> None:
    claim_folder(configuration_in(tmp_path))
    take_over_as(broker, change_request(FIRST, owner=OURS))
    follower = OrderFollower(broker, cast(Engine, SimpleNamespace()), run=JoinedRun(tmp_path))
    with pytest.raises(ConfigError, match=r"RUN\.json"):
        await follower.follow(broker.run_control.read())


def test_a_reward_service_scores_nothing_of_another_run(broker: Broker, tmp_path: Path) -> None:
    claim_folder(configuration_in(tmp_path))
    take_over_as(broker, change_request(FIRST, owner=OURS))
    broker.ledger.admit(make_task(0))
    broker.task_queue("g").read(1, 10)
    broker.task_queue("g").publish(0, [make_trajectory(0, 0)])
    scorer = Scorer(RewardConfig(terms=[RewardTerm(name="exact")], workers=1, timeout_s=5), tmp_path)
    joined = JoinedRun(tmp_path)
    service = RewardService(
        broker.score_queue("r"), scorer, {}, 30, check=lambda: joined.check(*broker.run_control.read_run())
    )
    with pytest.raises(ConfigError, match="another run of this name"):
        asyncio.run(service.run(StopFlag()))
    assert [entry.waiting for entry in read_stream_lags(broker.connection) if entry.name == "trajectories"] == [1]


def test_another_run_of_the_name_that_is_finished_sends_no_service_home(
    make_broker: Callable[..., Broker], server: EmbeddedServer, tmp_path: Path
) -> None:
    broker = make_broker("other-finished")
    plain = configuration_in(tmp_path)
    config = plain.model_copy(
        update={
            "run": plain.run.model_copy(update={"name": "other-finished"}),
            "broker": plain.broker.model_copy(update={"url": server.url}),
        }
    )
    record = claim_folder(config)
    steps = config.trainer.steps
    training, _ = take_over_as(broker, change_request(FIRST, owner=OTHER, steps=steps))
    training.finish_run()
    broker.connection.client.hset(broker.connection.keys.run_control, "finished", steps)
    assert not FinishedRunWatch(config).finished_before()
    broker.connection.client.hset(broker.connection.keys.run_control, "run_id", record.id)
    assert FinishedRunWatch(config).finished_before()


def joined_run(folder: Path, id: str) -> JoinedRun:
    """The run of a service that has met it at the broker."""
    run = JoinedRun(folder / "elsewhere")
    run.check(id)
    return run


def replace_run(broker: Broker) -> None:
    """Purge the first run while its services live; the next one of the name begins with the same task ids."""
    broker.purge()
    take_over_as(broker, change_request(FIRST, owner=OTHER))


def test_samples_of_a_purged_run_do_not_get_into_the_next_one_of_its_name(broker: Broker, tmp_path: Path) -> None:
    take_over_as(broker, change_request(FIRST, owner=OURS))
    broker.ledger.admit(make_task(0))
    old = broker.task_queue("old", joined_run(tmp_path, "ours"))
    assert old.publish(0, [make_trajectory(0, 0)]) == ["ok"]
    replace_run(broker)
    broker.ledger.admit(make_task(0))
    with pytest.raises(InfraError, match="another run of this name"):
        old.publish(0, [make_trajectory(0, 1)])
    with pytest.raises(InfraError, match="another run of this name"):
        old.fail_sample(0, 1, "too long")
    assert broker.ledger.read_state().samples_published == 0
    assert broker.ledger.read_state().dead_letters == 0
    new = broker.task_queue("new", joined_run(tmp_path, "other"))
    assert new.publish(0, [make_trajectory(0, 1)]) == ["ok"]
    new.fail_sample(0, 0, "too long")
    assert broker.ledger.read_state().dead_letters == 1


def test_a_feeder_of_a_purged_run_admits_nothing_into_the_next_one_of_its_name(broker: Broker, tmp_path: Path) -> None:
    old, new = joined_run(tmp_path, "ours"), joined_run(tmp_path, "other")
    take_over_as(broker, change_request(FIRST, owner=OURS))
    replace_run(broker)
    evaluation = [make_task(eval_task_id(0, 0), kind="eval")]
    with pytest.raises(InfraError, match="another run of this name"):
        broker.ledger.admit_all([make_task(0)], old)
    with pytest.raises(InfraError, match="another run of this name"):
        broker.evals.open(0, evaluation, old)
    assert broker.ledger.read_state().admitted == 0
    assert broker.evals.read_results() == []
    assert broker.ledger.admit_all([make_task(0)], new).answer == "ok"
    assert broker.evals.open(0, evaluation, new)


def test_scores_of_a_purged_run_do_not_get_into_the_next_one_of_its_name(broker: Broker) -> None:
    take_over_as(broker, change_request(FIRST, owner=OURS))
    broker.ledger.admit(make_task(0))
    broker.task_queue("g").publish(0, [make_trajectory(0, 0)])
    old = broker.score_queue("r")
    deliveries = old.read(1, 10)
    replace_run(broker)
    broker.ledger.admit(make_task(0))
    broker.task_queue("g").publish(0, [make_trajectory(0, 0)])
    assert old.publish([(delivery, Score(reward=1.0)) for delivery in deliveries]) == ["dup"]
    assert [entry.waiting for entry in read_stream_lags(broker.connection) if entry.name == "trajectories"] == [1]


def feed_once(broker: Broker, config: TidemillConfig) -> None:
    class Once(StopFlag):
        def __bool__(self) -> bool:
            return broker.ledger.read_state().admitted > 0

    Feeder(config, broker, Mixture([DatasetPart("arithmetic", [Arithmetic()])]), []).run(Once())


async def follow_once(broker: Broker, folder: Path) -> None:
    follower = OrderFollower(broker, cast(Engine, SimpleNamespace()), run=JoinedRun(folder))
    await follower.follow(broker.run_control.read())
    await follower.follow(broker.run_control.read())


def test_services_in_a_folder_that_is_no_runs_say_once_whose_run_they_work_for(broker: Broker, tmp_path: Path) -> None:
    take_over_as(broker, change_request(FIRST, owner=OURS))
    config = configuration_in(tmp_path)
    joined = JoinedRun(config.folder)
    for service in (
        lambda: feed_once(broker, config),
        lambda: asyncio.run(follow_once(broker, config.folder)),
        lambda: [joined.check(*broker.run_control.read_run()) for _ in range(2)],
    ):
        with structlog.testing.capture_logs() as lines:
            service()
        (line,) = (line for line in lines if "joins the run" in line["event"])
        assert line["run_id"] == "ours"
        assert line["since"].startswith("20")
    claim_folder(config)
    with structlog.testing.capture_logs() as lines:
        JoinedRun(config.folder).check(claim_folder(config).id)
    assert lines == []


def config_of(run: str, server: EmbeddedServer) -> TidemillConfig:
    return TidemillConfig.model_validate(
        {
            "run": {"name": run},
            "model": {"path": "model"},
            "train": {"name": "arithmetic"},
            "reward": {"terms": [{"name": "exact"}]},
            "broker": {"url": server.url},
        }
    )


def as_of_schema_one(broker: Broker) -> None:
    """What a server holds that was last written before there was a ``schema`` field."""
    client, keys = broker.connection.client, broker.connection.keys
    client.hset(keys.ctl, mapping={"step": 3, "epoch": 2, "state": "running", "lineage": "start"})
    client.hset(keys.services, "trainer", b"\x82\xa4type\xa9heartbeat\xa6schema\x01")


def test_a_run_of_an_older_version_is_only_purged(make_broker: Callable[..., Broker], server: EmbeddedServer) -> None:
    as_of_schema_one(make_broker("oldrun"))
    config = config_of("oldrun", server)
    expected = (
        f"run 'oldrun' was written by an older Tidemill (schema 1, this one reads {SCHEMA_VERSION}): finish it with"
        " that version, or delete it: `tidemill purge oldrun`"
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(expected)}") as refusal:
        Broker.connect(config)
    assert "\n" not in str(refusal.value)
    runner = CliRunner()
    looked = runner.invoke(app, ["status", "oldrun", "--url", server.url])
    assert looked.exit_code != 0
    assert make_broker("oldrun").connection.client.hget(make_broker("oldrun").connection.keys.ctl, "step") == b"3"
    purged = runner.invoke(app, ["purge", "oldrun", "--url", server.url, "--yes"])
    assert (purged.exit_code, purged.stdout.strip()) == (0, "deleted 2 keys of run oldrun")
    assert Broker.connect(config).measure_memory() == 0


@pytest.mark.parametrize("schema", [SCHEMA_VERSION + 1, 1])
def test_a_takeover_writes_the_schema(make_broker: Callable[..., Broker], server: EmbeddedServer, schema: int) -> None:
    run = f"schema-{schema}"
    broker = make_broker(run)
    take_over(broker)
    client: Any = Broker.connect(config_of(run, server)).connection.client
    client.hset(broker.connection.keys.ctl, "schema", schema)
    with pytest.raises(ConfigError, match=f"schema {schema}, this one reads {SCHEMA_VERSION}"):
        Broker.connect(config_of(run, server))
    assert Broker.connect(config_of(run, server), any_schema=True).purge() > 0


def test_foreign_control_state_is_for_the_trainer(make_broker: Callable[..., Broker], server: EmbeddedServer) -> None:
    broker = make_broker("odd")
    broker.connection.client.set(broker.connection.keys.ctl, "x")
    assert Broker.connect(config_of("odd", server))
    broker.purge()
