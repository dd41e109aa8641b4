"""Rows of samples with segments: each sampled token is trained once, with its sample's weight, however it is cut."""

from collections import Counter
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from consumers.trainer.algorithms import AGGREGATIONS
from consumers.trainer.algorithms.advantages import Gae, Turns, centered
from consumers.trainer.checkpoint.batch_files import BatchFiles, step_record
from consumers.trainer.data.collate import MicroBatch, collate
from consumers.trainer.data.credit import AnyAdvantage
from consumers.trainer.data.groups import Group
from consumers.trainer.data.plan import StepPlan, StepPlanner
from consumers.trainer.data.rows import TrainRow, cut_rows
from consumers.trainer.metrics.step_metrics import sample_metrics
from schemas.codec import Array
from schemas.messages import RoutedExperts, Segment, Span, Trajectory, Turn
from tests.support.trainer.trajectories import make_episode, make_groups, make_trajectory


def planned(
    groups: list[Group],
    budget: int = 64,
    aggregation: str = "token_mean",
    dp_size: int = 1,
    advantage: AnyAdvantage = centered,
    by_tenant: bool = False,
) -> StepPlan:
    means = AGGREGATIONS.get(aggregation)
    return StepPlanner(advantage, means, budget, max_tokens=7, dp_size=dp_size, by_tenant=by_tenant).plan(groups)


def episodes(lengths: list[int], seed: int) -> list[Group]:
    """Two groups of samples with random segments."""
    samples = [(make_episode(s % 2, s, length, seed), float(s % 3)) for s, length in enumerate(lengths)]
    return [Group(task_id, [one for s, one in enumerate(samples) if s % 2 == task_id]) for task_id in (0, 1)]


def trainable(trajectory: Trajectory) -> list[int]:
    """Places of the tokens of a sample that can be trained."""
    starts = {segment.start for segment in trajectory.segments if not segment.shared} if trajectory.segments else {0}
    return [place for place, own in enumerate(trajectory.loss_mask.numpy()) if own and place not in starts]


lengths_of_samples = st.lists(st.integers(1, 12), min_size=1, max_size=6)


@given(lengths=lengths_of_samples, seed=st.integers(0, 999), budget=st.integers(2, 60), dp_size=st.integers(1, 3))
def test_each_sampled_token_is_trained_exactly_once(lengths: list[int], seed: int, budget: int, dp_size: int) -> None:
    groups = episodes(lengths, seed)
    bodies = [body for group in groups for body, _ in group.samples]
    plan = planned(groups, budget, dp_size=dp_size)
    trained: list[Counter[tuple[int, float, int]]] = [Counter() for _ in bodies]
    for rank in range(dp_size):
        for micro in plan.batch(rank).micro_batches:
            for row, sample in enumerate(micro.sample.tolist()):
                mask = micro.mask[row]
                values = (
                    tensor[row][mask].tolist() for tensor in (micro.targets, micro.rollout_logprobs, micro.versions)
                )
                trained[sample].update(zip(*values, strict=True))
    for body, found, length in zip(bodies, trained, plan.samples.lengths.tolist(), strict=True):
        numbers = (body.tokens.numpy(), body.logprobs.numpy(), body.versions())
        want = Counter(tuple(array[place].item() for array in numbers) for place in trainable(body))
        assert found == want
        assert length == want.total()


@pytest.mark.parametrize("aggregation", AGGREGATIONS.names)
@settings(max_examples=30)
@given(lengths=lengths_of_samples, seed=st.integers(0, 999), budget=st.integers(2, 60))
def test_a_sample_weighs_as_one_row_of_its_length(aggregation: str, lengths: list[int], seed: int, budget: int) -> None:
    groups = episodes(lengths, seed)

    def as_one_row(body: Trajectory) -> Trajectory:
        own = trainable(body)
        mask = [0, *(int(place in own) for place in range(len(body.tokens)))]
        context = [Array.of([0, *array.numpy()], array.dtype) for array in (body.tokens, body.logprobs)]
        spans = [Span(span.version, span.start + 1, span.end + 1) for span in body.spans]
        return msgspec.structs.replace(
            body,
            tokens=context[0],
            logprobs=context[1],
            loss_mask=Array.of(mask, "u1"),
            spans=spans,
            segments=[],
            turns=[],
        )

    plain = [Group(g.task_id, [(as_one_row(body), reward) for body, reward in g.samples]) for g in groups]
    rows, single = (planned(each, budget, aggregation) for each in (groups, plain))
    assert rows.samples.lengths.tolist() == single.samples.lengths.tolist()
    assert rows.weights.tolist() == single.weights.tolist()
    assert rows.credit.samples.tolist() == single.credit.samples.tolist()

    def masses(plan: StepPlan) -> torch.Tensor:
        mass = torch.zeros(len(plan.samples.rewards), 2)
        for micro in plan.batch().micro_batches:
            known = micro.sample >= 0
            for column, weights in enumerate((micro.weights, micro.weights * micro.advantages)):
                mass[:, column].index_add_(0, micro.sample[known], weights.sum(1)[known])
        return mass

    assert torch.allclose(masses(rows), masses(single), atol=1e-6)


def branching() -> Trajectory:
    """Ten new tokens; the second row begins with five of the first, the third is a sub-agent's."""
    return msgspec.structs.replace(
        make_trajectory(0, 0, prompt=2, completion=8),
        tokens=Array.of(range(100, 110), "i4"),
        spans=[Span(3, 2, 4), Span(4, 4, 10)],
        segments=[Segment(0, 6), Segment(6, 8, 0, 5), Segment(8, 10, name="helper")],
        turns=[
            Turn("prompt", 0, 2),
            Turn("assistant", 2, 6, 0),
            Turn("assistant", 6, 8, 2),
            Turn("assistant", 8, 10, 1),
        ],
    )


def test_what_a_row_shares_is_context_with_its_versions_and_no_loss() -> None:
    rows = cut_rows(branching(), 0)
    assert [row.tokens.numpy().tolist() for row in rows] == [
        [100, 101, 102, 103, 104, 105],
        [100, 101, 102, 103, 104, 106, 107],
        [108, 109],
    ]
    assert [row.loss_mask.numpy().tolist() for row in rows] == [[0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1, 1], [1, 1]]
    assert rows[1].logprobs.numpy()[:5].tolist() == [0.0] * 5
    assert rows[1].spans == [Span(3, 2, 4), Span(4, 4, 7)]
    # The first token of a row has no prediction.
    assert [row.loss_tokens for row in rows] == [4, 2, 1]


def test_a_row_without_a_loss_token_is_not_computed() -> None:
    """Such as that of a sub-agent that is not trained."""
    masked = msgspec.structs.replace(branching(), loss_mask=Array.of([0, 0, 1, 1, 1, 1, 1, 1, 0, 0], "u1"))
    plan = planned([Group(0, [(masked, 1.0), (make_trajectory(0, 1), 0.0)])])
    assert [(row.cut.sample, row.sequence) for row in plan.rows] == [(0, 0), (0, 1), (1, 2)]


def test_rows_are_what_has_a_ratio_and_samples_what_has_a_weight() -> None:
    plan = planned([Group(7, [(branching(), 1.0), (make_trajectory(7, 1, 2, 3), 0.0)])], aggregation="sequence_mean")
    (micro,) = plan.batch().micro_batches
    # Rows of one length lie side by side, so they are not in the order of their sequences.
    assert sorted(micro.sequence.tolist()) == [0, 1, 2, 3]
    assert [micro.sample[micro.sequence.tolist().index(row)].item() for row in range(4)] == [0, 0, 0, 1]
    assert micro.group.tolist() == [0] * 4
    assert [row.weight for row in plan.rows] == pytest.approx([1 / 14] * 3 + [1 / 6])
    figures = sample_metrics(plan)
    assert (figures["samples"], figures["rows_mean"], figures["rows_max"]) == (2.0, 2.0, 3.0)
    assert figures["row_tokens_mean"] == (6 + 7 + 2 + 5) / 2
    assert figures["length_max"] == 7.0


def test_rows_of_a_sample_travel_to_ranks_as_they_are() -> None:
    plan = planned([Group(0, [(branching(), 1.0), (make_episode(0, 1, 9), 0.0)])], dp_size=2, advantage=Turns())
    for rank in range(2):
        sent = msgspec.msgpack.decode(msgspec.msgpack.encode(plan.share(rank)), type=list[list[TrainRow]])
        for here, there in zip(plan.share(rank), sent, strict=True):
            assert_equal(collate(here), collate(there))


def test_a_recorded_step_is_planned_again_as_it_was(tmp_path: Path) -> None:
    samples = [(branching(), 1.0), (make_episode(0, 1, 9), 0.0), (make_episode(0, 2, 5), 1.0)]
    groups = [
        Group(
            0,
            [
                (msgspec.structs.replace(sample, data={"tenant": name, "other": "text"}), reward)
                for (sample, reward), name in zip(samples, "aab", strict=True)
            ],
        )
    ]
    files = BatchFiles(tmp_path)
    files.write(step_record(groups, step=3, version=3, leader_term=1, world=1, parallel={}))
    (read,) = files.read(3).groups
    again = [Group(read.task_id, list(zip(read.samples, read.rewards, strict=True)))]
    assert [sample.data for sample in read.samples] == [{"tenant": name} for name in "aab"]
    for advantage, by_tenant in ((Turns(turn_gamma=0.5), False), (Gae(), False), (centered, True)):
        one, other = (planned(each, advantage=advantage, by_tenant=by_tenant).batch() for each in (groups, again))
        for a, b in zip(one.micro_batches, other.micro_batches, strict=True):
            assert_equal(a, b)


def assert_equal(one: MicroBatch, other: MicroBatch) -> None:
    for name in one.__dataclass_fields__:
        a, b = getattr(one, name), getattr(other, name)
        if not isinstance(a, torch.Tensor):
            assert a == b, name
            continue
        assert a.dtype == b.dtype, name
        assert torch.equal(a, b), name


@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4), seed=st.integers(0, 99))
def test_samples_without_segments_have_the_tensors_of_their_own_arrays(sizes: list[int], seed: int) -> None:
    """Bit for bit, written out by hand from the message."""
    groups = make_groups(sizes, seed)
    plan = planned(groups, aggregation="sequence_mean")
    bodies = [body for group in groups for body, _ in group.samples]
    with_loss = max(1, sum(1 for body in bodies if trainable(body)))
    for micro in plan.batch().micro_batches:
        longest = max(len(bodies[s].tokens) for s in micro.sample.tolist())

        def padded(arrays: list[list[float]], empty: float, dtype: torch.dtype, width: int = longest) -> torch.Tensor:
            return torch.tensor([[*array, *[empty] * (width - len(array))] for array in arrays], dtype=dtype)[:, 1:]

        own = [bodies[s] for s in micro.sample.tolist()]
        assert micro.sequence.tolist() == micro.sample.tolist()
        assert torch.equal(micro.tokens[:, 1:], padded([t.tokens.numpy().tolist() for t in own], 0, torch.int64))
        assert torch.equal(micro.targets, micro.tokens[:, 1:])
        mask = padded([t.loss_mask.numpy().tolist() for t in own], 0, torch.bool)
        assert torch.equal(micro.mask, mask)
        assert torch.equal(micro.rollout_logprobs, padded([t.logprobs.numpy().tolist() for t in own], 0, torch.float32))
        assert torch.equal(micro.versions, padded([t.versions().tolist() for t in own], -1, torch.int64))
        advantage = torch.tensor([plan.credit.samples[s] for s in micro.sample.tolist()], dtype=torch.float32)
        assert torch.equal(micro.advantages, advantage[:, None] * mask)
        weight = [1 / max(1, len(trainable(t))) / with_loss for t in own]
        assert torch.allclose(micro.weights, torch.tensor(weight)[:, None] * mask, rtol=1e-6)
        assert micro.lengths.tolist() == [max(1, len(t.tokens) - 1) for t in own]


def test_one_segment_of_a_whole_sample_changes_nothing() -> None:
    plain = [(make_trajectory(0, s), float(s)) for s in range(3)]
    whole = [(msgspec.structs.replace(t, segments=[Segment(0, len(t.tokens))]), reward) for t, reward in plain]
    for advantage in (centered, Turns(), Gae()):
        one, other = (planned([Group(0, samples)], advantage=advantage).batch() for samples in (plain, whole))
        for a, b in zip(one.micro_batches, other.micro_batches, strict=True):
            assert_equal(a, b)


def test_a_sample_whose_every_row_is_masked_trains_nothing_and_harms_nobody() -> None:
    masked = msgspec.structs.replace(branching(), loss_mask=Array.of([0] * 10, "u1"), sample=1)
    plan = planned([Group(0, [(make_trajectory(0, 0), 1.0), (masked, 0.0)])], advantage=Turns())
    assert [row.cut.sample for row in plan.rows] == [0]
    assert plan.samples.lengths.tolist() == [4, 0]
    assert np.isfinite(plan.credit.samples).all()
    assert sample_metrics(plan)["rows_mean"] == 0.5


@settings(max_examples=30)
@given(length=st.integers(1, 12), seed=st.integers(0, 999))
def test_each_token_of_a_row_comes_with_its_experts_those_it_shares_included(length: int, seed: int) -> None:
    episode = make_episode(0, 0, length, seed)
    places = np.arange(len(episode.tokens), dtype=np.uint8).reshape(-1, 1, 1) + np.array([[[0, 100]]], np.uint8)
    places[0] = 255
    with_experts = msgspec.structs.replace(episode, routed_experts=RoutedExperts.of(places))
    plan = planned([Group(0, [(with_experts, 1.0)]), Group(1, [(make_trajectory(1, 0, 4, 9), 0.0)])], budget=500)
    cut = cut_rows(with_experts, 0)
    (micro,) = plan.batch().micro_batches
    assert (micro.routed_experts is not None) == (len(cut) > 0)
    if micro.routed_experts is None:
        return
    for row, sequence in enumerate(micro.sequence.tolist()):
        found = micro.routed_experts[row]
        if sequence >= len(cut):
            assert (found == -1).all(), "this sample came without any"
            continue
        own = cut[sequence].of_sample(np.arange(len(episode.tokens)))
        expected = np.where(own[:, None] == 0, -1, own[:, None] + np.array([[0, 100]]))
        assert np.array_equal(found[: len(own), 0].numpy(), expected)
        assert (found[len(own) :] == -1).all()
