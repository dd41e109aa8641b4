"""The cost of tests by folder, from what ``pytest --junit-xml=FILE`` wrote: ``python -m tools.costs FILE...``."""

import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree


def costs(files: Iterable[Path], depth: int = 3) -> dict[str, tuple[int, float, float]]:
    """Return the number of tests, their wall seconds and their processor seconds, by the first ``depth`` folders."""
    found: dict[str, tuple[int, float, float]] = defaultdict(lambda: (0, 0.0, 0.0))
    for case in (case for file in files for case in ElementTree.parse(file).iter("testcase")):
        folder = "/".join(case.get("classname", "").split(".")[:depth])
        used = sum(float(one.get("value", 0)) for one in case.iter("property") if one.get("name") == "processor_s")
        count, wall, processor = found[folder]
        found[folder] = (count + 1, wall + float(case.get("time", 0)), processor + used)
    return dict(sorted(found.items(), key=lambda item: -item[1][2]))


def main() -> None:
    """Print a line for each folder, the dearest first, and their sum."""
    lines = costs(map(Path, sys.argv[1:]))
    total = tuple(sum(line[at] for line in lines.values()) for at in range(3))
    print("processor s    wall s   tests  folder")
    for folder, (count, wall, processor) in [*lines.items(), ("all", total)]:
        print(f"{processor:11.1f} {wall:9.1f} {count:7}  {folder}")


if __name__ == "__main__":
    main()
