"""The entry point: ``python FOLDER PROGRAM``, with the socket as stdin; ``agents --check`` only loads the agent."""

from __future__ import annotations

import importlib.util
import os
import socket
import sys
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).resolve().parent
_PACKAGE = "tidemill_runner"


def import_program(name: str) -> Any:
    """Import a module of this folder as one of a package: user code may have modules of any plain name."""
    # Python puts this folder first on the search path, where it has nothing for user code.
    sys.path[:] = [folder for folder in sys.path if Path(folder or ".").resolve() != _FOLDER]
    file = _FOLDER / "__init__.py"
    spec = importlib.util.spec_from_file_location(_PACKAGE, file, submodule_search_locations=[str(_FOLDER)])
    assert spec is not None
    sys.modules[_PACKAGE] = importlib.util.module_from_spec(spec)
    return importlib.import_module(f"{_PACKAGE}.{name}")


def take_stdin() -> socket.socket:
    """Return the socket that is stdin; afterwards user code reads nothing from stdin and prints to stderr."""
    channel = socket.socket(fileno=os.dup(0))
    os.set_inheritable(channel.fileno(), False)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    return channel


if __name__ == "__main__":
    import_program(sys.argv[1]).main(take_stdin())
