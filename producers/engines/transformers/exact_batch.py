"""The batch of exact mode: a row's tokens depend on its seed, its tokens so far and the weights, and on no other row.

Products and attention have a fixed order (schemas/arithmetic), and each token has a random number of its own, made from
the row's seed and the token's place. So a sample may be interrupted, resumed elsewhere or generated again: it is the
same. Rows lie in slots as in key_values.py, but all begin at the first column.
"""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from producers.engines.transformers.batching import BatchRow, ContinuousBatch, Draw, Joining, truncate
from schemas.arithmetic.attention import KEYS, Places
from schemas.arithmetic.products import TILE, distributions, fill, use_fixed_products
from schemas.errors import ConfigError, first_line

ATTENTION = "tidemill_exact"
FREE = -1


class Rows:
    """Keys and values of rows in slots, [slots, G, C, D] in each layer, that all begin at the first column.

    lengths: tokens of each slot, FREE without a row. Slots stay where they are, and a free one is used again.
    """

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self._layers: dict[int, list[Tensor]] = {}

    def add(self, count: int) -> list[int]:
        """Return slots for so many new rows."""
        slots = [slot for slot, length in enumerate(self.lengths) if length == FREE][:count]
        slots += range(len(self.lengths), len(self.lengths) + count - len(slots))
        self.lengths += [FREE] * (max(slots, default=-1) + 1 - len(self.lengths))
        for slot in slots:
            self.lengths[slot] = 0
        return slots

    def append(self, slots: Sequence[int], counts: Sequence[int]) -> tuple[list[int], list[int]]:
        """Lengthen rows; returns slot and position of each new token, in order."""
        rows, places = list[int](), list[int]()
        for slot, count in zip(slots, counts, strict=True):
            rows += [slot] * count
            places += range(self.lengths[slot], self.lengths[slot] + count)
            self.lengths[slot] += count
        return rows, places

    def write(self, layer: int, places: Places, *fresh: Tensor) -> list[Tensor]:
        """Write keys and values [1, G, N or more, D] of a pass; returns those of all slots."""
        kept = self._layers.get(layer) or [states[:0, :, :0] for states in fresh]
        self._layers[layer] = kept = [_grown(states, len(self.lengths), max(self.lengths)) for states in kept]
        for room, states in zip(kept, fresh, strict=True):
            room[places.rows, :, places.positions] = states[0, :, : len(places.rows)].transpose(0, 1)
        return kept

    def copy(self, source: int, to: int) -> None:
        self.lengths[to] = self.lengths[source]
        for states in chain(*self._layers.values()):
            states[to] = states[source]


def _grown(states: Tensor, slots: int, columns: int) -> Tensor:
    """Return states with room for so many slots and columns, and for half as many again where there was too little."""
    missing = [
        0 if wanted <= there else -(-(wanted + wanted // 2) // unit) * unit - there
        for wanted, there, unit in ((slots, states.shape[0], 1), (columns, states.shape[2], KEYS))
    ]
    return F.pad(states, (0, 0, 0, missing[1], 0, 0, 0, missing[0])) if any(missing) else states


class ExactBatch(ContinuousBatch):
    """The rows in flight, computed in a fixed order; ConfigError if the model can't be."""

    def __init__(self, model: PreTrainedModel, eos: set[int], decode: Callable[[list[int]], str]) -> None:
        super().__init__(model, eos, decode)
        use_fixed_products(model)
        model.set_attn_implementation(ATTENTION)
        self._cache, self._slot_of = Rows(), list[int]()
        self._check()

    def _join(self, wave: Sequence[Joining], version: int) -> None:
        slots = [self._cache.add(len(rows)) for _, rows in wave]
        states = self._read(self._cache, [first for first, *_ in slots], [prompt for prompt, _ in wave])
        for first, *others in slots:
            for other in others:
                self._cache.copy(first, other)
        joined = [row for _, rows in wave for row in rows]
        self.rows += joined
        self._slot_of += chain(*slots)
        counts = torch.tensor([len(rows) for _, rows in wave], device=states.device)
        self._draw(joined, states.repeat_interleave(counts, 0), version)

    def step(self, version: int) -> None:
        states = self._read(self._cache, self._slot_of, [row.tokens[-1:] for row in self.rows])
        self._draw(self.rows, states, version)
        self.drop_finished()

    def recompute(self) -> None:
        if self.rows:
            self._cache = Rows()
            self._slot_of = self._cache.add(len(self.rows))
            self._read(self._cache, self._slot_of, [[*row.prompt, *row.tokens[:-1]] for row in self.rows])

    def clear(self) -> None:
        self.rows, self._cache, self._slot_of = [], Rows(), []

    def drop_finished(self) -> None:
        kept = [index for index, row in enumerate(self.rows) if row.finish is None]
        for slot in {*self._slot_of} - {self._slot_of[index] for index in kept}:
            self._cache.lengths[slot] = FREE
        self.rows, self._slot_of = [self.rows[index] for index in kept], [self._slot_of[index] for index in kept]

    @torch.no_grad()
    def score(self, ids: Sequence[int]) -> Tensor:
        """Return the log-probability of each token after the first at temperature 1, float32 [T-1]."""
        states = self._states(Rows(), None, [ids])[:-1]
        wanted = fill(torch.tensor(ids[1:], device=states.device)).split(TILE)
        tiles = distributions(states, self._head, torch.ones(len(states), device=states.device))
        found = [tile.gather(1, tokens[:, None]) for tile, tokens in zip(tiles, wanted, strict=True)]
        return torch.cat(found)[: len(states), 0]

    @property
    def _head(self) -> Any:
        return self._model.get_output_embeddings()

    def _read(self, cache: Rows, slots: Sequence[int], texts: Sequence[Sequence[int]]) -> Tensor:
        """Append texts to the rows in slots, and return the last hidden state of each, [len(texts), H]."""
        ends = torch.tensor([len(text) for text in texts], device=self._model.device).cumsum(0) - 1
        return self._states(cache, slots, texts)[ends]

    @torch.no_grad()
    def _states(self, cache: Rows, slots: Sequence[int] | None, texts: Sequence[Sequence[int]]) -> Tensor:
        """Append texts to the rows in slots, by default new ones, and return each token's last hidden state, [N, H]."""
        slots = cache.add(len(texts)) if slots is None else slots
        rows, positions = cache.append(slots, [len(text) for text in texts])
        count, filler = len(rows), [0] * (-len(rows) % TILE)
        device = self._model.device
        places = Places(torch.tensor(rows, device=device), torch.tensor(positions, device=device))
        output = self._model.base_model(
            input_ids=torch.tensor([[*chain(*texts), *filler]], device=device),
            position_ids=torch.tensor([[*positions, *filler]], device=device),
            use_cache=False,
            exact=(cache, places),
        )
        return output.last_hidden_state[0, :count]  # type: ignore[no-any-return]

    def _draw(self, rows: Sequence[BatchRow], states: Tensor, version: int) -> None:
        """Sample the next token of each row from the last hidden states, [B, H]."""
        scales = torch.tensor([row.draw.temperature or 1.0 for row in rows], device=states.device)
        for number, logprobs in enumerate(distributions(states, self._head, scales)):
            part = rows[number * TILE : (number + 1) * TILE]
            self._take(part, *draw_exactly(logprobs, part), version)

    def _check(self) -> None:
        """Try whether a token is the same alone and beside others, in a prompt and step by step."""
        where = f"generator.exact: {type(self._model).__name__}"
        size = self._model.config.get_text_config().vocab_size
        texts = [[(7 * i + 3 * k + 1) % size for i in range(length)] for k, length in enumerate((TILE + 9, 5, KEYS))]
        try:
            alone = self._states(Rows(), None, texts[:1])
            beside = self._states(Rows(), None, texts)[: len(texts[0])]
            cache = Rows()
            self._read(cache, cache.add(2)[::-1], [texts[0][:-5], texts[1]])
            steps = [self._read(cache, [0, 1], [[1], [token]])[1] for token in texts[0][-5:]]
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(f"{where} can't be computed in a fixed order: {first_line(error)}") from error
        if not (torch.equal(alone, beside) and torch.equal(alone[-5:], torch.stack(steps))):
            raise ConfigError(f"{where} computes a token differently beside others on this machine: set it to false")


def draw_exactly(logprobs: Tensor, rows: Sequence[BatchRow]) -> tuple[list[int], list[float]]:
    """Sample one token for each row, by inversion of the distribution function; see ``draw``.

    logprobs: float32 [TILE, V], at the temperatures of the rows, of which there may be fewer.
    """
    draws = [row.draw for row in rows]
    logprobs = truncate(logprobs, [*draws, *[Draw()] * (len(logprobs) - len(draws))])
    below = logprobs.double().exp().cumsum(-1)
    wanted = torch.ones(len(logprobs), 1, dtype=torch.float64)
    for index, row in enumerate(rows):
        wanted[index] = random_number(row.draw.seed, len(row.prompt) + len(row.tokens))
    tokens = torch.searchsorted(below, wanted.to(below.device) * below[:, -1:], right=True)[: len(rows), 0]
    tokens = tokens.clamp(max=logprobs.shape[1] - 1)
    for index, each in enumerate(draws):
        if each.temperature == 0:
            tokens[index] = logprobs[index].argmax()
    return tokens.tolist(), logprobs[: len(rows)].gather(1, tokens[:, None])[:, 0].tolist()


def random_number(seed: int | None, place: int) -> float:
    """Return the random number of the token at a place of its sequence, from 0 to 1; a fresh one without a seed."""
    generator = (
        np.random.default_rng() if seed is None else np.random.Generator(np.random.Philox(key=seed, counter=place))
    )
    return float(generator.random())


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **others: Any
) -> tuple[Tensor, None]:
    """Attention of transformers' interface, of the tokens of a pass over their rows so far."""
    cache, places = others["exact"]
    window, longest = others.get("sliding_window"), max(cache.lengths)
    if others.get("softcap") or others.get("s_aux") is not None or (window is not None and window < longest):
        raise ValueError("exact attention has no soft cap, no sinks and no sliding window that leaves tokens out")
    keys, values = cache.write(int(module.layer_idx), places, key, value)  # type: ignore[arg-type]
    scaling = others.get("scaling")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return places.attend(query, keys, values, scale), None


AttentionInterface.register(ATTENTION, _attend)
AttentionMaskInterface.register(ATTENTION, lambda **_: None)
