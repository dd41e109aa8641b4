"""Which kernel computes the attention of packed sequences, and that each is called for the same thing."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

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


def by_mask(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """One call with a block-diagonal causal mask."""
    places = torch.arange(query.shape[2])
    block = torch.searchsorted(starts[1:].long(), places, right=True)
    mask = (block[:, None] == block[None]) & (places[:, None] >= places[None])
    return F.scaled_dot_product_attention(query, key, value, mask, scale=0.3, enable_gqa=True).transpose(1, 2)


@pytest.fixture
def packed() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Four query heads over two of key and value, sequences of 3, 1 and 5 tokens."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, 9, 8, generator=generator) for heads in (4, 2, 2))
    return query, key, value, torch.tensor([0, 3, 4, 9], dtype=torch.int32)


def test_each_sequence_sees_itself_and_what_was_before(packed: tuple[torch.Tensor, ...]) -> None:
    found = KERNELS["each"](*packed, 5, 0.3)
    torch.testing.assert_close(found, by_mask(*packed))


def test_neighbours_of_one_length_are_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, ...]] = []
    plain = F.scaled_dot_product_attention

    def counted(query: torch.Tensor, *others: torch.Tensor, **settings: object) -> torch.Tensor:
        calls.append(tuple(query.shape))
        return plain(query, *others, **settings)  # type: ignore[arg-type]

    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, 16, 8, generator=generator) for heads in (4, 2, 2))
    starts = torch.tensor([0, 2, 4, 6, 11, 16], dtype=torch.int32)
    monkeypatch.setattr(F, "scaled_dot_product_attention", counted)
    found = KERNELS["each"](query, key, value, starts, 5, 0.3)
    monkeypatch.undo()
    assert calls == [(3, 4, 2, 8), (2, 4, 5, 8)]
    torch.testing.assert_close(found, by_mask(query, key, value, starts))


def test_flash_attn_is_asked_for_the_same(packed: tuple[torch.Tensor, ...], monkeypatch: pytest.MonkeyPatch) -> None:
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
    ) -> torch.Tensor:
        assert (q.shape, k.shape) == ((9, 4, 8), (9, 2, 8))
        assert (max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal) == (5, 5, 0.0, 0.3, True)
        assert cu_seqlens_q is cu_seqlens_k
        return by_mask(*(tensor.transpose(0, 1)[None] for tensor in (q, k, v)), cu_seqlens_q)[0]

    package = ModuleType("flash_attn")
    package.flash_attn_varlen_func = flash_attn_varlen_func  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    found = KERNELS["flash_attn"](*packed, 5, 0.3)
    torch.testing.assert_close(found, KERNELS["each"](*packed, 5, 0.3))
