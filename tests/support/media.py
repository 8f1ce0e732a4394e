"""Images and videos for tests, made by Pillow and PyAV."""

from __future__ import annotations

import io
import struct
import zlib

import numpy
from intarsia.contracts import Media
from intarsia_data.config import ByteTokenizerConfig
from intarsia_data.tokenizer import ByteTokenizer
from intarsia_multimodal.config import PatchProcessorConfig
from PIL import Image

SPECIALS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
SMALL = PatchProcessorConfig(patch=4, min_pixels=256, max_pixels=4096, video_min_pixels=256, video_max_pixels=16384)


def tokenizer() -> ByteTokenizer:
    """Bytes, the usual roles, and the special tokens: 268 ids."""
    return ByteTokenizer(ByteTokenizerConfig(specials=SPECIALS))


def noise(height: int, width: int, seed: int = 0) -> numpy.ndarray:
    """Random pixels, uint8 [height, width, 3]."""
    return numpy.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=numpy.uint8)


def smooth(height: int, width: int, seed: int = 0) -> numpy.ndarray:
    """A few colours that run into each other, uint8 [height, width, 3]."""
    return numpy.asarray(Image.fromarray(noise(5, 5, seed)).resize((width, height), Image.Resampling.BICUBIC))


def encoded(pixels: numpy.ndarray | Image.Image, file_format: str = "PNG", **settings: object) -> bytes:
    """An image's file."""
    output = io.BytesIO()
    (pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)).save(output, file_format, **settings)
    return output.getvalue()


def image(height: int = 16, width: int = 16, seed: int = 0) -> Media:
    """A random image as PNG."""
    return Media("image", encoded(noise(height, width, seed)), "image/png")


def png_header(width: int, height: int) -> bytes:
    """A PNG that says that it has this size, and holds next to nothing."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")


def video(frames: int = 10, height: int = 48, width: int = 64, fps: int = 5, container: str = "mp4") -> bytes:
    """A video file of smooth frames, by PyAV."""
    import av

    output = io.BytesIO()
    with av.open(output, "w", format=container) as file:
        stream = file.add_stream("mpeg4", rate=fps)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for number in range(frames):
            for packet in stream.encode(av.VideoFrame.from_ndarray(smooth(height, width, number), format="rgb24")):
                file.mux(packet)
        for packet in stream.encode():
            file.mux(packet)
    return output.getvalue()
