"""The order in which a run takes its prompts: a position becomes an epoch and an index.

Each epoch is a fresh permutation of the dataset, computed for one position at a time in
constant memory and equal on every machine. Only the position is state, so a restart loses nothing.
"""

import hashlib

_ROUNDS = 6


class PromptOrder:
    """Positions 0, 1, 2, … without end over a dataset of ``length`` examples.

    The permutation of an epoch is a Feistel network over the next power of four, walked until the
    result falls inside the dataset (cycle walking: Black and Rogaway 2002, "Ciphers with Arbitrary
    Finite Domains"). BLAKE2b keyed by seed and epoch is the round function.
    """

    def __init__(self, length: int, seed: int = 0, shuffle: bool = True) -> None:
        if length < 1:
            raise ValueError(f"an order needs 1 example or more, has {length}")
        self.length = length
        self.seed = seed
        self.shuffle = shuffle
        self._half_bits = max(1, ((length - 1).bit_length() + 1) // 2)

    def at(self, position: int) -> tuple[int, int]:
        """Epoch and example index of ``position`` (0 or more)."""
        if position < 0:
            raise ValueError(f"position {position} must be 0 or more")
        epoch, index = divmod(position, self.length)
        if self.shuffle:
            key = hashlib.blake2b(f"{self.seed}:{epoch}".encode(), digest_size=16).digest()
            index = self._feistel(key, index)
            while index >= self.length:
                index = self._feistel(key, index)
        return epoch, index

    def _feistel(self, key: bytes, value: int) -> int:
        bits = self._half_bits
        mask = (1 << bits) - 1
        left, right = value >> bits, value & mask
        for step in range(_ROUNDS):
            block = b"%d:%d" % (step, right)
            digest = hashlib.blake2b(block, digest_size=8, key=key).digest()
            left, right = right, left ^ (int.from_bytes(digest, "little") & mask)
        return left << bits | right
