"""A real server for every test that asks for one, and brokers on it that never meet."""

import gc
import itertools
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

# Before anything imports PyTorch, and for every process that tests start: threads of several at once on few cores
# spin, waiting for one another, and take three times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest
import setuptools  # noqa: F401  imported by two threads at once, as torch and vLLM do, it breaks for the whole process
import structlog

from broker.connection import connection
from schemas.system.lifecycle import importing

# Before others take it over: a service that runs in a thread here ends when its blocking read does.
connection.BLOCK_MS = 100
# Tests are collected in two thirds of the time without garbage being looked for, and what they import is not looked
# through each time that a service begins in this process, which takes half a second.
_collecting = ExitStack()
_collecting.enter_context(importing())

from broker.client import Broker  # noqa: E402
from broker.connection.connection import Connection  # noqa: E402
from broker.connection.embedded import EmbeddedServer  # noqa: E402
from broker.connection.keys import Keys  # noqa: E402
from schemas.config import BrokerConfig  # noqa: E402

# How long an example takes says nothing of what is tested: it depends on what else the machine does.
hypothesis.settings.register_profile("tidemill", deadline=None)
hypothesis.settings.load_profile("tidemill")
# For `make unit`, before a commit; `make test` takes them all.
hypothesis.settings.register_profile("quick", deadline=None, max_examples=25)
_runs = itertools.count()
_BEGAN = pytest.StashKey[float]()
pytest_plugins = ["tests.support.selection"]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> None:
    item.stash[_BEGAN] = sum(os.times()[:4])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    """Give a test's entry in the file of ``--junit-xml`` its processor seconds, with those of children that ended."""
    if call.when == "teardown":
        item.user_properties.append(("processor_s", f"{sum(os.times()[:4]) - item.stash[_BEGAN]:.2f}"))


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """The event loop of tests that are coroutines."""
    return "asyncio"


@pytest.fixture(autouse=True, scope="module")
def own_environment() -> Iterator[None]:
    """What a module's tests, or vLLM in them, set in the environment ends with the module."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


class Cycle:
    """Only the collector can end it."""

    def __init__(self) -> None:
        self.own = self


@pytest.fixture(autouse=True, scope="module")
def own_garbage(request: pytest.FixtureRequest) -> Iterator[None]:
    """A module's garbage ends with it, also where a service in this process left it out of the collector's rounds.

    Unit tests leave little, and looking for it in hundreds of modules takes longer than most of the tests.
    """
    if request.path.is_relative_to(Path(__file__).parent / "unit"):
        yield
        return
    cycle = Cycle()
    left = weakref.ref(cycle)
    yield
    del cycle
    gc.collect()
    if left() is not None:
        gc.unfreeze()
        gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def plain_logs() -> Iterator[None]:
    """What a test configures of logging ends with it: its stream is closed afterwards."""
    yield
    structlog.reset_defaults()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    """The real embedded server."""
    with EmbeddedServer(tmp_path_factory.mktemp("broker")) as server:
        yield server


@pytest.fixture
def make_broker(server: EmbeddedServer) -> Callable[..., Broker]:
    """Brokers on the real server; the same run name gives the same run."""

    def make(run: str | None = None, **settings: object) -> Broker:
        config = BrokerConfig.model_validate(settings)
        name = run or f"test-{next(_runs)}"
        return Broker(Connection(server.url, Keys(config.prefix, name), config.deadline_s), config)

    return make


@pytest.fixture
def broker(make_broker: Callable[..., Broker]) -> Broker:
    return make_broker()


@pytest.fixture
def shared_data() -> Path:
    """The real GSM8K where it lies beside the checkout; tests that need it are skipped elsewhere."""
    folder = Path(__file__).parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("no shared data beside the checkout")
    return folder


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """All is imported; from now on there is garbage to collect, elsewhere."""
    _collecting.close()


def pytest_unconfigure() -> None:
    """Give back to the collector what services that ran in this process left out of it: libraries look at the end."""
    gc.unfreeze()
