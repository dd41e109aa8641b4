"""Samples without a prompt of their own, each for one conversation of a user."""

from producers.datasets.base import Example


class LivePlaces:
    """Places for conversations, as many as the pipeline has slots for; the workflow ``live`` fills them."""

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> Example:
        if not 0 <= index < len(self):
            raise IndexError(f"example {index} of {len(self)}")
        return Example(text="a user's conversation")
