"""Attention over packed sequences: which kernel computes it, and the tokens that several rows begin with."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from consumers.trainer.data.load_balancing import WORTH_IT
from consumers.trainer.data.packed import Bounds, find_shared_prefixes
from consumers.trainer.model import packing
from consumers.trainer.model.packing import KERNELS, choose_kernel

GPU = torch.device("cuda")


@pytest.mark.parametrize(
    ("device", "dtype", "capability", "installed", "expected"),
    [
        ("cpu", torch.bfloat16, (9, 0), True, "each"),
        ("cuda", torch.float32, (9, 0), True, "each"),
        ("cuda", torch.bfloat16, (7, 5), True, "each"),
        ("cuda", torch.bfloat16, (8, 0), True, "flash_attn"),
        ("cuda", torch.float16, (9, 0), False, "varlen"),
    ],
    ids=["a CPU", "a 32-bit type", "a GPU that is too old", "with flash_attn", "without flash_attn"],
)
def test_the_choice(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    dtype: torch.dtype,
    capability: tuple[int, int],
    installed: bool,
    expected: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(packing, "_installed", lambda _: installed)
    assert choose_kernel(torch.device(device), dtype) == expected


def by_mask(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: Bounds, window: int | None = None
) -> torch.Tensor:
    """One call with a block-diagonal causal mask."""
    starts = bounds.starts
    places = torch.arange(query.shape[2])
    block = torch.searchsorted(starts[1:].long(), places, right=True)
    mask = (block[:, None] == block[None]) & (places[:, None] >= places[None])
    mask &= places[:, None] - places[None] < (window or len(places))
    return F.scaled_dot_product_attention(query, key, value, mask, scale=0.3, enable_gqa=True).transpose(1, 2)


@pytest.fixture
def packed() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Bounds]:
    """Four query heads over two of key and value, sequences of 3, 1 and 5 tokens."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, 9, 8, generator=generator) for heads in (4, 2, 2))
    return query, key, value, Bounds([3, 1, 5])


@pytest.mark.parametrize("window", [None, 1, 3, 4, 5, 9])
def test_each_sequence_sees_itself_and_what_was_before(packed: Any, window: int | None) -> None:
    found = KERNELS["each"](*packed, 0.3, window)
    torch.testing.assert_close(found, by_mask(*packed, window))


def test_neighbours_of_one_length_are_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, ...]] = []
    plain = F.scaled_dot_product_attention

    def counted(query: torch.Tensor, *others: torch.Tensor, **settings: object) -> torch.Tensor:
        calls.append(tuple(query.shape))
        return plain(query, *others, **settings)  # type: ignore[arg-type]

    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, 16, 8, generator=generator) for heads in (4, 2, 2))
    bounds = Bounds([2, 2, 2, 5, 5])
    monkeypatch.setattr(F, "scaled_dot_product_attention", counted)
    found = KERNELS["each"](query, key, value, bounds, 0.3, None)
    monkeypatch.undo()
    assert calls == [(3, 4, 2, 8), (2, 4, 5, 8)]
    torch.testing.assert_close(found, by_mask(query, key, value, bounds))


@pytest.mark.parametrize("window", [None, 3])
def test_flash_attn_is_asked_for_the_same(packed: Any, window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its real signature, over a computation of ours: the package needs a GPU."""

    def flash_attn_varlen_func(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
    ) -> torch.Tensor:
        assert window_size == ((-1, 0) if window is None else (2, 0)), "how many before it, and how many after"
        assert (q.shape, k.shape) == ((9, 4, 8), (9, 2, 8))
        assert (max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal) == (5, 5, 0.0, 0.3, True)
        assert cu_seqlens_q is cu_seqlens_k
        rows = (tensor.transpose(0, 1)[None] for tensor in (q, k, v))
        return by_mask(*rows, Bounds(cu_seqlens_q.diff().tolist()), window)[0]

    package = ModuleType("flash_attn")
    package.flash_attn_varlen_func = flash_attn_varlen_func  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    found = KERNELS["flash_attn"](*packed, 0.3, window)
    torch.testing.assert_close(found, KERNELS["each"](*packed, 0.3, window))


@pytest.mark.parametrize(("head", "value_head", "seen"), [(24, 16, 24), (16, 20, 24), (20, 20, 24), (264, 8, None)])
@pytest.mark.parametrize("scale", [0.3, None])
def test_a_flash_kernel_gets_heads_of_one_size_that_it_takes(
    head: int, value_head: int, seen: int | None, scale: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Multi-head latent attention has larger queries and keys than values; the kernels take none above 256."""
    sizes: list[int] = []

    def flash_attn_varlen_func(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        starts: torch.Tensor,
        *_: object,
        softmax_scale: float,
        **__: object,
    ) -> torch.Tensor:
        assert q.shape[-1] == k.shape[-1] == v.shape[-1] <= 256
        assert q.shape[-1] % 8 == 0
        sizes.append(q.shape[-1])
        bounds = Bounds(starts.diff().tolist())
        return KERNELS["each"](*(tensor.transpose(0, 1)[None] for tensor in (q, k, v)), bounds, softmax_scale, None)[0]

    package = ModuleType("flash_attn")
    package.flash_attn_varlen_func = flash_attn_varlen_func  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(1, heads, 9, head, generator=generator) for heads in (4, 2))
    value = torch.randn(1, 2, 9, value_head, generator=generator)
    given = (query, key, value, Bounds([3, 1, 5]), scale, None)
    found = KERNELS["flash_attn"](*given)
    assert sizes == ([] if seen is None else [seen])
    assert found.shape == (1, 9, 4, value_head)
    torch.testing.assert_close(found, KERNELS["each"](*given))


def refused(*_: object) -> torch.Tensor:
    raise RuntimeError("varlen_fwd: head dimension 12 is not supported\nand more")


def right(*given: Any) -> torch.Tensor:
    return KERNELS["each"](*given)


def wrong(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *others: Any) -> torch.Tensor:
    return KERNELS["each"](query, key, value + 1, *others)


def wrong_behind_a_block(*given: Any) -> torch.Tensor:
    """The last of many tokens alone."""
    out = right(*given).clone()
    out[:, 256:] *= 0.5
    return out


class _HalfGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, key: torch.Tensor) -> torch.Tensor:
        return key.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] / 2


def wrong_gradient(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *others: Any) -> torch.Tensor:
    return KERNELS["each"](query, _HalfGradient.apply(key), value, *others)


def without_window(*given: Any) -> torch.Tensor:
    return KERNELS["each"](*given[:-1], None)


WRONG = [
    (wrong, "result"),
    (wrong_behind_a_block, "result"),
    (wrong_gradient, "gradient"),
    (without_window, "result"),
]


@pytest.mark.parametrize(("kernel", "part"), WRONG)
def test_what_a_kernel_computes_wrong_is_named(kernel: Any, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "choose_kernel", lambda *_: "varlen")
    monkeypatch.setitem(KERNELS, "varlen", kernel)
    config = SimpleNamespace(num_attention_heads=4, num_key_value_heads=2, hidden_size=64, sliding_window=4096)
    assert packing.try_kernel(config, torch.device("cpu"), torch.float32) == f"its {part} is wrong"
    assert KERNELS["varlen"] is KERNELS["each"]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_grouped_heads_are_repeated_where_no_kernel_takes_them(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """``meta`` stands for a GPU, on which PyTorch's grouped attention in float32 makes scores of all pairs."""
    calls: list[tuple[int, bool]] = []

    def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **others: Any) -> torch.Tensor:
        calls.append((key.shape[1], others["enable_gqa"]))
        return query

    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    query, key, value = (torch.empty(1, heads, 9, 8, device=device) for heads in (4, 2, 2))
    KERNELS["each"](query, key, value, Bounds([5, 4]), None, None)
    packing.attend(torch.nn.Module(), query, key, value, None)
    assert calls == [(2, True) if device == "cpu" else (4, False)] * 3


def test_repeated_heads_are_those_of_their_groups() -> None:
    query, key, value = (torch.randn(2, heads, 9, 8) for heads in (4, 2, 2))
    grouped = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    repeated = (tensor.repeat_interleave(2, 1) for tensor in (key, value))
    torch.testing.assert_close(F.scaled_dot_product_attention(query, *repeated, is_causal=True), grouped)


@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize(("kernel", "stays"), [(right, True), (refused, False), (wrong, False)])
def test_a_kernel_that_fails_with_the_models_heads_is_replaced_before_training(
    kernel: Any, stays: bool, latent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "choose_kernel", lambda *_: "varlen")
    monkeypatch.setitem(KERNELS, "varlen", kernel)
    config = SimpleNamespace(num_attention_heads=4, num_key_value_heads=2, hidden_size=48)
    if latent:
        config = SimpleNamespace(
            num_attention_heads=4, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6, head_dim=4
        )
    packing.try_kernel(config, torch.device("cpu"), torch.float32)
    assert KERNELS["varlen"] is (kernel if stays else KERNELS["each"])


def packed_rows(rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows padded with 0, which is also a token, and their lengths."""
    longest = max(len(row) for row in rows)
    return torch.tensor([row + [0] * (longest - len(row)) for row in rows]), torch.tensor([len(row) for row in rows])


@settings(max_examples=200)
@given(rows=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=9))
def test_each_token_is_computed_once_for_all_rows_that_begin_alike(rows: list[list[int]]) -> None:
    prefixes = [tuple(row[: end + 1]) for row in rows for end in range(len(row))]
    found = find_shared_prefixes(*packed_rows(rows))
    distinct = set(prefixes)
    assert (found is None) == (len(prefixes) - len(distinct) < WORTH_IT * len(prefixes))
    if found is None:
        return
    first = [prefixes[place] for place in found.first.tolist()]
    assert len(first) == len(set(first)) == len(distinct)
    assert [first[token] for token in found.spread.tolist()] == prefixes


def test_values_go_to_all_tokens_and_back() -> None:
    found = find_shared_prefixes(*packed_rows([[5, 6, 7], [5, 6], [9, 6]]))
    assert found is not None
    ids = torch.tensor([[5, 6, 7, 5, 6, 9, 6]])
    distinct = found.to_distinct(ids, 1)
    assert sorted(distinct[0].tolist()) == [5, 6, 6, 7, 9]
    assert found.to_all(distinct, 1).tolist() == ids.tolist()


def test_the_gradient_of_a_token_that_many_share_is_added_up_in_float32() -> None:
    rows = 1000
    found = find_shared_prefixes(*packed_rows([[5, 1 + row] for row in range(rows)]))
    assert found is not None
    values = torch.zeros(rows + 1, 2, dtype=torch.bfloat16, requires_grad=True)
    found.to_all(values, 0).sum().backward()
    assert values.grad is not None
    assert values.grad.dtype == torch.bfloat16
    # 1 added to 256 is 256 in bfloat16.
    assert sorted(values.grad[:, 0].tolist()) == [1.0] * rows + [1000.0]
