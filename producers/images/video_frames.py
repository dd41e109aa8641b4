"""Single frames of video files, by their time; neither a file nor its frames are kept in memory as a whole."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from producers.images.prepare import MOST_PIXELS, NO_DECODER, VIDEOS
from producers.runner.environments import png_file
from schemas.errors import ConfigError, DataError

READ_ON_S = 1.0
"""A frame less than this after the last one is reached by decoding those between, any other by a jump."""


class VideoFrames:
    """Frames of videos of ``fps`` frames a second. One file is open at a time, with the frame that was returned last.

    Frames that are read in order are decoded once each. ConfigError, which begins with ``where``, without a decoder.
    """

    def __init__(self, fps: float, where: str) -> None:
        try:
            import av
        except ImportError as error:
            raise ConfigError(f"{where}: {NO_DECODER}") from error
        self._av, self._tolerance = av, 0.5 / fps
        self._file: Path | None = None
        self._opened: Any = None
        self._frames: Iterator[Any] = iter(())
        self._last: Any = None

    def frame(self, file: Path, seconds: float, where: str) -> bytes:
        """Return the frame at this time as a PNG file. DataError, which begins with ``where``, if it can't be read."""
        try:
            if file != self._file:
                self._open(file)
            found = self._find(seconds)
        except self._av.FFmpegError as error:
            self._close()
            raise DataError(f"{where}: the video {file} can't be read: {error.strerror}") from error
        if found is None:
            raise DataError(f"{where}: the video {file} has no frame at {seconds:g} s")
        return png_file(found.to_image())

    def _open(self, file: Path) -> None:
        self._close()
        # A playlist would name other files and addresses.
        self._opened = self._av.open(str(file.absolute()), "r", options={"format_whitelist": VIDEOS})
        self._file = file
        for stream in self._opened.streams.video[:1]:
            # What is damaged is an error, not a picture that the decoder guesses.
            stream.codec_context.options = {"max_pixels": str(MOST_PIXELS), "err_detect": "explode"}

    def _close(self) -> None:
        if self._opened is not None:
            self._opened.close()
        # What decodes a closed file crashes the process.
        self._file = self._opened = self._last = None
        self._frames = iter(())

    def _find(self, seconds: float) -> Any:
        """Return the frame of this time, or None if the video has no frame close to it."""
        if self._last is not None and -self._tolerance < seconds - self._last.time < READ_ON_S:
            return self._read_to(seconds)
        try:
            found = self._jump(seconds)
        except self._av.FFmpegError:
            found = None
        # A key frame may be shown after frames that need those before it: then all are decoded.
        return self._jump(seconds, start=0) if found is None else found

    def _jump(self, seconds: float, start: float | None = None) -> Any:
        """Return the frame of this time, decoded from the key frame before it, or before ``start``."""
        for stream in self._opened.streams.video[:1]:
            self._opened.seek(int((seconds if start is None else start) / stream.time_base), stream=stream)
            self._last, self._frames = None, self._opened.decode(stream)
        return self._read_to(seconds)

    def _read_to(self, seconds: float) -> Any:
        """Decode up to the frame of this time, and return it; None if it is not there."""
        while self._last is None or self._last.time < seconds - self._tolerance:
            self._last = next((frame for frame in self._frames if frame.pts is not None), None)
            if self._last is None:
                return None
        return self._last if self._last.time <= seconds + self._tolerance else None
