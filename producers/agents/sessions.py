"""The sessions of a generator, found by their unguessable tokens."""

from collections import OrderedDict

from producers.agents.protocol import SessionError
from producers.agents.session import ENDED, Session

REMEMBERED = 10_000
"""The number of ended sessions that are answered with 410 instead of 401, which makes clients give up."""


class Sessions:
    """Running sessions by token; of ended ones only the token is kept."""

    def __init__(self) -> None:
        self._running: dict[str, Session] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()

    def add(self, session: Session) -> None:
        """Add a running session."""
        self._running[session.token] = session

    def end(self, session: Session) -> None:
        """End a session: its token is rejected from now on."""
        session.end()
        if self._running.pop(session.token, None) is not None:
            self._ended[session.token] = None
            while len(self._ended) > REMEMBERED:
                self._ended.popitem(last=False)

    def find(self, token: str) -> Session:
        """Return the running session of a token. SessionError 410 if it has ended, 401 if there was none."""
        session = self._running.get(token)
        if session is not None:
            return session
        if token in self._ended:
            raise SessionError(410, "session_ended", ENDED)
        raise SessionError(401, "invalid_api_key", "unknown session: use the address or key that the agent was given")
