"""Your own task: a dataset and a reward, named in config.yaml as mine.py:Products and mine.py:closeness."""

from tidemill import Example


class Products:
    """Small products, written with the characters that the tiny model of the arithmetic example knows: 3++4=12."""

    def __init__(self, first: int = 0, last: int = 9):
        self.pairs = [(a, b) for a in range(first, last + 1) for b in range(first, last + 1)]

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> Example:
        a, b = self.pairs[index]
        return Example(text=f"{a}++{b}=", data={"answer": str(a * b)})


def closeness(prompt, completion, prompt_ids, completion_ids, answer, scale=10, **data) -> float:
    """1 for the right product, less the farther off, 0 for no number. May be async, slow, or crash: see README.md."""
    text = completion.strip()
    if not text.isdecimal() or len(text) > 6:
        return 0.0
    return max(0.0, 1.0 - abs(int(text) - int(answer)) / scale)
