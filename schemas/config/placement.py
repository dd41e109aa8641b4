"""Which GPUs of a machine the trainer and the generators have."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from schemas.config.base import Section

RANGE = re.compile(r"(\d{1,4})(?:-(\d{1,4}))?")
"""One number, or the first and the last of a range."""


def count_gpus(count: int) -> str:
    """Return a number of GPUs in words, such as ``1 GPU``."""
    return f"{count} GPU{'' if count == 1 else 's'}"


def parse_ranges(text: str) -> list[int]:
    """Return the numbers that ranges such as ``0-3,6`` name, in order; ValueError says what is allowed."""
    numbers: list[int] = []
    for part in text.split(","):
        found = RANGE.fullmatch(part.strip())
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if first > last:
            raise ValueError(f"placement: {text!r} names no GPUs, must be numbers and ranges such as 0-3,6")
        numbers.extend(range(first, last + 1))
    if len(set(numbers)) < len(numbers):
        raise ValueError(f"placement: {text!r} names a GPU twice")
    return numbers


AUTO = "auto"


def _check(text: str) -> str:
    if text != AUTO:
        parse_ranges(text)
    return text


Ranges = Annotated[str, AfterValidator(_check)]
"""GPUs of a machine, by their place in the order of CUDA_VISIBLE_DEVICES."""


class PlacementConfig(Section):
    """The GPUs of a machine for the trainer and the generators, with the launcher local.

    Instead of the section, auto stands for what `tidemill plan` finds best on this machine's GPUs.
    """

    trainer: Ranges = Field(description="GPUs of the trainer, such as 0-3: as many as trainer.processes. Or auto.")
    generator: Ranges = Field(
        description="GPUs of the generators, such as 4-7. They are dealt out in order, and there are as many generators"
        " as they are enough for. GPUs that the trainer has as well are used in turns: see docs/deploy/placement.md."
        " Or auto."
    )
    balance: bool = Field(
        False,
        description="Whether the number of generators follows the plan of the rates that this run measures, with at"
        " most one change in ten minutes. There are never more than placement.generator has GPUs for.",
    )

    @model_validator(mode="after")
    def _check_auto(self) -> PlacementConfig:
        if (self.trainer == AUTO) != (self.generator == AUTO):
            raise ValueError("placement.trainer and placement.generator must both be auto, or both name GPUs")
        return self

    @property
    def is_auto(self) -> bool:
        """Whether the plan decides; the command that starts the run replaces it by GPUs."""
        return self.trainer == AUTO

    @property
    def shared(self) -> list[int]:
        """Return the GPUs that both ranges name."""
        return [] if self.is_auto else sorted(set(parse_ranges(self.trainer)) & set(parse_ranges(self.generator)))

    def engines(self, width: int) -> list[list[int]]:
        """Return the GPUs of each generator whose engine takes ``width``; ValueError if some are left over."""
        numbers = parse_ranges(self.generator)
        if len(numbers) % width:
            raise ValueError(
                f"placement.generator {self.generator!r} has {count_gpus(len(numbers))}, must be a multiple of {width}"
                " (generator.args.tensor_parallel_size)"
            )
        return [numbers[at : at + width] for at in range(0, len(numbers), width)]


def _from_word(given: Any) -> Any:
    return {"trainer": AUTO, "generator": AUTO} if given == AUTO else given


Placement = Annotated[
    PlacementConfig, BeforeValidator(_from_word, json_schema_input_type=Literal["auto"] | PlacementConfig)
]
