"""The program that puts itself and what it starts under sandlock: ``python sandlock_stage.py SETTINGS PROGRAM...``.

SETTINGS are keywords of sandlock's Sandbox, as JSON. Exit code 125 means that there is no sandbox.
"""

import json
import os
import sys


def main() -> None:
    """Run the program to its end, and end with its exit code."""
    try:
        from sandlock import Sandbox

        code = Sandbox(**json.loads(sys.argv[1])).run_interactive(sys.argv[2:])
    except Exception as error:  # noqa: BLE001 - another package's: whatever is wrong, nothing was started
        print(f"sandlock: {type(error).__name__}: {error}", file=sys.stderr)  # noqa: T201
        os._exit(125)
    os._exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
