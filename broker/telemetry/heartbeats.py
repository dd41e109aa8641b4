"""Heartbeats of services, by the broker's clock."""

from collections.abc import Collection

from broker.connection.connection import RunData
from schemas.codec import encode, try_decode
from schemas.messages import Heartbeat

FORGOTTEN_S = 600
"""Seconds of silence after which a service is no longer listed."""
COUNTED = b"ok"
SENT = (COUNTED, b"later")


class Heartbeats(RunData):
    """The last heartbeat of each service."""

    def send(self, heartbeat: Heartbeat) -> bytes:
        """Send a heartbeat, stamped with the broker's clock. Tried once: the next one comes soon.

        Return one of SENT: whether its device seconds were counted, which waits until a trainer has taken the run over.

        The same thread renews leases, which must not wait for a retry.
        """
        return self._send(heartbeat, once=True)

    def claim(self, heartbeat: Heartbeat, left: bytes) -> bytes:
        """Send the first heartbeat of a process that must be the only one of its name; return SENT if it got the name.

        Otherwise nothing is stored, and the heartbeat of the name's owner is returned. left: bytes of the heartbeat
        that a dead process is known to have left under this name, b"" for none; any other is of a living process.
        """
        return self._send(heartbeat, left)

    def _send(self, heartbeat: Heartbeat, *left: bytes, once: bool = False) -> bytes:
        heartbeat.time = self.read_clock(once)
        answer: bytes = self._connection.run_script(
            "heartbeat", heartbeat.service, encode(heartbeat), FORGOTTEN_S, *left, once=once
        )
        return answer

    def read_clock(self, once: bool = False) -> float:
        """Return Unix seconds by the broker's clock."""
        seconds, micros = self._connection.run_command("reading the broker's clock", "time", once=once)
        return float(seconds) + float(micros) / 1e6

    def remove(self, service: str) -> None:
        """Remove a service that ends on purpose. Tried once, so that the exit is not delayed."""
        self._connection.run_command("leaving", "hdel", self._keys.services, service, once=True)

    def read(self, service: str) -> Heartbeat | None:
        """Return the last heartbeat of a service; None if there is none, or one of another version of Tidemill."""
        return try_decode(self.read_bytes(service), Heartbeat)

    def read_bytes(self, service: str) -> bytes:
        """Return the last heartbeat of a service as it was sent, b"" if there is none."""
        body = self._connection.run_command("reading a heartbeat", "hget", self._keys.services, service)
        return body or b""

    def read_age_s(self, service: str) -> float | None:
        """Return the seconds since the last heartbeat of a service, by the broker's clock; None if there is none."""
        heartbeat = self.read(service)
        return None if heartbeat is None else max(0.0, self.read_clock() - heartbeat.time)

    def list_heard(self, within_s: float, roles: Collection[str] = ()) -> list[str]:
        """List the services with a readable heartbeat of the last ``within_s`` seconds, by name; roles: only these."""
        now = self.read_clock()
        heard = (heartbeat for heartbeat in self.list() if now - heartbeat.time < within_s)
        return [heartbeat.service for heartbeat in heard if not roles or heartbeat.role in roles]

    def list(self) -> list[Heartbeat]:
        """List the last heartbeat of every service by name, except those of another version of Tidemill."""
        by_name = self._connection.run_command("listing services", "hgetall", self._keys.services)
        found = [heartbeat for body in by_name.values() if (heartbeat := try_decode(body, Heartbeat)) is not None]
        return sorted(found, key=lambda heartbeat: heartbeat.service)
