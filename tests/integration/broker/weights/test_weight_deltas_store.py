"""Versions as deltas, from a trainer's file to a generator's: bit for bit, bounded, and whole again after any loss."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from broker.client import Broker
from broker.flow.trainer_session import TrainerSession
from broker.weights.local_copy import LocalWeights
from broker.weights.peers.node import PeerNode
from broker.weights.transports import PeerReader
from schemas.config.publish import PeerConfig
from schemas.errors import InfraError
from schemas.messages import Manifest, Payload, TensorSpec
from tests.support.broker.trainer_sessions import take_over
from tests.support.models.changing_weights import ChangingWeights

pytestmark = pytest.mark.parametrize("kind", ["file", "redis", "peer"])


@pytest.fixture
def takeover(broker: Broker) -> TrainerSession:
    return take_over(broker)


@pytest.fixture
def make_trainer(broker: Broker, tmp_path: Path, kind: str) -> Iterator[Callable[[TrainerSession], ChangingWeights]]:
    with contextlib.ExitStack() as stack:
        yield lambda session: stack.enter_context(
            contextlib.closing(ChangingWeights(broker, tmp_path, kind, session.leader_term))
        )


@pytest.fixture
def trainer(takeover: TrainerSession, make_trainer: Callable[[TrainerSession], ChangingWeights]) -> ChangingWeights:
    return make_trainer(takeover)


@pytest.fixture
def reading(make_broker: Callable[..., Broker], broker: Broker) -> Broker:
    """The broker as another process has it, which serves nothing."""
    return make_broker(broker.connection.keys.run)


@pytest.fixture
def generator(reading: Broker, tmp_path: Path, kind: str) -> Iterator[LocalWeights]:
    if kind != "peer":
        yield LocalWeights(reading.weights, tmp_path / "in")
        return
    with contextlib.closing(PeerReader(reading.connection, PeerNode(reading.connection, "g", PeerConfig()))) as reader:
        reading.weights.serve(reader)
        yield LocalWeights(reading.weights, tmp_path / "in")


def payloads(manifest: Manifest) -> list[Payload]:
    return [manifest.state, *([manifest.delta.payload] if manifest.delta else [])]


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("*")}


@pytest.fixture(autouse=True)
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Abandon what no peer has sooner."""
    monkeypatch.setattr("broker.weights.peers.download.STALL_S", 0.5)


def spoil(broker: Broker, manifest: Manifest, form: str) -> Callable[[bool], None]:
    """Damage or remove the one chunk of a version's whole state or delta, where the trainer has it."""
    payload = manifest.state if form == "whole" else manifest.delta.payload if manifest.delta else None
    assert payload is not None
    kind, _, place = payload.uri.partition(":")

    def act(missing: bool) -> None:
        client, chunks = broker.connection.client, broker.connection.keys.chunks
        if kind == "peer":
            origin = broker.weights._origin
            assert origin is not None
            path = origin._path(payload.uri)
            if missing:
                origin.node.remove(path.name)
                path.unlink()
            else:
                with path.open("r+b") as stream:
                    stream.write(b"x" * payload.size)
        elif kind == "file":
            Path(place).unlink()
            if not missing:
                Path(place).write_bytes(b"x" * payload.size)
        elif missing:
            client.hdel(chunks, f"{place}:0")
        else:
            client.hset(chunks, f"{place}:0", b"x" * payload.size)

    return act


def forms(manifests: Sequence[Manifest]) -> str:
    """w: whole, d: delta, b: both."""
    return "".join("b" if m.whole and m.delta else "w" if m.whole else "d" for m in manifests)


def test_every_version_arrives_bit_for_bit_and_a_newcomer_applies_a_bounded_chain(
    broker: Broker, trainer: ChangingWeights, generator: LocalWeights, tmp_path: Path, kind: str
) -> None:
    seen = []
    for version in range(1, 12):
        seen.append(trainer.publish(version))
        assert trainer.is_at(generator.fetch(seen[-1]))
        newcomer = LocalWeights(broker.weights, tmp_path / f"in{version}")
        assert trainer.is_at(newcomer.fetch(seen[-1])), version
    assert forms(seen) == "wdddbdddbdd"
    assert all(m.delta.payload.size < m.state.size / 20 for m in seen if m.delta)


def test_versions_in_between_are_skipped_and_the_copy_goes_on_from_where_it_was(
    broker: Broker, trainer: ChangingWeights, generator: LocalWeights, kind: str
) -> None:
    for version in (1, 2):
        generator.fetch(trainer.publish(version))
    trainer.publish(3)
    newest = trainer.publish(5)
    spoil(broker, broker.weights.published()[0], "whole")(True)
    assert trainer.is_at(generator.fetch(newest)), "needs nothing but the deltas"


def test_what_is_kept_is_bounded(
    broker: Broker, trainer: ChangingWeights, generator: LocalWeights, tmp_path: Path, kind: str
) -> None:
    for version in range(1, 30):
        generator.fetch(trainer.publish(version))
        published = broker.weights.published()
        assert len(published) <= 2 + 3, "keep and max_chain"
        assert sum(manifest.whole for manifest in published) <= 2
        held = (
            broker.connection.client.hlen(broker.connection.keys.chunks)
            if kind == "redis"
            else len(files(tmp_path / "out")) - 1
        )
        assert held == sum(m.whole + (m.delta is not None) for m in published)
        assert files(tmp_path / "in") <= {"state.safetensors", "whole", "shared"}


def test_a_change_of_everything_travels_whole_and_small_ones_are_deltas_again_later(
    trainer: ChangingWeights, generator: LocalWeights, kind: str
) -> None:
    seen = []
    for version in range(1, 12):
        seen.append(trainer.publish(version, changed=4000 if version == 3 else 9))
        assert trainer.is_at(generator.fetch(seen[-1]))
    assert forms(seen) == "wdwwwwddddb"[:2] + forms(seen)[2:]
    assert forms(seen).startswith("wdwwww"), "what did not pay is not tried again at once"
    assert "d" in forms(seen)[6:]


@pytest.mark.parametrize("missing", [False, True])
def test_a_delta_that_is_damaged_or_gone_costs_a_whole_fetch_where_there_is_one(
    broker: Broker, trainer: ChangingWeights, generator: LocalWeights, kind: str, missing: bool
) -> None:
    generator.fetch(trainer.publish(1))
    for version in (2, 3, 4):
        trainer.publish(version)
    both = trainer.publish(5)
    assert forms([both]) == "b"
    spoil(broker, both, "delta")(missing)
    assert trainer.is_at(generator.fetch(both))
    assert trainer.is_at(generator.fetch(trainer.publish(6)))


@pytest.mark.parametrize("missing", [False, True])
def test_a_delta_that_nothing_replaces_is_an_error_until_the_trainer_puts_the_version_back(
    broker: Broker, trainer: ChangingWeights, generator: LocalWeights, tmp_path: Path, kind: str, missing: bool
) -> None:
    generator.fetch(trainer.publish(1))
    delta = trainer.publish(2)
    spoil(broker, delta, "delta")(missing)
    with pytest.raises(InfraError, match=r"gone|damaged|cannot be read"):
        generator.fetch(delta)
    assert not broker.weights.holds(delta)
    trainer.offer(2)
    assert broker.weights.holds(delta)
    assert trainer.is_at(generator.fetch(delta))
    newest = trainer.publish(3)
    assert newest.whole, "no newcomer shall need the damaged one"
    assert trainer.is_at(LocalWeights(broker.weights, tmp_path / "late").fetch(newest))


def test_a_version_that_the_broker_lost_is_put_back_whole(
    broker: Broker, trainer: ChangingWeights, generator: LocalWeights, kind: str
) -> None:
    trainer.publish(1)
    newest = trainer.publish(2)
    for manifest in broker.weights.published():
        spoil(broker, manifest, "whole" if manifest.whole else "delta")(True)
    assert not broker.weights.holds(newest)
    trainer.offer(2)
    assert broker.weights.holds(newest)
    assert trainer.is_at(generator.fetch(newest))
    assert trainer.publish(3).whole, "its chain was lost"
    newcomer = generator.fetch(broker.weights.published()[-1])
    assert trainer.is_at(newcomer)


def test_a_copy_that_was_changed_behind_our_back_is_noticed_and_made_anew(
    trainer: ChangingWeights, generator: LocalWeights, tmp_path: Path, kind: str
) -> None:
    generator.fetch(trainer.publish(1))
    path = generator.fetch(trainer.publish(2))
    assert path.parent == tmp_path / "in"
    state = np.memmap(path, np.uint8, mode="r+")
    state[-1] ^= 1
    assert trainer.is_at(generator.fetch(trainer.publish(3)))


def test_a_restarted_trainer_publishes_whole_and_generators_go_on_from_it(
    broker: Broker,
    trainer: ChangingWeights,
    generator: LocalWeights,
    tmp_path: Path,
    make_trainer: Callable[[TrainerSession], ChangingWeights],
    kind: str,
) -> None:
    for version in (1, 2, 3):
        generator.fetch(trainer.publish(version))
    successor = make_trainer(take_over(broker, fresh=False))
    (tmp_path / "out" / "v9-t1.safetensors").write_bytes(b"its manifest never came")
    (tmp_path / "out" / ".part-9-t1.4711").write_bytes(b"half of one")
    seen = [successor.publish(version) for version in (4, 5)]
    assert forms(seen) == "wd"
    assert successor.is_at(generator.fetch(seen[-1]))
    mine = {str(Path(p.uri.partition(":")[2]).name) for m in broker.weights.published() for p in payloads(m)}
    assert {name for name in files(tmp_path / "out") if "-t1" in name} <= mine, "the files of the dead trainer are gone"


def test_a_trainer_that_went_back_gives_no_number_twice(
    broker: Broker,
    trainer: ChangingWeights,
    generator: LocalWeights,
    tmp_path: Path,
    make_trainer: Callable[[TrainerSession], ChangingWeights],
    kind: str,
) -> None:
    """It replays versions 2 and 3; readers get what was first published under these numbers."""
    first = [trainer.publish(version) for version in (1, 2, 3)]
    successor = make_trainer(take_over(broker, fresh=False))
    successor.bits = trainer.bits.copy()
    assert broker.weights.published() == first
    assert trainer.is_at(generator.fetch(first[-1]))
    newest = successor.publish(4)
    assert newest.whole
    assert successor.is_at(generator.fetch(newest))


def test_a_version_of_another_is_no_base(broker: Broker, trainer: ChangingWeights, tmp_path: Path, kind: str) -> None:
    trainer.publish(1)
    broker.connection.client.xdel(broker.connection.keys.weights, "1-1")
    assert trainer.publish(2).whole, "what this trainer holds is not what the broker has"


def test_another_models_layout_is_published_whole_and_fetched_whole(
    broker: Broker, trainer: ChangingWeights, generator: LocalWeights, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator.fetch(trainer.publish(1))
    monkeypatch.setattr(ChangingWeights, "tensors", lambda self: {"other": torch.zeros(4429, dtype=torch.bfloat16)})
    monkeypatch.setattr("tests.support.models.changing_weights.SPECS", [TensorSpec("other", "bfloat16", [4429])])
    newest = trainer.publish(2)
    assert forms([newest]) == "w"
    assert load_file(generator.fetch(newest))["other"].shape == (4429,)


def test_a_version_that_is_freed_while_it_is_fetched_is_an_error_that_passes(
    broker: Broker, trainer: ChangingWeights, generator: LocalWeights, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = trainer.publish(1)
    for version in range(2, 12):
        trainer.publish(version)
    with pytest.raises(InfraError):
        generator.fetch(late)
    newest = broker.weights.newest()
    assert newest is not None
    assert trainer.is_at(generator.fetch(newest))


def test_what_was_fetched_stays_until_the_next_fetch_though_the_trainer_frees_it(
    trainer: ChangingWeights, generator: LocalWeights, kind: str, tmp_path: Path
) -> None:
    path = generator.fetch(trainer.publish(1))
    assert trainer.is_at(path)
    kept = path.read_bytes()
    for version in range(2, 12):
        newest = trainer.publish(version, changed=4000)
    assert path.read_bytes() == kept
    assert trainer.is_at(generator.fetch(newest))
    generator.drop()
    assert not [file for file in (tmp_path / "in").rglob("*") if file.is_file()]


def test_a_copy_that_deltas_change_leaves_no_whole_file_behind(
    trainer: ChangingWeights, generator: LocalWeights, kind: str, tmp_path: Path
) -> None:
    for version in range(1, 4):
        assert trainer.is_at(generator.fetch(trainer.publish(version)))
    assert [path.name for path in (tmp_path / "in").rglob("*") if path.is_file()] == ["state.safetensors"]


def test_a_file_system_without_links_gets_a_copy(
    trainer: ChangingWeights, generator: LocalWeights, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> None:
        raise PermissionError("no links here")

    monkeypatch.setattr("broker.weights.delta_writer.os.link", refuse)
    seen = [trainer.publish(version) for version in (1, 2)]
    assert forms(seen) == "wd"
    assert trainer.is_at(generator.fetch(seen[-1]))


def test_a_delta_that_is_gone_before_the_next_version_makes_that_one_whole(
    broker: Broker, trainer: ChangingWeights, generator: LocalWeights, kind: str
) -> None:
    trainer.publish(1)
    spoil(broker, trainer.publish(2), "delta")(True)
    newest = trainer.publish(3)
    assert newest.whole
    assert trainer.is_at(generator.fetch(newest))
