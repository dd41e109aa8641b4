"""The walks of docs/architecture.md, measured: which project files a small real system enters.

``python -m tools.walks`` takes one plain optimizer step, then runs a whole system in this process (feeder, generators
with the scripted engine, a queue of rewards, and a trainer of a tiny model with evaluations, checkpoints and weight
versions), then an agent's episode, and prints how many files and functions each of them enters, and which of the
files that the page lists were not entered. ``--files`` lists the files. A test compares the page with all of it.

A function counts as entered when the profiler saw it called; modules, classes and comprehensions do not count. What
runs in processes of its own (reward workers, agents), and Lua, is not seen.
"""

from __future__ import annotations

import inspect
import re
import sys
import tempfile
import textwrap
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType

import structlog

from broker.client import Broker
from broker.connection.connection import Connection
from broker.connection.embedded import EmbeddedServer
from broker.connection.keys import Keys
from consumers.trainer.model.policy import Policy, load_model
from consumers.trainer.step.build import build_train_step
from schemas.config import BrokerConfig, TidemillConfig
from tests.support.models.tiny_model import make_tiny_model
from tests.support.runs.pausable_system import PausableSystem, small_config
from tests.support.trainer.trajectories import make_groups

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
INNER = ("<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>")
PACKAGES = ("schemas", "broker", "producers", "consumers", "deploy")
ELSEWHERE = (
    *("producers/engines/vllm/", "producers/engines/request_gate.py", "consumers/reward/", "deploy/"),
    *("producers/runner/", "broker/weights/transports/base.py"),
)
"""Beginnings of files that the small system lacks, runs in processes of their own, or that only declare."""
STEPS = 4
PLAIN = {"loss": {"name": "ppo"}, "advantage": {"name": "grpo"}}
AGENT = """
import json, urllib.request

def run(task, base_url, episode):
    messages = list(task["messages"])
    for turn in range(2):
        body = json.dumps({"model": "policy", "messages": messages}).encode()
        request = urllib.request.Request(base_url + "/chat/completions", body, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            messages.append(json.load(answer)["choices"][0]["message"])
        messages.append({"role": "user", "content": f"turn {turn}"})
    return 0.5
"""


@dataclass
class Entered:
    """Functions that were entered, by file: paths relative to the repository."""

    functions: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))

    @property
    def files(self) -> list[str]:
        """Return the files in alphabetical order."""
        return sorted(self.functions)

    @property
    def counts(self) -> tuple[int, int]:
        """Return the numbers of files and of functions."""
        return len(self.functions), sum(len(names) for names in self.functions.values())

    def of(self, *packages: str) -> list[str]:
        """Return the files whose paths begin with one of these."""
        return [file for file in self.files if file.startswith(packages)]


class Recorder:
    """A profiler that notes each project function entered, by the thread that a service was started in.

    A thread that a service starts belongs to that service.
    """

    def __init__(self) -> None:
        self.by_thread: dict[str, Entered] = defaultdict(Entered)
        self._owners: dict[int, str] = {}
        self._places: dict[CodeType, tuple[str, str] | None] = {}
        self._start = threading.Thread.start.__code__

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        """Note one event, as ``sys.setprofile`` reports it."""
        if event != "call":
            return
        code = frame.f_code
        if code is self._start:
            started = frame.f_locals["self"]
            owner = self._owner()
            if owner != "MainThread":
                self._owners[id(started)] = owner
            return
        if code not in self._places:
            self._places[code] = _place(code)
        if place := self._places[code]:
            self.by_thread[self._owner()].functions[place[0]].add(place[1])

    def _owner(self) -> str:
        thread = threading.current_thread()
        return self._owners.get(id(thread), thread.name)

    @contextmanager
    def recording(self) -> Iterator[Recorder]:
        """Record this thread and those that are started in the block."""
        threading.setprofile(self)
        sys.setprofile(self)
        try:
            yield self
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def entered(self, *threads: str) -> Entered:
        """Return what these threads entered; those of all threads if none is named."""
        merged = Entered()
        for name, entered in self.by_thread.items():
            if not threads or name.startswith(threads):
                for file, names in entered.functions.items():
                    merged.functions[file] |= names
        return merged


def _place(code: CodeType) -> tuple[str, str] | None:
    """Return the file and name of a project function; None for other code."""
    if not code.co_flags & inspect.CO_OPTIMIZED or code.co_name in (
        "<listcomp>",
        "<genexpr>",
        "<dictcomp>",
        "<setcomp>",
    ):
        return None
    try:
        file = Path(code.co_filename).relative_to(ROOT).as_posix()
    except ValueError:
        return None
    return (file, code.co_qualname) if file.split("/")[0] in PACKAGES else None


def record_step(folder: Path) -> Entered:
    """Plan and take one optimizer step: the PPO clip with GRPO's advantages, in float32 on one rank."""
    model = make_tiny_model(folder / "tiny", hidden=32, layers=1)
    step = build_train_step(small_config(model, folder, "step", PLAIN), policy=Policy(load_model(model, "float32")))
    groups = make_groups([4, 4])
    # The first step also makes what later ones keep.
    step.run(step.planner.plan(groups).batch(), version=0)
    with Recorder().recording() as recorder:
        step.run(step.planner.plan(groups).batch(), version=1)
    return recorder.entered()


def record_system(folder: Path, server: EmbeddedServer) -> dict[str, Entered]:
    """Run a whole system until its steps and its last evaluation are done; returns what each service entered."""
    config = small_config(
        make_tiny_model(folder / "tiny", hidden=32, layers=1),
        folder,
        "walks",
        PLAIN | {"steps": STEPS, "checkpoint": {"every": 2}, "publish": {"transport": "redis"}},
        eval={"every": 2, "sampling": {"n": 1, "max_tokens": 16}, "dataset": {"name": "arithmetic", "limit": 4}},
    )
    recorder = _run(config, server, lambda system: system.broker.ledger.read_state().state == "finished")
    return {name: recorder.entered(name) for name in ("trainer", "generator", "feeder", "reward")} | {
        "all": recorder.entered()
    }


def record_episode(folder: Path, server: EmbeddedServer) -> Entered:
    """Run generators whose workflow is an agent until a step is trained; returns what the generators entered."""
    (folder / "agent.py").write_text(textwrap.dedent(AGENT))
    config = small_config(
        make_tiny_model(folder / "tiny", hidden=32, layers=1),
        folder,
        "episode",
        PLAIN,
        generator={"workflow": {"name": "agent", "args": {"run": f"{folder}/agent.py:run"}}},
        reward={"terms": [{"name": "episode"}]},
        model={"max_length": 512},
    )
    recorder = _run(config, server, lambda system: system.step >= 1)
    return recorder.entered("generator")


def _run(config: TidemillConfig, server: EmbeddedServer, done: Callable[[PausableSystem], object]) -> Recorder:
    def connect() -> Broker:
        settings = BrokerConfig()
        return Broker(Connection(server.url, Keys(settings.prefix, config.run.name), settings.deadline_s), settings)

    system = PausableSystem(config, connect)
    with Recorder().recording() as recorder:
        system.start_all()
        try:
            system.wait("the end", lambda: bool(done(system)))
        finally:
            system.end(*system.running)
    return recorder


@dataclass(frozen=True)
class WrittenWalk:
    """A walk as the page lists it. stated: the number of files that its heading says."""

    title: str
    stated: int
    files: Sequence[str]


def read_page() -> list[WrittenWalk]:
    """Read the walks of docs/architecture.md."""
    text = PAGE.read_text(encoding="utf-8")
    heads = list(re.finditer(r"^\*\*(.+?)\*\* \((\d+) files\)$", text, re.M))
    ends = [head.start() for head in heads[1:]] + [text.index("\n## ", heads[-1].end())]
    return [
        WrittenWalk(head[1], int(head[2]), re.findall(r"^\| `([^`]+)` \|", text[head.end() : end], re.M))
        for head, end in zip(heads, ends, strict=True)
    ]


def read_stated_step() -> tuple[int, int]:
    """Read how many files and functions one plain step enters, as the page says."""
    found = re.search(r"enters (\d+) files and (\d+) functions", PAGE.read_text(encoding="utf-8"))
    if found is None:
        raise ValueError(f"{PAGE.name} does not say how many files and functions a step enters")
    return int(found[1]), int(found[2])


def missing(walk: WrittenWalk, entered: Collection[str]) -> list[str]:
    """Return the files of a written walk that were not entered, though the small system has them."""
    return [f for f in walk.files if f.endswith(".py") and not f.startswith(ELSEWHERE) and f not in entered]


def record_all(folder: Path) -> dict[str, Entered]:
    """Record everything, with a broker of its own; returns what was entered, by name."""
    with EmbeddedServer(folder / "broker") as server:
        return {
            "one optimizer step": record_step(folder),
            **record_system(folder, server),
            "agent's episode": record_episode(folder, server),
        }


def main() -> None:
    """Print the table."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger("error"))
    with tempfile.TemporaryDirectory(prefix="tidemill-walks-") as folder:
        recorded = record_all(Path(folder))
    print(f"{'entered by':<20} {'files':>5} {'functions':>9}")
    for name, entered in recorded.items():
        print(f"{name:<20} {entered.counts[0]:>5} {entered.counts[1]:>9}")
        if "--files" in sys.argv:
            print(textwrap.indent("\n".join(entered.files), "    "))
    everything = {file for entered in recorded.values() for file in entered.files}
    print(f"\n{'written walk':<60} {'files':>5}  not entered")
    for walk in read_page():
        print(f"{walk.title:<60} {len(walk.files):>5}  {', '.join(missing(walk, everything))}")


if __name__ == "__main__":
    main()
