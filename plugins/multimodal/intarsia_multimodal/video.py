"""Reading video: a file's facts without decoding, and its frames one by one; or frames that are given as images."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy
from intarsia.errors import UsageError

from intarsia_multimodal.config import ReadingConfig
from intarsia_multimodal.contracts import MediaError
from intarsia_multimodal.media import header_size, opened, pixels

CONTAINERS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,gif,mpegts,mpeg,mpegvideo,flv,ogg,asf"
"""Formats that hold their frames themselves; playlists name other files."""


@dataclasses.dataclass(frozen=True, slots=True)
class VideoFacts:
    """How many frames there are, how many in a second, and their size."""

    frames: int
    fps: float
    height: int
    width: int


@contextlib.contextmanager
def opened_video(data: bytes | str, reading: ReadingConfig) -> Iterator[tuple[Any, Any]]:
    """A file's container and its first video stream. Errors: MediaError; UsageError without PyAV."""
    try:
        import av
    except ImportError as error:
        raise UsageError(
            "Video files need PyAV, which is not installed: pip install 'intarsia-multimodal[video]'. Videos that are given as frames do not need it."
        ) from error
    with opened(data, reading) as file:
        hint = f"; it is damaged, or no video of a format that is read ({CONTAINERS.replace(',', ', ')})"
        try:
            with av.open(file, options={"format_whitelist": CONTAINERS, "protocol_whitelist": ""}) as container:
                hint = ""
                if not container.streams.video:
                    raise MediaError("it has no video stream")
                stream = container.streams.video[0]
                if stream.codec_context is None:
                    raise MediaError("there is no decoder for its codec")
                yield container, stream
        except (av.FFmpegError, ValueError, EOFError) as error:
            raise MediaError(f"it cannot be decoded: {type(error).__name__}: {error}{hint}") from error


def facts(data: bytes | str, reading: ReadingConfig) -> VideoFacts:
    """Facts of a file from its headers; where these do not count the frames, its packets are counted, without decoding. Errors: MediaError."""
    with opened_video(data, reading) as (container, stream):
        height, width = stream.codec_context.height, stream.codec_context.width
        rate = stream.average_rate or stream.guessed_rate
        count = stream.frames or sum(1 for packet in container.demux(stream) if packet.size)
    if not count:
        raise MediaError("it has no frames")
    if not height or not width or not rate:
        raise MediaError(f"its header does not say its size and frames per second ({width} x {height}, {rate})")
    if height * width > reading.max_source_pixels:
        raise MediaError(
            f"its frames have {width} x {height} pixels, and reading.max_source_pixels is {reading.max_source_pixels}: not decoded"
        )
    fps = float(rate)
    if count / fps > reading.max_video_seconds:
        raise MediaError(f"it lasts {count / fps:.0f} seconds, and reading.max_video_seconds is {reading.max_video_seconds:g}")
    return VideoFacts(count, fps, height, width)


def frames(data: bytes | str, numbers: Sequence[int], reading: ReadingConfig) -> Iterator[numpy.ndarray]:
    """The frames of these numbers, which rise, uint8 [height, width, 3]. Errors: MediaError where there are fewer than the header said."""
    wanted, place = list(numbers), 0
    with opened_video(data, reading) as (container, stream):
        number = -1
        for number, frame in enumerate(container.decode(stream)):
            if number != wanted[place]:
                continue
            array = frame.to_ndarray(format="rgb24")
            while place < len(wanted) and wanted[place] == number:
                yield array
                place += 1
            if place == len(wanted):
                return
    raise MediaError(f"it ends after {number + 1} frames, and frame {wanted[place]} is needed, which its header speaks of")


def given_facts(data: Sequence[bytes], fps: float, reading: ReadingConfig) -> VideoFacts:
    """Facts of a video whose frames are given. Errors: MediaError where there is none, or they have different sizes."""
    if not data:
        raise MediaError("it has no frames")
    found: dict[tuple[int, int], int] = {}
    for number, frame in enumerate(data):
        try:
            found.setdefault(header_size(frame, reading), number)
        except MediaError as error:
            raise MediaError(f"frame {number}: {error}") from error
    if len(found) > 1:
        (first, _), (other, number) = list(found.items())[:2]
        raise MediaError(f"frame 0 has {first[1]} x {first[0]} pixels and frame {number} {other[1]} x {other[0]}; they must be alike")
    return VideoFacts(len(data), fps, *next(iter(found)))


def given_frames(data: Sequence[bytes], reading: ReadingConfig) -> Iterator[numpy.ndarray]:
    """The frames that are given. Errors: MediaError."""
    for number, frame in enumerate(data):
        try:
            yield pixels(frame, reading)
        except MediaError as error:
            raise MediaError(f"frame {number}: {error}") from error
