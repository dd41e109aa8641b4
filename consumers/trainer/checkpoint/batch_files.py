"""The batches of a run on disk, a file a step, for ``tidemill replay``; written with ``trainer.record``.

A step's file is flushed before a checkpoint covers the step, because the broker then forgets the samples. It lacks
their texts. Files of steps before the oldest checkpoint are removed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import zstandard

from consumers.trainer.checkpoint.files import refuse_older_names
from schemas.codec import BadMessage, decode, encode
from schemas.errors import ConfigError
from schemas.messages import TENANT, RecordedGroup, StepRecord, Trajectory
from schemas.system.files import atomic_write, disk_errors

if TYPE_CHECKING:
    from consumers.trainer.data.groups import Group

FOLDER = "batches"
LARGEST = 1 << 32
"""Most bytes of a step; far above what its samples may have in the broker."""
_NAME = re.compile(r"step-(\d{8,})-t(\d{4,})\.msgpack\.zst")


class BatchFiles:
    """The batch files of one run; ConfigError if an older version of Tidemill has written there.

    If a step was trained in several leader terms, the file of the last term counts.
    """

    def __init__(self, run: Path) -> None:
        self.folder = run / FOLDER
        refuse_older_names(self.folder)

    def write(self, record: StepRecord) -> None:
        """Write a record, durably and whole; DiskError if there is no room."""
        file = self.folder / f"step-{record.step:08d}-t{record.leader_term:04d}.msgpack.zst"
        content = zstandard.ZstdCompressor(write_checksum=True).compress(encode(record, LARGEST))
        with disk_errors(f"cannot write the batch of step {record.step} to {file}"):
            atomic_write(file, content, durable=True)

    def read(self, step: int) -> StepRecord:
        """Read the record of a step; ConfigError if it is missing or damaged."""
        file = self._newest().get(step)
        if file is None:
            raise ConfigError(f"the batch of step {step} is not in {self.folder}")
        try:
            content = zstandard.ZstdDecompressor().decompress(file.read_bytes())
            return decode(content, StepRecord, LARGEST)
        except (OSError, zstandard.ZstdError, BadMessage) as error:
            raise ConfigError(f"the batch of step {step} in {file} is damaged: {error}") from error

    def steps(self) -> set[int]:
        """Return the steps that have a file."""
        return set(self._newest())

    def remove_before(self, step: int) -> None:
        """Delete the files of all steps before this one."""
        for number, _, file in self._all():
            if number < step:
                file.unlink(missing_ok=True)

    def _newest(self) -> dict[int, Path]:
        return {step: file for step, _, file in sorted(self._all(), key=lambda found: found[:2])}

    def _all(self) -> list[tuple[int, int, Path]]:
        """Return step, leader term and file of each record, in any order."""
        if not self.folder.is_dir():
            return []
        found = [(match, file) for file in self.folder.iterdir() if (match := _NAME.fullmatch(file.name))]
        return [(int(match[1]), int(match[2]), file) for match, file in found]


def step_record(groups: Sequence[Group], **fields: Any) -> StepRecord:
    """Make the record of a step that trained these groups in this process. fields: the other fields of the record."""
    # Imported here: reading the files needs no PyTorch.
    import torch

    def stripped(sample: Trajectory) -> Trajectory:
        # Training reads neither the texts nor the data of a sample, but for whose it is.
        data = {name: value for name, value in sample.data.items() if name == TENANT}
        return msgspec.structs.replace(sample, prompt="", completion="", data=data)

    return StepRecord(
        threads=torch.get_num_threads(),
        torch=str(torch.__version__),
        groups=[
            RecordedGroup(
                group.task_id,
                [stripped(sample) for sample, _ in group.samples],
                [reward for _, reward in group.samples],
                dict(group.images),
            )
            for group in groups
        ],
        **fields,
    )
