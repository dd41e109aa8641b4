"""The runs that a server shows from their folders: one, or all below a folder."""

import threading
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

from deploy.control_plane.files.run_folder import RunFolder
from deploy.control_plane.web.paging import Page, cut
from deploy.control_plane.web.refusal import Refusal
from schemas.control_api.run_folders import Runs

OPEN = 32
"""Runs whose metrics are kept in memory."""


class Archive:
    """Runs by name. Several threads may use it at once."""

    def __init__(self, parent: Path | None = None, watched: RunFolder | None = None) -> None:
        """parent: the folder of runs' folders, or a run's. watched: the run whose broker this server reads."""
        self._parent = parent
        self._watched = watched
        self._open: OrderedDict[str, RunFolder] = OrderedDict()
        self._lock = threading.Lock()

    def runs(self, page: Page) -> Runs:
        """Return a page of all runs by name, an order that does not change while they run."""
        with self._lock:
            heads = [head for folder in self._folders() if (head := folder.head()) is not None]
        shown, following = cut(heads, lambda head: (0, head.name), page)
        return Runs(runs=shown, live=self._watched.name if self._watched else None, next=following)

    def find(self, name: str) -> RunFolder:
        """Return the folder of a run; Refusal when there is no such run."""
        with self._lock:
            found = self._open.get(name) or next((one for one in self._folders() if one.name == name), None)
            if found is None:
                raise Refusal(404, f"no run {name!r} here: GET /v1/runs lists them")
            self._open[name] = found
            self._open.move_to_end(name)
            while len(self._open) > OPEN:
                self._open.popitem(last=False)
            return found

    def _folders(self) -> Iterator[RunFolder]:
        if self._watched is not None:
            yield self._watched
        if self._parent is None:
            return
        is_run = RunFolder(self._parent).head() is not None
        for path in [self._parent] if is_run else sorted(self._parent.glob("*")):
            if path.is_dir():
                known = self._open.get(path.name)
                yield known if known is not None and known.path == path else RunFolder(path)
