"""How other programs reach an inference server that an engine has launched out of their reach."""

import os
import shutil
import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO
from unittest.mock import patch

from producers.engines.http.engine import HttpEngine

KEY = "KEY_OF_THE_SERVER"


@contextmanager
def reached(engine: HttpEngine) -> Iterator[dict[str, str]]:
    """The settings of generator.http by which the server of ``engine`` is reached: with its key, or past its socket."""
    place = engine._place
    assert place is not None
    if not place.socket.is_socket():
        with patch.dict(os.environ, {KEY: place.key}):
            yield {"url": engine.client.url, "api_key_env": KEY}
        return

    class Relay(socketserver.StreamRequestHandler):
        wbufsize = rbufsize = 0

        def handle(self) -> None:
            with socket.socket(socket.AF_UNIX) as server:
                server.connect(str(place.socket))
                with server.makefile("rwb", 0) as there:
                    back = threading.Thread(target=_pass_on, args=(there, self.wfile), daemon=True)
                    back.start()
                    _pass_on(self.rfile, there)
                    server.shutdown(socket.SHUT_WR)
                    back.join(60)

    class Relays(socketserver.ThreadingTCPServer):
        daemon_threads, block_on_close = True, False

    with Relays(("127.0.0.1", 0), Relay) as relays:
        threading.Thread(target=relays.serve_forever, daemon=True).start()
        yield {"url": f"http://127.0.0.1:{relays.server_address[1]}"}
        relays.shutdown()


def _pass_on(source: BinaryIO, sink: BinaryIO) -> None:
    try:
        shutil.copyfileobj(source, sink, 1 << 16)
    except OSError:
        return
