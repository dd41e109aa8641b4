"""What a checkpoint's .metadata may name, as several versions of Python write it."""

import pickle
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata, TensorProperties

from consumers.trainer.checkpoint.reader import SafeReader

FORMAT = _MEM_FORMAT_ENCODING.TORCH_CHANNELS_LAST


class Asked:
    """Pickled as a call of getattr; as what it gives, it is read."""

    def __init__(self, source: Any, name: str) -> None:
        self.source, self.name = source, name

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.source, self.name)


def read(folder: Path, content: Any) -> Metadata:
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata({}, planner_data=content)))
    return SafeReader(folder).read_metadata()


def test_a_member_of_an_enumeration_is_read_as_debians_python_stores_it(tmp_path: Path) -> None:
    assert read(tmp_path, Asked(_MEM_FORMAT_ENCODING, FORMAT.name)).planner_data is FORMAT


@pytest.mark.parametrize(
    ("source", "name"), [(_MEM_FORMAT_ENCODING, "__class__"), (TensorProperties, "__init__"), ("text", "format")]
)
def test_nothing_else_is_asked_for(tmp_path: Path, source: Any, name: str) -> None:
    with pytest.raises(pickle.UnpicklingError, match=f"asks for '{name}'"):
        read(tmp_path, Asked(source, name))
