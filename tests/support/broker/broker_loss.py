"""A broker that forgets: one group trained before, what a checkpoint of that moment holds, and the loss itself."""

from broker.client import Broker
from broker.flow.progress import TakeoverRequest
from broker.flow.trainer_session import TrainerSession
from schemas.messages import Score
from tests.support.broker.prompt_groups import claim_batch, generate_and_score, make_task
from tests.support.broker.trainer_sessions import FIRST, change_request


def train_one(broker: Broker, training: TrainerSession, task_id: int) -> None:
    """One group through all hops, trained but not yet covered by a checkpoint."""
    assert broker.ledger.admit(make_task(task_id)).answer == "ok"
    generate_and_score(broker, task_id, (Score(reward=1.0), Score(reward=0.0)))
    record = claim_batch(training, step=training.read_pipeline().step)
    training.journal_batch(record)
    training.complete_step(record)


def checkpoint(training: TrainerSession, broker_lifetime: str = "start") -> TakeoverRequest:
    """What a checkpoint of this moment would hold."""
    look = training.read_pipeline()
    return change_request(
        FIRST,
        fresh=False,
        broker_lifetime=broker_lifetime,
        step=look.step,
        saved=look.step,
        version=look.step,
        version_if_lost=look.step,
        cursor=look.cursor,
        unfinished=look.unfinished,
        trained=look.step,
        samples=look.counts.get("samples_trained", 0),
        counts=look.counts,
        leader_term_floor=1,
    )


def wipe(broker: Broker) -> None:
    assert broker.purge() > 0


def training_lifetime(broker: Broker) -> str:
    return str(broker.connection.client.hget(broker.connection.keys.ctl, "broker_lifetime").decode())
