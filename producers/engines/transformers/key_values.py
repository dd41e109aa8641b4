"""Keys and values of the rows in flight, in slots that stay in place while rows join, grow and leave.

Row i is in slot i, and all rows end at the same column; each step writes one token there for all of them, in place. If
a row leaves, the last row takes its slot. Only when no column is left are the used ones moved, to the first columns or
to a buffer that is half as large again, so each token is copied only a few times.
Shapes: B rows, C columns, T columns that a row uses, H heads of keys, D size of a head.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

LEAST = 64
"""The least number of free columns after a move."""


class KeyValueSlots:
    """The slots of all layers::

        slots.add(fresh, lengths)                  # rows that were prefilled
        cache, mask, positions = slots.grow()      # the model writes a token of each row into the cache
        order = slots.remove([3, 5])               # slot i holds the row that was in slot order[i]

    begins: the first column of each of B rows. end: the column after all rows.
    """

    def __init__(self, device: torch.device) -> None:
        self.begins: list[int] = []
        self.end = 0
        self._device = device
        self._size = (0, 0)  # slots, columns
        self._layers: list[_Layer] = []

    @property
    def start(self) -> int:
        """The first column that any row uses."""
        return min(self.begins, default=self.end)

    def add(self, fresh: Sequence[tuple[Tensor, Tensor]], lengths: Sequence[int]) -> None:
        """Add rows of the given lengths. fresh: their keys and values in each layer, [rows, H, T, D], padded left."""
        old, new, width = len(self.begins), len(self.begins) + len(lengths), fresh[0][0].shape[2]
        if not self._layers:
            self._layers = [_Layer(self, *states) for states in fresh]
        self._make_room(new, width, 0)
        for layer, states in zip(self._layers, fresh, strict=True):
            for slots, given in zip((layer.keys, layer.values), states, strict=True):
                slots[old:new, :, self.end - width : self.end] = given
        self.begins += [self.end - length for length in lengths]

    def remove(self, leaving: Sequence[int]) -> list[int]:
        """Free slots. Returns for each slot that is still used the slot in which its row was before."""
        gone, count = set(leaving), len(self.begins) - len(leaving)
        order = list(range(count))
        last = (slot for slot in range(count, len(self.begins)) if slot not in gone)
        for hole in sorted(slot for slot in gone if slot < count):
            order[hole] = next(last)
            for layer in self._layers:
                layer.copy_row(order[hole], hole, self.begins[order[hole]])
        self.begins = [self.begins[slot] for slot in order]
        if not order:
            self.end = 0
        return order

    def grow(self) -> tuple[Cache, Tensor, Tensor]:
        """Give each row one more column. Returns the cache to write into, mask int64 [B, T] and positions [B, 1]."""
        self._make_room(len(self.begins), 0, 1)
        self.end += 1
        begins = torch.tensor(self.begins, device=self._device)[:, None]
        mask = torch.arange(self.start, self.end, device=self._device) >= begins
        return Cache(layers=list(self._layers)), mask.long(), self.end - 1 - begins

    def clear(self) -> None:
        """Drop every row and free the memory."""
        self.begins, self.end, self._size, self._layers = [], 0, (0, 0), []

    def _make_room(self, rows: int, before: int, behind: int) -> None:
        """Make sure that there are so many slots, with so many columns before and after the end."""
        slots, columns = self._size
        if rows <= slots and before <= self.end and self.end + behind <= columns:
            return
        used, shift = slice(self.start, self.end), max(self.end - self.start, before) - self.end
        if rows > slots:
            slots = max(rows, slots + slots // 2)
        end = self.end + shift
        if columns < (room := end + max(LEAST, end // 2)):
            columns = room
        self._size = (slots, columns)
        for layer in self._layers:
            layer.move(slots, columns, len(self.begins), used, shift)
        self.begins = [begin + shift for begin in self.begins]
        self.end += shift


class _Layer(CacheLayerMixin):
    """The slots of one layer, keys and values [slots, H, C, D]; a model sees the columns of rows in flight."""

    keys: Tensor
    values: Tensor

    def __init__(self, slots: KeyValueSlots, keys: Tensor, values: Tensor) -> None:
        """keys, values: states with the same heads; they are not stored."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._slots = slots
        self.keys, self.values = keys[:0, :, :0], values[:0, :, :0]
        self.is_initialized = True

    def move(self, slots: int, columns: int, rows: int, used: slice, shift: int) -> None:
        """Move the used columns of all rows right by ``shift``, into a new buffer if they don't fit into this one."""
        to = slice(used.start + shift, used.stop + shift)
        fits = self.keys.shape[::2] == (slots, columns) and (to.stop <= used.start or to == used)
        for name, states in (("keys", self.keys), ("values", self.values)):
            # Zeros, because masked values must be finite, too.
            room = states if fits else states.new_zeros(slots, states.shape[1], columns, states.shape[3])
            room[:rows, :, to] = states[:rows, :, used]
            setattr(self, name, room)

    def copy_row(self, source: int, to: int, begin: int) -> None:
        for states in (self.keys, self.values):
            states[to, :, begin : self._slots.end] = states[source, :, begin : self._slots.end]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the newest token's states, [B, H, 1, D], and return those of all used columns, [B, H, T, D]."""
        rows, start, end = len(key_states), self._slots.start, self._slots.end
        self.keys[:rows, :, end - 1 : end] = key_states
        self.values[:rows, :, end - 1 : end] = value_states
        return self.keys[:rows, :, start:end], self.values[:rows, :, start:end]

    def get_seq_length(self) -> int:
        """Return the number of columns used before the newest token."""
        return self._slots.end - 1 - self._slots.start

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """Return -1: there is no maximum."""
        return -1

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: all is initialised."""
