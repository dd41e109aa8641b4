"""Slots of keys and values against rows that are kept one by one, through joins, tokens and leaves."""

import random

import torch
from torch import Tensor

from producers.engines.transformers.key_values import LEAST, KeyValueSlots

HEADS, SIZE, LAYERS = 2, 3, 2


def states(rows: int, columns: int) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(rows, HEADS, columns, SIZE), torch.randn(rows, HEADS, columns, SIZE)) for _ in range(LAYERS)]


def test_each_row_keeps_its_own_tokens_whoever_joins_and_leaves():
    torch.manual_seed(0)
    chance = random.Random(0)
    slots = KeyValueSlots(torch.device("cpu"))
    rows: list[list[tuple[Tensor, Tensor]]] = []  # of each row, by layer: [H, T, D]
    for _ in range(300):
        if chance.random() < 0.2 and len(rows) < 12:
            lengths = [
                chance.randint(1, 3 * LEAST if chance.random() < 0.1 else 9) for _ in range(chance.randint(1, 4))
            ]
            fresh = states(len(lengths), max(lengths))
            slots.add(fresh, lengths)
            rows += [[(k[i, :, -n:], v[i, :, -n:]) for k, v in fresh] for i, n in enumerate(lengths)]
        if not rows:
            continue
        cache, mask, positions = slots.grow()
        newest = states(len(rows), 1)
        assert cache.get_mask_sizes(1, 0)[0] == mask.shape[1]
        for layer, (keys, values) in enumerate(newest):
            seen = cache.update(keys, values, layer)
            for i, row in enumerate(rows):
                grown = tuple(torch.cat([old, new[i]], 1) for old, new in zip(row[layer], (keys, values), strict=True))
                row[layer] = (grown[0], grown[1])
                for got, want in zip(seen, grown, strict=True):
                    torch.testing.assert_close(got[i][:, mask[i].bool()], want, rtol=0, atol=0)
                    assert torch.isfinite(got).all()
                assert positions[i].item() == grown[0].shape[1] - 1
        leaving = [i for i in range(len(rows)) if chance.random() < 0.06]
        rows = [rows[i] for i in slots.remove(leaving)]


def test_a_token_is_copied_a_few_times_and_not_once_for_each_that_follows():
    slots = KeyValueSlots(torch.device("cpu"))
    slots.add(states(1, 4), [4])
    moved: list[int] = []
    move = type(slots._layers[0]).move

    def counted(layer: object, new: int, columns: int, rows: int, used: slice, shift: int) -> None:
        moved.append(used.stop - used.start)
        move(layer, new, columns, rows, used, shift)  # type: ignore[arg-type]

    for layer in slots._layers:
        layer.move = counted.__get__(layer)  # type: ignore[method-assign]
    for _ in range(2000):
        slots.grow()
    assert sum(moved) / LAYERS < 3 * 2000
