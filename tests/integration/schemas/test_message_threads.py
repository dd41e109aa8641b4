"""Messages that several threads of a process read."""

import subprocess
import sys
from pathlib import Path

READ_AT_ONCE = """
import sys, threading
from schemas.codec import decode, encode
from schemas.messages import BatchRecord, Event, GroupRef, Heartbeat, Member, Score
from tests.support.broker.prompt_groups import make_task, make_trajectory

sys.setswitchinterval(1e-6)
messages = [
    make_task(0),
    make_trajectory(0, 0),
    Score(reward=1.0, components={"a": 1.0}),
    Heartbeat(service="g", role="generator", host="h", pid=1, state="running", figures={"a": 1.0}),
    Event(name="n", service="g"),
    BatchRecord(step=0, version=0, new_version=1, groups=[GroupRef(0, [Member(0, b"1-1", b"1-2")])]),
]
bodies = [(type(message), encode(message)) for message in messages]
gate = threading.Barrier(16)

def read():
    for cls, body in bodies:
        gate.wait(30)
        decode(body, cls)

threads = [threading.Thread(target=read) for _ in range(16)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_threads_that_read_a_kind_of_message_for_the_first_time_at_once_do_not_crash() -> None:
    root = Path(__file__).parents[3]
    running = [subprocess.Popen([sys.executable, "-c", READ_AT_ONCE], cwd=root) for _ in range(4)]
    for process in running:
        assert process.wait(60) == 0
