"""Scenes as pictures, by Pillow and the fonts that come with it."""

from __future__ import annotations

import functools
import io

import numpy
from intarsia_data.order import mix
from PIL import Image, ImageDraw, ImageFont

from intarsia_multimodal.scenes import COLOURS, UNIT, Item, Scene

FINER = 4
"""Drawn so many times as large, and made smaller then, for smooth edges."""
SLANT = 0.3


def draw(scene: Scene, size: int, noise: int, key: int) -> Image.Image:
    """A scene as RGB of `size` x `size` pixels, each channel of each off by up to `noise` levels, by `key`."""
    side = size * FINER
    picture = Image.new("RGB", (side, side), (scene.background,) * 3)
    for item in scene.items:
        picture.paste(COLOURS[item.colour], mask=_mask(item, side))
    small = picture.resize((size, size), Image.Resampling.BOX)
    if not noise:
        return small
    levels = numpy.asarray(small).astype(numpy.int64)
    off = (mix(numpy.arange(levels.size), key) % numpy.uint64(2 * noise + 1)).astype(numpy.int64).reshape(levels.shape) - noise
    return Image.fromarray(numpy.clip(levels + off, 0, 255).astype(numpy.uint8))


def png(image: Image.Image) -> bytes:
    """An image as PNG."""
    output = io.BytesIO()
    image.save(output, "PNG", compress_level=1)
    return output.getvalue()


def _mask(item: Item, side: int) -> Image.Image:
    """Where an item is, on a canvas of `side` x `side`."""
    x, y, half = item.x * side / UNIT, item.y * side / UNIT, item.width * side / UNIT / 2
    mask = Image.new("L", (side, side), 0)
    if item.font:
        glyph = _glyph(item.what, item.font, round(2 * half))
        mask.paste(glyph, (round(x - glyph.width / 2), round(y - glyph.height / 2)))
        return mask
    pen = ImageDraw.Draw(mask)
    box = (x - half, y - half, x + half, y + half)
    if item.what == "circle":
        pen.ellipse(box, fill=255)
    elif item.what == "square":
        pen.rectangle(box, fill=255)
    elif item.what == "triangle":
        pen.polygon([(x, y - half), (x + half, y + half), (x - half, y + half)], fill=255)
    else:
        pen.rectangle((x - half, y - half / 3, x + half, y + half / 3), fill=255)
        pen.rectangle((x - half / 3, y - half, x + half / 3, y + half), fill=255)
    return mask


@functools.lru_cache(maxsize=1024)
def _glyph(digit: str, font: str, height: int) -> Image.Image:
    """A digit of this height, cut to its edges, as a mask."""
    if font == "bitmap":
        source = Image.new("L", (32, 32), 0)
        ImageDraw.Draw(source).text((8, 8), digit, fill=255, font=ImageFont.load_default_imagefont())
    else:
        source = Image.new("L", (256, 256), 0)
        stroke = 6 if font == "bold" else 0
        ImageDraw.Draw(source).text((64, 32), digit, fill=255, font=ImageFont.load_default(128), stroke_width=stroke)
        if font == "slanted":
            source = source.transform(source.size, Image.Transform.AFFINE, (1, SLANT, -SLANT * 128, 0, 1, 0), Image.Resampling.BILINEAR)
    cut = source.crop(source.getbbox())
    width = max(1, round(cut.width * height / cut.height))
    return cut.resize((width, height), Image.Resampling.NEAREST if font == "bitmap" else Image.Resampling.BOX)
