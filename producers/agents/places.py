"""Samples without a prompt of their own, each for one conversation of a user."""

from producers.datasets.base import Example, check_index


class LivePlaces:
    """Places for conversations, as many as the pipeline has slots for; the workflow ``live`` fills them."""

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> Example:
        check_index(self, index)
        return Example(text="a user's conversation")
