"""The sandbox of agents that are programs: it can read the configuration's folder and write the file of its result."""

import asyncio
import functools
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from producers.agents.workers import jail_relay
from schemas.config import AgentsConfig
from schemas.errors import ConfigError
from schemas.system.sandbox.bubblewrap import UID, bwrap_command
from schemas.system.sandbox.jail import choose
from schemas.system.sandbox.limits import Limits, Mount, find_interpreter

_RELAY = Path(jail_relay.__file__).read_bytes()
_NO_LIMIT_S = 1e6
_PROCESSES = 256
_PORT = 8000
"""The endpoint's port in a sandbox, where all ports are free."""
_DISK_MB = 512
RESULT = "result.json"


class AgentJail:
    """Sandboxes for the agents of a generator, and their way to the endpoint. ConfigError if they are not available."""

    def __init__(self, base: Path, settings: AgentsConfig, run_folder: Path | None = None) -> None:
        """run_folder: of the run, which agents must not see: its broker's socket would make them administrators."""
        choose("bwrap")
        self._base = base.resolve()
        own = [run_folder, run_folder / "broker"] if run_folder is not None else []
        self._hidden = [path.resolve() for path in (*own, self._base / "runs", Path("runs"))]
        if os.geteuid() == 0 and self._base.stat().st_mode & 0o005 != 0o005:
            raise ConfigError(
                f"generator.agents.sandbox bwrap: if the service runs as root, agents run as another user, who"
                f" can't read {self._base}: chmod o+rx"
            )
        self._settings = settings
        self._ours = find_interpreter()
        self._theirs = find_interpreter(str(settings.python)) if settings.python else find_interpreter()
        self._folder = tempfile.TemporaryDirectory(prefix="tidemill-endpoint-")
        self._socket = Path(self._folder.name) / "socket"
        self._server: asyncio.Server | None = None
        self._lock = asyncio.Lock()

    async def start(self, base_url: str) -> None:
        """Open the way to the endpoint; a second call does nothing."""
        async with self._lock:
            if self._server is not None:
                return
            address = urlsplit(base_url)
            if address.scheme != "http" or address.hostname is None:
                raise ConfigError(f"generator.agents.sandbox bwrap needs an endpoint with http, not {base_url}")
            carry = jail_relay.relay(functools.partial(asyncio.open_connection, address.hostname, address.port or 80))
            self._server = await asyncio.start_unix_server(carry, self._socket)
            # Only sandboxes can enter its folder.
            self._socket.chmod(0o666)

    async def close(self) -> None:
        """Stop the relay, and delete the folder."""
        if self._server is not None:
            self._server.close()
        self._folder.cleanup()

    def command(
        self, command: Sequence[str], episode: Path, base_url: str, env: Mapping[str, str]
    ) -> tuple[list[str], dict[str, str]]:
        """Return the command that runs the agent in its sandbox, and its environment.

        episode: its folder, of which the agent sees ``agent``, and writes RESULT there: of the disk it gets one file.
        """
        address = urlsplit(base_url)
        inside = f"127.0.0.1:{_PORT}"
        made = episode / "sandbox"
        (made / "job").mkdir(parents=True)
        (made / "job" / "relay.py").write_bytes(_RELAY)
        given = episode / "agent"
        result = given / RESULT
        result.touch()
        if os.geteuid() == 0:
            for path in (given, *given.iterdir()):
                os.chown(path, UID, UID)
            for path in (episode, made, made / "job"):
                path.chmod(0o755)
        mounts = [
            Mount(self._base),
            *self._ours.mounts,
            *self._theirs.mounts,
            Mount(given),
            Mount(result, writable=True),
            Mount(self._socket, writable=True),
        ]
        hidden = [path for path in self._hidden if self._base in path.parents and path.is_dir()]
        mounts += [Mount(path, hidden=True) for path in hidden if not any(other in path.parents for other in hidden)]
        unique = list({mount.path: mount for mount in mounts}.values())
        limits = Limits(_NO_LIMIT_S, _NO_LIMIT_S, self._settings.memory_mb, 0, _PROCESSES, _DISK_MB)
        program = [*self._ours.command, "{job}/relay.py", str(self._socket), str(_PORT), str(self._base), *command]
        bins = [str(Path(self._theirs.command[0]).parent), "/usr/local/bin", "/usr/bin", "/bin"]
        shown = {name: value.replace(address.netloc, inside) for name, value in env.items()}
        shown |= {"PATH": ":".join(bins), "HOME": "/tmp", "TMPDIR": "/tmp"}
        return bwrap_command(program, limits, made, unique), shown
