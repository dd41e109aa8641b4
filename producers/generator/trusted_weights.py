"""The state machine that decides which weight versions of one generator may be used, and which tokens may leave it.

It has no I/O. A version is checked when its probe passed; no token of an unchecked or rejected version is trusted.
Tokens that another generator sampled were trusted there: they are here, too, until their version is loaded.
"""

from collections.abc import Iterable, Sequence

from schemas.errors import DataError
from schemas.messages import Span


class TrustedWeights:
    """The weight versions of one engine, as its loads and probes go. version: the one in use, -1 before the first.

    Each load is announced by ``loading``, then ended by ``passed`` or ``rejected``; after a rejection the engine either
    keeps the version in use, or ``restoring`` announces that it loads that version again, up to its ``passed``.
    """

    def __init__(self) -> None:
        self.version = -1
        self.rejected_versions: set[int] = set()
        self._newest_loaded = self._loading = -1
        self._vouched: set[int] = set()
        self._checked = False
        self._restoring = False

    def loading(self, version: int) -> None:
        """Note that the engine begins to load ``version``: no task may begin until its probe passed."""
        self._checked = False
        self._loading = version
        self._vouched.discard(version)
        self._newest_loaded = max(self._newest_loaded, version)

    def passed(self, version: int) -> None:
        """Note that the engine has the weights of ``version``, and that they are the published ones."""
        self.version, self._checked, self._restoring = version, True, False

    def vouch(self, versions: Iterable[int]) -> None:
        """Trust versions that another generator has checked, as long as they are neither loaded nor rejected here."""
        self._vouched.update(version for version in versions if version != self._loading)

    def rejected(self, version: int) -> None:
        """Note that a version was rejected: its tokens are never trusted."""
        self.rejected_versions.add(version)

    def restoring(self) -> None:
        """Trust no token until the version in use is loaded again and ``passed``."""
        self._restoring = True

    def may_begin(self, version: int) -> bool:
        """Return whether a task that needs ``version`` or a newer one may begin."""
        return self._checked and self.version >= version

    def is_decided(self, spans: Sequence[Span]) -> bool:
        """Return whether the version of each span is checked or rejected. DataError if one was in use nowhere."""
        newest = max((span.version for span in spans if span.version not in self._vouched), default=-1)
        if newest > self._newest_loaded:
            raise DataError(f"its spans name weights version {newest}, which was never in use here")
        return all(self._is_trusted(span) or span.version in self.rejected_versions for span in spans)

    def trusted_length(self, spans: Sequence[Span], length: int) -> int:
        """Return how many of a sample's first ``length`` tokens are of checked versions."""
        return min((span.start for span in spans if not self._is_trusted(span)), default=length)

    def _is_trusted(self, span: Span) -> bool:
        checked = span.version <= self.version or span.version in self._vouched
        return checked and span.version not in self.rejected_versions and not self._restoring
