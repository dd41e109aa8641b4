"""A generator's copy of the weights: brought to a version by the cheapest route, and checked as a whole.

If that fails in any way, the copy is dropped, and the version is fetched again from a whole one.
"""

import os
import shutil
from pathlib import Path

import numpy as np
import structlog

from broker.weights.delta import apply_delta
from broker.weights.store import WeightStore
from broker.weights.versions import Route, find_route
from schemas.digests import chunk_digests, verify
from schemas.errors import DiskError, InfraError
from schemas.messages import Manifest

log = structlog.get_logger()


class LocalWeights:
    """A copy whose ``fetch`` returns a safetensors file of a version, unchanged until the next ``fetch``::

    copy = LocalWeights(broker.weights, folder)
    await engine.load(copy.fetch(manifest), manifest.version)

    folder: of this reader alone; it holds at most one state, and a second one during a fetch.
    """

    def __init__(self, store: WeightStore, folder: Path) -> None:
        self._store = store
        self._folder = folder
        self._state = folder / "state.safetensors"
        self._links = folder / "shared"
        self._held: Manifest | None = None
        self._path = self._state
        shutil.rmtree(self._links, ignore_errors=True)

    def fetch(self, manifest: Manifest) -> Path:
        """Return a verified file of this version. InfraError if no route leads to it, DiskError if the disk fails."""
        published = self._store.published()
        errors: list[InfraError] = []
        for route in self._routes(manifest, published):
            try:
                return self._follow(route, manifest)
            except InfraError as error:
                errors.append(error)
            except OSError as error:
                errors.append(DiskError(f"weights cannot be copied to {self._folder}: {error}"))
            log.warning("a route to new weights failed", version=manifest.version, error=str(errors[-1]))
        raise errors[0] if errors else InfraError(f"a part of weights version {manifest.version} is gone")

    def _routes(self, manifest: Manifest, published: list[Manifest]) -> list[Route]:
        """List routes, the cheapest first; a whole state may also have been put back, or be held by another reader."""
        candidates = [find_route(published, manifest)]
        if self._held is not None:
            candidates.append(find_route(published, manifest, self._held))
        routes = [route for route in candidates if route is not None]
        direct = Route(manifest, ())
        if direct not in routes and self._store.has(manifest.state):
            routes.append(direct)
        return sorted(routes, key=lambda route: route.size)

    def _follow(self, route: Route, target: Manifest) -> Path:
        if route.start is not None:
            path = self._hold(self._store.fetch(route.start.state, self._folder))
            if path != self._path:
                self.drop()
            self._path = path
        elif self._held is None:
            raise InfraError("the copy of the version before was dropped")
        self._held = None
        if route.deltas:
            self._own()
            for manifest in route.deltas:
                self._apply(manifest)
            verify("the state after its deltas", chunk_digests(self._path), target.state.chunks)
        self._held = target
        self._store.offer(target.state, self._path)
        return self._path

    def drop(self) -> None:
        """Delete the copy; the next version comes from a whole one."""
        self._held = None
        self._store.withdraw()
        if self._path.is_relative_to(self._folder):
            self._path.unlink(missing_ok=True)

    def _hold(self, path: Path) -> Path:
        """Link a shared file, because the trainer deletes it once newer versions are published."""
        if path.parent == self._folder:
            return path
        link = self._links / path.name
        self._links.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        try:
            os.link(path, link)
        except FileNotFoundError as error:
            raise InfraError(f"{path} was deleted while it was fetched") from error
        except OSError:
            # On another file system, or one without links, the file must be loaded before the trainer deletes it.
            return path
        return link

    def _own(self) -> None:
        """Copy the state to where it can be changed, because a shared file must not be."""
        self._store.withdraw()
        if self._path == self._state:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        if self._path.parent == self._folder:
            os.replace(self._path, self._state)
        else:
            aside = self._state.with_suffix(".part")
            shutil.copyfile(self._path, aside)
            os.replace(aside, self._state)
            if self._path.is_relative_to(self._folder):
                self._path.unlink(missing_ok=True)
        self._path = self._state

    def _apply(self, manifest: Manifest) -> None:
        if manifest.delta is None:
            raise InfraError(f"version {manifest.version} has no delta")
        file = self._store.fetch(manifest.delta.payload, self._folder)
        state = np.memmap(self._path, np.uint8, mode="r+")
        with file.open("rb") as stream:
            apply_delta(state, stream)
        if file.parent == self._folder:
            file.unlink()
