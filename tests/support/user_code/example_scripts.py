"""The scripts in examples/, imported from their files: no package holds them."""

import importlib.util
from pathlib import Path
from types import ModuleType

EXAMPLES = Path(__file__).parents[3] / "examples"


def load_script(name: str) -> ModuleType:
    """Import a file of examples/, by its path from there."""
    file = EXAMPLES / name
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
