"""A feeder in a thread, until something is so."""

import threading
import time
from collections.abc import Callable

from producers.feeder import Feeder
from schemas.errors import InfraError
from schemas.system.lifecycle import StopFlag


def feed_until(
    feeder: Feeder, condition: Callable[[], object], ends_with: type[Exception] = InfraError
) -> list[Exception]:
    """Run the feeder in a thread until ``condition``, or until it ends with an error, which is in the list then."""
    stop, connection = StopFlag(), feeder._broker.connection
    errors: list[Exception] = []

    def work() -> None:
        try:
            feeder.run(stop)
        except ends_with as error:
            errors.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    deadline = time.monotonic() + 20
    while thread.is_alive() and not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    stop.set()
    while thread.is_alive():
        # It looks at its flag when its wait for a change ends: a change spares the test the rest of that second.
        connection.client.xadd(connection.keys.changes, {"test": "look"})
        thread.join(0.02)
        assert time.monotonic() < deadline + 20
    return errors
