"""The state of training in main memory: its own memory is free, and afterwards each bit is where it was."""

import gc
import mmap
import weakref
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from consumers.trainer.distributed import offload
from consumers.trainer.distributed.offload import StateOffload
from schemas.errors import InfraError

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool]


def state_of(models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer] = ()) -> StateOffload:
    return StateOffload(CPU, models, optimizers)


def bits(tensor: Tensor) -> bytes:
    """All of the memory below a tensor."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.detach().untyped_storage()).numpy().tobytes()


class Holder(nn.Module):
    """A module of these tensors: parameters where a gradient is possible, else buffers."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        for place, tensor in enumerate(tensors):
            if tensor.is_floating_point() and place % 2:
                self.register_parameter(f"p{place}", nn.Parameter(tensor, requires_grad=place % 3 == 0))
            else:
                self.register_buffer(f"b{place}", tensor)


@st.composite
def tensors(draw: st.DrawFn) -> list[Tensor]:
    """Tensors of any bits; some share memory, as views with strides of their own or as the same tensor twice."""
    found: list[Tensor] = []
    for _ in range(draw(st.integers(1, 6))):
        kind = draw(st.sampled_from(["new", "view", "again"])) if found else "new"
        if kind == "new":
            dtype = draw(st.sampled_from(DTYPES))
            size = draw(st.integers(0, 6)) * dtype.itemsize
            given_bits = draw(st.binary(min_size=size, max_size=size))
            allowed = [byte & 1 for byte in given_bits] if dtype == torch.bool else list(given_bits)
            found.append(torch.tensor(allowed, dtype=torch.uint8).view(dtype) if allowed else torch.empty(0))
        else:
            other = draw(st.sampled_from(found))
            found.append(other[1::2] if kind == "view" and other.numel() > 1 else other)
    return found


@given(tensors(), st.integers(1, 4))
def test_each_bit_and_each_shared_piece_of_memory_comes_back(made: list[Tensor], rounds: int) -> None:
    model = Holder(made)
    held = [*model.parameters(), *model.buffers()]
    before = [(bits(t), t.untyped_storage().data_ptr(), t.storage_offset(), t.stride()) for t in held]
    shared = [[a[1] == b[1] for b in before] for a in before]
    state = state_of([model])
    for _ in range(rounds):
        state.offload()
        assert all(t.untyped_storage().nbytes() == 0 for t in held)
        state.onload()
        assert [(bits(t), t.storage_offset(), t.stride()) for t in held] == [(b, o, s) for b, _, o, s in before]
        found = [t.untyped_storage().data_ptr() for t in held]
        assert [[a == b for b in found] for a in found] == shared or any(not b for b, *_ in before)


def small_training() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight  # tied
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    data = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))
    model(data).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def test_training_goes_on_as_if_nothing_had_moved() -> None:
    plain, moved = small_training(), small_training()
    state = state_of([moved[0]], [moved[1]])
    for seed in range(5):
        train(*plain, seed)
        train(*moved, seed)
        state.offload()
        assert state.bytes_moved == sum(4 * n for n in (16, 4)) * 3 + 2 * 4, "weights, two moments, two steps"
        state.onload()
        assert state.bytes_moved == 0
    for a, b in zip(plain[0].parameters(), moved[0].parameters(), strict=True):
        assert torch.equal(a, b)


def test_both_may_be_called_again() -> None:
    model, optimizer = small_training()
    train(model, optimizer, 0)
    before = [bits(p) for p in model.parameters()]
    state = state_of([model], [optimizer])
    state.onload()
    state.offload()
    state.offload()
    state.onload()
    state.onload()
    assert [bits(p) for p in model.parameters()] == before


def test_two_hundred_rounds_use_the_same_buffers_and_keep_no_old_memory() -> None:
    model, optimizer = small_training()
    train(model, optimizer, 0)
    state = state_of([model], [optimizer])
    state.offload()
    first = [buffer.data_ptr() for buffer in state._buffers]
    state.onload()
    for seed in range(200):
        train(model, optimizer, seed)
        state.offload()
        assert [buffer.data_ptr() for buffer in state._buffers] == first
        state.onload()
    # A loaded checkpoint may bring other tensors: nothing keeps the memory of the old ones.
    old = weakref.WeakSet(value.untyped_storage() for values in optimizer.state.values() for value in values.values())
    assert old
    optimizer.state.clear()
    gc.collect()
    assert not old
    state.offload()
    assert len(state._buffers) == 2
    state.onload()


def test_memory_of_a_mapped_file_is_copied_first_for_all_who_share_it(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(bytes(range(64)))
    with file.open("r+b") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        whole = torch.frombuffer(mapped, dtype=torch.uint8)
        model = Holder([whole, whole[8:16].view(torch.float32), whole[:4].clone()])
        del whole
        state = state_of([model])
        state.offload()
        assert all(t.untyped_storage().nbytes() == 0 for t in (*model.parameters(), *model.buffers()))
        state.onload()
    assert bytes(model.b0.tolist()) == bytes(range(64))
    assert isinstance(model.p1, nn.Parameter)
    assert bytes(model.p1.detach().view(torch.uint8).tolist()) == bytes(range(8, 16))
    with torch.no_grad():
        model.p1.zero_()
    assert not model.b0[8:16].any(), "still the same memory"
    assert bytes(model.b2.tolist()) == bytes(range(4))


def test_the_state_waits_for_room_and_says_how_much_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver may report memory as free a moment after its owner gave it."""
    model, optimizer = small_training()
    state = state_of([model], [optimizer])
    before = [bits(p) for p in model.parameters()]
    free = iter([0, 79, 80])
    monkeypatch.setattr(state, "_free_bytes", lambda: next(free))
    state.offload()
    assert state.bytes_moved == 80
    state.onload()
    assert next(free, None) is None
    assert [bits(p) for p in model.parameters()] == before
    monkeypatch.setattr(state, "_free_bytes", lambda: 79)
    monkeypatch.setattr(offload, "FREE_DEADLINE_S", 0.05)
    state.offload()
    with pytest.raises(InfraError, match=r"state takes 0\.0 GB, and cpu has 0\.0 GB free"):
        state.onload()
    monkeypatch.undo()
    state.onload()
    assert [bits(p) for p in model.parameters()] == before, "nothing was lost"


def test_what_is_on_another_device_stays_there() -> None:
    model = nn.Linear(2, 2)
    state = StateOffload(torch.device("cuda"), [model], [])
    assert not state._storages()
