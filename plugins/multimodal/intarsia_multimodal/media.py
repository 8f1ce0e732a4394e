"""Reading images: headers without decoding, then pixels as RGB. Whatever is wrong with one is a MediaError that says what."""

from __future__ import annotations

import contextlib
import http.client
import importlib
import io
import os
import stat
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import IO

import numpy
from intarsia.contracts import Media
from PIL import Image, UnidentifiedImageError

from intarsia_multimodal.config import ReadingConfig
from intarsia_multimodal.contracts import MediaError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
"""Formats that Pillow decodes itself; others (EPS, say) would start programs."""
for _name in ("Png", "Jpeg", "WebP", "Gif", "Bmp", "Tiff", "Ppm"):
    importlib.import_module(f"PIL.{_name}ImagePlugin")  # where formats are named, Pillow does not do it
ORIENTATION = 0x0112
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""What makes an image upright, by its EXIF orientation."""
CHUNK_BYTES = 1 << 16


def is_url(data: object) -> bool:
    """Whether a medium is named by an URL, of any scheme."""
    return isinstance(data, str) and "://" in data


def describe(media: Media) -> str:
    """A medium in messages: what it is, and its path or URL, or how large it is."""
    if isinstance(media.data, str):  # a file's name need not be UTF-8
        return f"{media.kind} {media.data.encode('utf-8', 'backslashreplace').decode()}"
    if isinstance(media.data, bytes):
        return f"{media.kind} of {len(media.data)} bytes"
    return f"{media.kind} of {len(media.data)} given frames"


@contextlib.contextmanager
def opened(data: bytes | str, reading: ReadingConfig) -> Iterator[IO[bytes]]:
    """A medium's bytes as a file. Errors: MediaError for a file that is missing, empty or too large, and for URLs that may not be or cannot be fetched."""
    if isinstance(data, str) and is_url(data):
        data = fetch(data, reading)
    if isinstance(data, bytes):
        check_bytes(len(data), reading)
        with io.BytesIO(data) as file:
            yield file
        return
    try:
        if not stat.S_ISREG(os.stat(data).st_mode):  # to open a pipe would be to wait for who writes into it
            raise MediaError("it cannot be read: it is no file")
        stream = open(data, "rb")  # noqa: SIM115 - closed below, apart from the errors of opening
    except (OSError, ValueError) as error:
        raise MediaError(f"it cannot be read: {getattr(error, 'strerror', None) or error}") from error
    with stream:
        check_bytes(os.fstat(stream.fileno()).st_size, reading)
        yield stream


def check_bytes(size: int, reading: ReadingConfig) -> None:
    """MediaError for an empty file, and for one above the limit."""
    if not size:
        raise MediaError("the file is empty (0 bytes)")
    if size > reading.max_file_bytes:
        raise MediaError(f"it has {size} bytes, and reading.max_file_bytes is {reading.max_file_bytes}")


def fetch(url: str, reading: ReadingConfig) -> bytes:
    """What is at an URL, within the limits of bytes and seconds. Errors: MediaError."""
    if not reading.allow_urls:
        raise MediaError(
            "it is named by an URL, and URLs are refused: what they give changes, and a run would depend on the network. Download it and name the file, or "
            "set data.loader.processor.reading.allow_urls=true"
        )
    check_scheme(url)
    until, parts, size = time.monotonic() + reading.url_timeout_s, [], 0
    opener = urllib.request.build_opener(_HttpRedirects)
    try:
        with opener.open(urllib.request.Request(url, headers={"User-Agent": "intarsia"}), timeout=reading.url_timeout_s) as answer:
            while chunk := answer.read1(CHUNK_BYTES):
                parts.append(chunk)
                size += len(chunk)
                if size > reading.max_file_bytes:
                    raise MediaError(f"it gives more than reading.max_file_bytes={reading.max_file_bytes} bytes")
                if time.monotonic() > until:
                    raise MediaError(f"it took more than reading.url_timeout_s={reading.url_timeout_s:g} seconds ({size} bytes so far)")
            if getattr(answer, "length", None):  # of what was announced, read1 does not say so
                raise MediaError(f"it cannot be fetched: it ends {answer.length} bytes before its end")
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise MediaError(f"it cannot be fetched: {error}") from error
    return b"".join(parts)


def check_scheme(url: str) -> None:
    """MediaError for anything but http and https."""
    try:
        scheme = urllib.parse.urlsplit(url).scheme
    except ValueError as error:
        raise MediaError(f"it is no URL: {error}") from error
    if scheme not in ("http", "https"):
        raise MediaError(f"it is named by an URL of scheme {scheme!r}; only http and https are fetched")


class _HttpRedirects(urllib.request.HTTPRedirectHandler):
    """Follows redirections within http and https alone."""

    def redirect_request(self, request, fp, code, msg, headers, newurl):  # type: ignore[no-untyped-def]
        """See urllib."""
        check_scheme(newurl)
        return super().redirect_request(request, fp, code, msg, headers, newurl)


@contextlib.contextmanager
def opened_image(data: bytes | str, reading: ReadingConfig) -> Iterator[tuple[Image.Image, int]]:
    """An image whose header is read and whose pixels are not, and how it is to be turned. Errors: MediaError, also for what goes wrong inside."""
    with opened(data, reading) as file:
        try:
            with Image.open(file, formats=FORMATS) as image:
                width, height = image.size
                if width * height > reading.max_source_pixels:
                    raise MediaError(
                        f"its header says {width} x {height} pixels, and reading.max_source_pixels is {reading.max_source_pixels}: not decoded"
                    )
                yield image, orientation(image)
        except (MediaError, MemoryError):
            raise
        except UnidentifiedImageError as error:
            raise MediaError(f"it is no image of a format that is read ({', '.join(FORMATS)})") from error
        except Exception as error:  # a damaged file makes decoders raise anything
            raise MediaError(f"it cannot be decoded: {type(error).__name__}: {error}") from error


def orientation(image: Image.Image) -> int:
    """How an image has still to be turned, by its EXIF orientation, 1 (it is upright) to 8, from the header alone: in a PNG, EXIF that comes after the pixels does not count."""
    if image.format == "TIFF" or (image.format == "PNG" and "exif" not in image.info):
        return 1  # Pillow turns TIFFs itself while it decodes them, and gives the sizes that they have then.
    try:
        found = image.getexif().get(ORIENTATION, 1)
    except Exception:  # damaged EXIF is no reason to refuse the pixels
        return 1
    return found if found in TURNS else 1


def header_size(data: bytes | str, reading: ReadingConfig) -> tuple[int, int]:
    """(height, width) of an image, upright, from its header. Errors: MediaError."""
    with opened_image(data, reading) as (image, turned):
        width, height = image.size
    return (width, height) if turned >= 5 else (height, width)


def pixels(data: bytes | str, reading: ReadingConfig) -> numpy.ndarray:
    """An image, of an animation the first, upright, as RGB on white: uint8 [height, width, 3]. Errors: MediaError."""
    with opened_image(data, reading) as (image, turned):
        image.load()
        upright = image.transpose(TURNS[turned]) if turned in TURNS else image
        return numpy.asarray(to_rgb(upright))


def to_rgb(image: Image.Image) -> Image.Image:
    """RGB of eight bits: of 16-bit grey levels the upper eight, transparency on white. Errors: MediaError for floating-point pixels, whose range nobody knows."""
    if image.mode == "F":
        raise MediaError("its pixels are floating-point numbers, whose range is not known; store 8 or 16 bits")
    if image.mode.startswith("I"):
        levels = numpy.asarray(image)
        if levels.min() < 0 or levels.max() > 0xFFFF:
            raise MediaError(f"its grey levels run from {levels.min()} to {levels.max()}; store 8 or 16 bits")
        return Image.fromarray((levels >> 8).astype(numpy.uint8)).convert("RGB")
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, (255, 255, 255, 255)), image).convert("RGB")
    return image.convert("RGB")
