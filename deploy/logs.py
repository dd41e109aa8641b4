"""Logging of a process and its libraries, as text on a terminal, otherwise JSON; lines have run, role and service."""

import contextlib
import errno
import logging
import os
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any, TextIO, cast

import structlog

from schemas.config import TidemillConfig


class LossyStream:
    """A stream that drops what can't be written, as on a full disk. /dev/null replaces a closed pipe or terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        return self._try(self._stream.write, text) or 0

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, act: Callable[..., int | None], *given: str) -> int | None:
        try:
            return act(*given)
        except OSError as error:
            if error.errno in (errno.EPIPE, errno.EIO):
                # What is left in its buffer would fail once more, at the end of this process.
                with contextlib.suppress(OSError), open(os.devnull, "wb") as nowhere:
                    os.dup2(nowhere.fileno(), self._stream.fileno())
            return None


def lossy(stream: TextIO) -> TextIO:
    """Return a stream that never fails, see ``LossyStream``."""
    return cast(TextIO, LossyStream(stream))


def configure_logging(config: TidemillConfig, role: str, name: str, stream: TextIO | None = None) -> None:
    """Set up structlog and the standard library's logging for one process. ``name`` is the service's."""
    stream = sys.stderr if stream is None else stream
    # Libraries draw progress bars into logs otherwise; an environment that wants them says so.
    os.environ.setdefault("TQDM_DISABLE", "1")
    coloured, output = stream.isatty(), lossy(stream)
    human = config.log.format == "human" or (config.log.format == "auto" and coloured)
    level = logging.getLevelNamesMapping()[config.log.level.upper()]
    context = {"run": config.run.name, "role": role, "service": name}
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="%H:%M:%S" if human else "iso", utc=not human),
    ]
    render: list[structlog.typing.Processor]
    if human:
        render = [structlog.dev.ConsoleRenderer(colors=coloured)]
    else:
        shared.append(lambda logger, method, event: {**event, **context, **event})
        render = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]
    structlog.configure(
        processors=[*shared, *render],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(file=output),
    )
    handler = logging.StreamHandler(output)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *render],
            foreign_pre_chain=[structlog.stdlib.add_logger_name, *shared],
        )
    )
    # Libraries speak up from warnings on; at debug they say everything.
    logging.basicConfig(
        level=level if level <= logging.DEBUG else max(level, logging.WARNING), handlers=[handler], force=True
    )
    sys.excepthook = _log_crash


def _log_crash(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        return
    structlog.get_logger().critical("service crashed", exc_info=(kind, error, trace))
