"""Samples of evaluations in the run's folder: samples/eval-VERSION.jsonl, a line for each held-out prompt."""

import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, TypeAlias

import structlog

from schemas.run_folder import SAMPLES
from schemas.system.files import atomic_write

KEEP = 100
"""Evaluations whose samples are kept: the first and the newest."""
PAGES = 100
"""Most pages that one ``write`` reads."""
OF_PROMPT = ("version", "index", "dataset", "prompt", "data")

log = structlog.get_logger()
Take: TypeAlias = Callable[[str, str], list[tuple[str, dict[str, Any]]]]
"""Returns the samples after an entry, and may forget those up to another one."""


class EvalSampleLog:
    """Collects samples until their evaluation is complete, then writes its file. Losing some harms nothing."""

    def __init__(self, folder: Path, take: Take) -> None:
        self._folder = folder / SAMPLES
        self._take = take
        self._after = "0-0"
        self._written = ""
        self._open: dict[int, dict[int, dict[str, Any]]] = {}
        """By version and prompt: the line of its file, with samples by number."""

    def write(self, complete: Collection[int]) -> None:
        """Read new samples, and write the files of complete versions; a full disk loses them."""
        self._read()
        for version in sorted(self._open.keys() & set(complete)):
            prompts = self._open.pop(version)
            file = self._folder / f"eval-{version:08d}.jsonl"
            if file.exists():
                # Samples that arrived again, after it was written.
                continue
            lines = [json.dumps(_line(prompts[index])) for index in sorted(prompts)]
            try:
                atomic_write(file, "".join(f"{line}\n" for line in lines))
                self._make_room()
            except OSError as error:
                log.warning("samples of an evaluation are not kept", file=str(file), error=str(error))
        if not self._open:
            self._written = self._after

    def _read(self) -> None:
        for _ in range(PAGES):
            found = self._take(self._after, self._written if self._written != "0-0" else "")
            for entry, line in found:
                self._after = entry
                prompts = self._open.setdefault(line["version"], {})
                known = prompts.setdefault(
                    line["index"], {name: line.get(name) for name in OF_PROMPT} | {"samples": {}}
                )
                known["samples"][line["sample"]["sample"]] = line["sample"]
            if not found:
                return

    def _make_room(self) -> None:
        files = sorted(self._folder.glob("eval-*.jsonl"))
        for file in files[1 : len(files) - KEEP + 1]:
            file.unlink(missing_ok=True)


def _line(prompt: dict[str, Any]) -> dict[str, Any]:
    samples = prompt["samples"]
    return {**prompt, "dataset": prompt["dataset"] or "", "samples": [samples[number] for number in sorted(samples)]}
