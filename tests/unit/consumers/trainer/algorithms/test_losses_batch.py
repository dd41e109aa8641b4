"""Losses that need more than a token and two policies, against references in plain Python."""

import math
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from consumers.trainer.algorithms.losses import (
    LOSSES,
    DecoupledPpo,
    LossInputs,
    LossOutput,
    M2po,
    interpolated,
    largest_kept,
)
from schemas.errors import ConfigError


@dataclass(frozen=True)
class Token:
    """Log-probabilities under policy (p), rollout policy (q) and proximal policy (x), and the advantage."""

    p: float
    q: float
    x: float
    a: float


Batch = list[list[Token]]


def surrogate(r: float, a: float, low: float, high: float, dual: float | None = None) -> tuple[float, float]:
    """PPO's term and its derivative by r, written out case by case."""
    inner = min(max(r, 1 - low), 1 + high)
    value, slope = (-a * r, -a) if -a * r >= -a * inner else (-a * inner, 0.0)
    if dual is not None and a < 0 and value > -a * dual:
        return -a * dual, 0.0
    return value, slope


def gspo(batch: Batch) -> tuple[list[list[float]], list[list[float]]]:
    """Value at each token and the derivative of the sum of all values by each log policy."""
    values, slopes = [], []
    for row in batch:
        s = math.exp(sum(t.p - t.q for t in row) / len(row)) if row else 1.0
        found = [surrogate(s, t.a, 3e-4, 4e-4) for t in row]
        values.append([value for value, _ in found])
        # Each token's s moves with every token of the row.
        slopes.append([sum(slope for _, slope in found) * s / max(len(row), 1)] * len(row))
    return values, slopes


def decoupled(batch: Batch, action: str = "mask") -> tuple[list[list[float]], list[list[float]]]:
    values, slopes = [], []
    for row in batch:
        found = []
        for t in row:
            w, r = math.exp(t.x - t.q), math.exp(t.p - t.x)
            w = w if w <= 5.0 else 0.0 if action == "mask" else 5.0
            value, slope = surrogate(r, t.a, 0.2, 0.28, 3.0)
            found.append((w * value, w * slope * r))
        values.append([v for v, _ in found])
        slopes.append([s for _, s in found])
    return values, slopes


def m2po(batch: Batch) -> tuple[list[list[float]], list[list[float]]]:
    """The largest squares are dropped, equal ones together, until the mean of those left is below 0.04."""
    squares = sorted((t.q - t.x) ** 2 for row in batch for t in row)
    while squares and sum(squares) / len(squares) >= 0.04:
        squares = [square for square in squares if square < squares[-1]]
    limit = squares[-1] if squares else -1.0
    values, slopes = [], []
    for row in batch:
        found = []
        for t in row:
            value, slope = surrogate(math.exp(t.p - t.q), t.a, 0.2, 0.28, 3.0)
            kept = (t.q - t.x) ** 2 <= limit
            found.append((value, slope * math.exp(t.p - t.q)) if kept else (0.0, 0.0))
        values.append([v for v, _ in found])
        slopes.append([s for _, s in found])
    return values, slopes


REFERENCES = {"gspo": gspo, "decoupled_ppo": decoupled, "m2po": m2po}


def single(values: list[float]) -> list[float]:
    return values


def padded(batch: Batch) -> LossInputs:
    """Rows of one length, with nonsense where the mask is not set."""
    longest = max((len(row) for row in batch), default=0) + 2
    arrays = {}
    for name in ("p", "q", "x", "a"):
        rows = [[getattr(t, name) for t in row] + [-7.5] * (longest - len(row)) for row in batch]
        arrays[name] = torch.tensor(rows, dtype=torch.float64)
    mask = torch.tensor([[i < len(row) for i in range(longest)] for row in batch])
    return inputs_of(arrays, mask, None)


def packed(batch: Batch, order: Sequence[int] = ()) -> LossInputs:
    """All sequences in one row, one behind another, each with a token of the prompt before it."""
    order = order or range(len(batch))
    flat = [(row, t) for row in order for t in (None, *batch[row])]
    arrays = {
        name: torch.tensor([[-7.5 if t is None else getattr(t, name) for _, t in flat]], dtype=torch.float64)
        for name in ("p", "q", "x", "a")
    }
    sequence = torch.tensor([[10 + row for row, _ in flat]])
    return inputs_of(arrays, torch.tensor([[t is not None for _, t in flat]]), sequence)


def inputs_of(arrays: dict[str, torch.Tensor], mask: torch.Tensor, sequence: torch.Tensor | None) -> LossInputs:
    return LossInputs(
        logprobs=arrays["p"].requires_grad_(),
        rollout_logprobs=arrays["q"],
        advantages=arrays["a"],
        mask=mask,
        proximal_logprobs=arrays["x"],
        sequence=sequence,
    )


def evaluate(name: str, parts: Sequence[LossInputs]) -> tuple[list[float], list[float], list[LossOutput]]:
    """Values and gradients of all loss tokens in order, over the micro-batches of one step."""
    loss = LOSSES.get(name)
    loss = loss() if isinstance(loss, type) else loss
    if hasattr(loss, "select_tokens"):
        parts = [
            LossInputs(**{**vars(part), "kept": kept})
            for part, kept in zip(parts, loss.select_tokens(parts, single), strict=True)
        ]
    outputs = [loss(part) for part in parts]
    for part, output in zip(parts, outputs, strict=True):
        torch.where(part.mask, output.loss, 0.0).sum().backward()
    values = [v for part, o in zip(parts, outputs, strict=True) for v in o.loss[part.mask].tolist()]
    slopes = [v for part in parts if part.logprobs.grad is not None for v in part.logprobs.grad[part.mask].tolist()]
    return values, slopes, outputs


logprob = st.floats(-8.0, -1e-3)
tokens = st.builds(Token, logprob, logprob, logprob, st.floats(-3, 3))
batches = st.lists(st.lists(tokens, max_size=6), min_size=1, max_size=6)


@pytest.mark.parametrize("name", sorted(REFERENCES))
@settings(max_examples=60)
@given(batch=batches)
def test_value_and_gradient_on_ragged_rows(name: str, batch: Batch) -> None:
    want_values, want_slopes = REFERENCES[name](batch)
    values, slopes, _ = evaluate(name, [padded(batch)])
    assert values == pytest.approx([v for row in want_values for v in row], rel=1e-9, abs=1e-12)
    assert slopes == pytest.approx([s for row in want_slopes for s in row], rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", sorted(REFERENCES))
@settings(max_examples=40)
@given(batch=batches, cuts=st.lists(st.integers(0, 6), max_size=3))
def test_neither_packing_nor_micro_batching_changes_a_token(name: str, batch: Batch, cuts: list[int]) -> None:
    values, slopes, _ = evaluate(name, [padded(batch)])
    edges = sorted({0, len(batch), *(c for c in cuts if c < len(batch))})
    parts = [batch[a:b] for a, b in pairwise(edges)]
    for cut in ([packed(batch)], [padded(part) for part in parts], [packed(part) for part in parts]):
        again = evaluate(name, cut)
        assert again[0] == pytest.approx(values)
        assert again[1] == pytest.approx(slopes)


def test_interleaved_turns_belong_to_their_sequence() -> None:
    """A sequence's tokens need not be neighbours: gspo goes by the id at the token."""
    one = packed([[Token(-1.0, -1.5, -1.0, 1.0)], [Token(-2.0, -1.0, -2.0, 1.0)]])
    both = LossInputs(**{**vars(one), "sequence": torch.full_like(one.mask, 3, dtype=torch.int64)})
    mean = math.exp((0.5 - 1.0) / 2)
    assert evaluate("gspo", [both])[0] == pytest.approx([-mean, -mean])


@pytest.mark.parametrize("name", sorted(REFERENCES))
def test_rows_without_a_loss_token_are_harmless(name: str) -> None:
    inputs = padded([[], []])
    values, _, outputs = evaluate(name, [inputs])
    assert values == []
    assert torch.isfinite(outputs[0].loss).all()
    assert inputs.logprobs.grad is not None
    assert inputs.logprobs.grad.abs().sum() == 0


@pytest.mark.parametrize("name", sorted(REFERENCES))
@pytest.mark.parametrize(("p", "q"), [(-1e-4, -1e4), (-1e4, -1e-4)])
@pytest.mark.parametrize("a", [-2.0, 2.0])
def test_extreme_ratios_stay_finite(name: str, p: float, q: float, a: float) -> None:
    inputs = padded([[Token(p, q, p, a), Token(-1.0, -1.0, -1.0, a)]])
    _, slopes, outputs = evaluate(name, [inputs])
    assert torch.isfinite(outputs[0].loss).all()
    assert all(math.isfinite(slope) for slope in slopes)


@pytest.mark.parametrize("name", sorted(REFERENCES))
def test_gradcheck_away_from_the_kinks(name: str) -> None:
    rows = [[Token(-1.0, -1.01, -1.02, 0.7), Token(-2.0, -1.95, -1.9, 0.7)], [Token(-0.4, -0.45, -0.44, -1.1)]]
    inputs = padded(rows)
    kept = {"kept": inputs.mask}

    def loss(logprobs: torch.Tensor) -> torch.Tensor:
        function = LOSSES.get(name)
        function = function() if isinstance(function, type) else function
        output = function(LossInputs(**{**vars(inputs), **kept, "logprobs": logprobs}))
        return torch.where(inputs.mask, output.loss, 0.0)

    assert torch.autograd.gradcheck(loss, (inputs.logprobs,))


def test_m2po_takes_its_bound_over_all_ranks() -> None:
    """Ranks that exchange sums alone come to the bound of one that has all values."""
    values = torch.tensor([0.01, 0.5, 0.02, 0.09, 0.03, 0.3, 0.0, 0.2, 0.05])
    meeting = threading.Barrier(2)
    given: list[list[float]] = [[], []]

    def rank(number: int) -> float:
        def add(own: list[float]) -> list[float]:
            given[number] = own
            meeting.wait(timeout=30)
            total = [sum(pair) for pair in zip(*given, strict=True)]
            meeting.wait(timeout=30)
            return total

        return largest_kept(values[number::2], 0.04, add)

    with ThreadPoolExecutor(2) as threads:
        bounds = list(threads.map(rank, range(2)))
    whole = largest_kept(values, 0.04, single)
    assert bounds == [whole, whole]
    ordered = sorted(values.tolist())
    kept = [v for v in ordered if v <= whole]
    assert sum(kept) / len(kept) < 0.04 <= sum(ordered[: len(kept) + 1]) / (len(kept) + 1)


def test_m2po_keeps_all_of_a_fresh_batch_and_none_that_is_far() -> None:
    near = packed([[Token(-1.0, -1.1, -1.0, 1.0)] * 3])
    assert M2po().select_tokens([near], single)[0].sum() == 3
    far = packed([[Token(-1.0, -3.0, -1.0, 1.0)] * 3])
    assert M2po().select_tokens([far], single)[0].sum() == 0


def test_decoupled_ppo_clamps_a_weight_when_asked() -> None:
    batch = [[Token(-1.0, -4.0, -1.1, 1.0), Token(-1.0, -1.2, -1.1, -1.0)]]
    output = DecoupledPpo(weight_action="clamp")(padded(batch))
    want, _ = decoupled(batch, "clamp")
    assert output.loss[0, :2].tolist() == pytest.approx(want[0])
    assert output.metrics["weight"][0, 0] == 5.0
    assert not output.metrics["masked"].any()
    assert DecoupledPpo()(padded(batch)).metrics["masked"][0].tolist() == [True, False, False, False]


def test_decoupled_ppo_without_a_proximal_policy_is_refused() -> None:
    """Elsewhere a missing option silently drops the weight."""
    inputs = LossInputs(*(torch.zeros(1, 1) for _ in range(3)), torch.ones(1, 1, dtype=torch.bool))
    with pytest.raises(ConfigError, match="proximal"):
        DecoupledPpo()(inputs)


def test_interpolation_goes_from_the_rollout_policy_to_the_policy_of_now() -> None:
    now, rollout = torch.full((1, 4), -1.0), torch.full((1, 4), -3.0)
    versions = torch.tensor([[10, 9, 8, 6]])
    got = interpolated(now, rollout, versions, version=10)
    assert got[0].tolist() == pytest.approx([-1.0, -3.0, -2.0, -1.5])
