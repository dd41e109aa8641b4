"""``python -m tidemill``, the command ``tidemill``."""

import sys
from importlib.util import find_spec
from pathlib import Path


def main() -> None:
    """Run the command line, unless a package of another distribution hides one of ours."""
    home = Path(__file__).resolve().parent
    for name in ("schemas", "broker", "producers", "consumers", "deploy"):
        spec = find_spec(name)
        found = Path(spec.origin).resolve() if spec and spec.origin else None
        # In a wheel they are in _packages/, in a checkout beside this folder.
        if found is None or not {home / "_packages", home.parent} & set(found.parents):
            sys.exit(
                f"tidemill: its package {name} is hidden by another of that name, {found or 'without a file'}:"
                " install Tidemill into an environment of its own"
            )
    from deploy.cli.__main__ import main as run_command

    run_command()


if __name__ == "__main__":
    main()
