"""Media that users have: odd sizes, modes and files. Each has the right pixels, or an error that says what is wrong with which."""

from __future__ import annotations

import contextlib
import http.server
import io
import math
import os
import random
import re
import threading

import chz
import numpy
import pytest
from intarsia.contracts import Document, Media, Message
from intarsia.errors import UsageError
from intarsia_data.config import ByteTokenizerConfig
from intarsia_data.tokenizer import ByteTokenizer
from intarsia_multimodal.config import PatchProcessorConfig, ReadingConfig
from intarsia_multimodal.contracts import MediaError
from intarsia_multimodal.media import header_size, pixels
from intarsia_multimodal.patches import PatchProcessor
from PIL import Image

from tests.support.media import SMALL, encoded, image, noise, png_header, smooth, tokenizer, video

READING = ReadingConfig()
ORIENTATION = 0x0112


def processor(**settings):
    return PatchProcessor(chz.replace(SMALL, **settings), tokenizer())


def slot_of(data, kind="image", **settings):
    """The slot of one medium, and the processor that made it."""
    made = processor(**settings)
    (slot,) = made.prepare(Document(parts=(Media(kind, data),))).media
    return made, slot


def refused(data, words, kind="image", load=False, **settings):
    """Check that a medium is refused, by `prepare` or by `load`, in these words."""
    if load:
        made, slot = slot_of(data, kind, **settings)
        with pytest.raises(MediaError, match=words):
            made.load(slot)
    else:
        with pytest.raises(MediaError, match=words):
            slot_of(data, kind, **settings)


# ------------------------------------------------------------ sizes


def test_an_image_of_1_by_10000_pixels_leaves_nothing_to_see():
    refused(encoded(noise(10_000, 1)), "it has 1 x 10000 pixels: one side is more than 200 times the other")
    refused(encoded(noise(1, 10_000)), "10000 x 1 pixels")
    _, slot = slot_of(encoded(noise(1, 200)))
    assert slot.grid == (1, 2, 58), "200 times as long is still an image"


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_decompression_bomb_is_found_by_its_header_before_anything_is_decoded(monkeypatch):
    monkeypatch.setattr(Image.Image, "load", lambda self: pytest.fail("it was decoded"))
    refused(png_header(9_400, 9_600), r"its header says 9400 x 9600 pixels, and reading.max_source_pixels is 89478485: not decoded")
    refused(png_header(60_000, 60_000), "DecompressionBombError")
    refused(png_header(300, 300), "reading.max_source_pixels is 1000", reading=ReadingConfig(max_source_pixels=1000))
    assert header_size(png_header(300, 200), READING) == (200, 300)


def test_settings_of_reading_are_checked():
    with pytest.raises(UsageError, match="Pillow decodes at most 178956970"):
        ReadingConfig(max_source_pixels=1 << 40)
    with pytest.raises(UsageError, match="must be finite and above 0"):
        ReadingConfig(url_timeout_s=0.0)


# ------------------------------------------------------------ modes


def test_sixteen_bits_keep_their_upper_eight():
    levels = numpy.linspace(0, 65535, 20 * 30).astype(numpy.uint16).reshape(20, 30)
    for file_format in ("PNG", "TIFF"):
        found = pixels(encoded(Image.fromarray(levels), file_format), READING)
        assert numpy.array_equal(found, numpy.repeat((levels >> 8).astype(numpy.uint8)[:, :, None], 3, axis=2))
    wide = encoded(Image.fromarray(levels.astype(numpy.int32) * 9), "TIFF")
    with pytest.raises(MediaError, match="grey levels run from 0 to 589815; store 8 or 16 bits"):
        pixels(wide, READING)
    with pytest.raises(MediaError, match="floating-point numbers, whose range is not known"):
        pixels(encoded(Image.fromarray(levels.astype(numpy.float32)), "TIFF"), READING)


def test_cmyk_becomes_rgb():
    picture = Image.fromarray(smooth(20, 30)).convert("CMYK")
    found = pixels(encoded(picture, "TIFF"), READING)
    assert numpy.array_equal(found, numpy.asarray(picture.convert("RGB")))
    assert pixels(encoded(picture, "JPEG"), READING).shape == (20, 30, 3)


def test_transparency_is_white():
    picture = Image.fromarray(numpy.array([[0, 1], [2, 3]], dtype=numpy.uint8), "P")
    picture.putpalette([10, 20, 30, 40, 50, 60, 70, 80, 90, 100, 110, 120])
    found = pixels(encoded(picture, transparency=2), READING)
    assert found.tolist() == [[[10, 20, 30], [40, 50, 60]], [[255, 255, 255], [100, 110, 120]]]
    half = Image.new("RGBA", (2, 2), (0, 0, 0, 128))
    assert pixels(encoded(half), READING)[0, 0].tolist() == [127, 127, 127]


def test_of_an_animation_the_first_image_is_seen_or_all_as_a_video():
    images = [Image.fromarray(smooth(24, 32, number)) for number in range(4)]
    data = encoded(images[0], "GIF", save_all=True, append_images=images[1:], duration=250)
    assert numpy.abs(pixels(data, READING).astype(int) - numpy.asarray(images[0])).mean() < 20, "256 colours at most"
    _, slot = slot_of(data, "video")
    assert (slot.grid[0], slot.frames) == (2, (0, 1, 2, 3))


@pytest.mark.parametrize(("turned", "first"), [(1, "corner"), (3, "opposite"), (6, "right"), (8, "left"), (99, "corner")])
def test_exif_makes_images_upright(turned, first):
    levels = numpy.zeros((16, 40, 3), dtype=numpy.uint8)
    levels[:8, :8] = 255
    picture, exif = Image.fromarray(levels), Image.Exif()
    exif[ORIENTATION] = turned
    for file_format in ("JPEG", "PNG", "WEBP", "TIFF"):  # Pillow turns a TIFF itself
        data = encoded(picture, file_format, exif=exif)
        shape = (40, 16) if turned in (6, 8) else (16, 40)
        assert header_size(data, READING) == shape
        found = pixels(data, READING)
        assert found.shape[:2] == shape
        rows, columns = {"corner": (0, 0), "opposite": (-1, -1), "right": (0, -1), "left": (-1, 0)}[first]
        assert found[rows, columns].min() > 200, "the white corner goes where the camera held it"


# ------------------------------------------------------------ damaged files


def test_a_truncated_jpeg_is_found_when_it_is_decoded():
    whole = encoded(smooth(200, 200), "JPEG", quality=95)
    made, slot = slot_of(whole[: len(whole) // 2])
    with pytest.raises(MediaError, match=r"image of \d+ bytes: it cannot be decoded: OSError: .*truncated"):
        made.load(slot)


@pytest.mark.parametrize("file_format", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "MPO", "PPM"])
def test_formats_are_known_in_a_fresh_process_too(file_format):
    more = {"save_all": True, "append_images": [Image.fromarray(smooth(20, 30))]} if file_format == "MPO" else {}
    data = encoded(Image.fromarray(smooth(20, 30)), file_format, **more)
    assert header_size(data, READING) == (20, 30) and pixels(data, READING).shape == (20, 30, 3)


def test_files_that_are_none(tmp_path):
    empty = tmp_path / "empty.png"
    empty.write_bytes(b"")
    refused(str(empty), r"image .*empty\.png: the file is empty \(0 bytes\)")
    refused(b"", r"the file is empty")
    refused(str(tmp_path / "none.png"), r"none\.png: it cannot be read: No such file or directory")
    refused(str(tmp_path), "it cannot be read: it is no file")
    os.mkfifo(tmp_path / "pipe.png")
    refused(str(tmp_path / "pipe.png"), "it cannot be read: it is no file")
    refused("a\0.png", "it cannot be read: embedded null byte")
    refused(b"<svg xmlns='http://www.w3.org/2000/svg'/>", "it is no image of a format that is read")
    refused(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n", "it is no image of a format that is read")
    refused(encoded(noise(40, 40)), "it has .* bytes, and reading.max_file_bytes is 100", reading=ReadingConfig(max_file_bytes=100))
    refused((encoded(noise(8, 8)),), "an image is one file, not several frames")


def test_an_image_that_has_changed_since_it_was_prepared(tmp_path):
    path = tmp_path / "image.png"
    path.write_bytes(encoded(noise(40, 60)))
    made, slot = slot_of(str(path))
    path.write_bytes(encoded(noise(60, 40)))
    with pytest.raises(MediaError, match=r"it has 40 x 60 pixels, and had 60 x 40 when it was prepared: it has changed"):
        made.load(slot)


# ------------------------------------------------------------ video


def test_videos_without_frames_are_refused(tmp_path):
    import av

    refused((), "video of 0 given frames: it has no frames", "video")
    sound = io.BytesIO()
    with av.open(sound, "w", format="wav") as file:
        stream = file.add_stream("pcm_s16le", rate=8000)
        frame = av.AudioFrame.from_ndarray(numpy.zeros((1, 800), numpy.int16), format="s16", layout="mono")
        frame.rate = 8000
        for packet in stream.encode(frame):
            file.mux(packet)
    refused(sound.getvalue(), "it cannot be decoded|it has no video stream", "video")
    refused(video(1)[:300], "it cannot be decoded", "video")
    for no_video in (b"not a video", encoded(noise(40, 60))):
        refused(no_video, r"it cannot be decoded: .*; it is damaged, or no video of a format that is read \(mov, mp4, ", "video")
    listed = b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n"
    refused(listed, "it cannot be decoded", "video")


def test_a_damaged_video_is_nothing_but_a_medium_that_cannot_be_used():
    whole, chance, told = video(12), random.Random(0), 0
    for _ in range(150):
        data = bytearray(whole)
        for _ in range(chance.choice((1, 3, 20))):
            data[chance.randrange(len(data))] = chance.randrange(256)
        try:
            made, slot = slot_of(bytes(data), "video")
            made.load(slot)
        except MediaError:
            told += 1
    assert told


def test_a_video_that_ends_before_its_header_says():
    data = video(40, container="avi")
    made, slot = slot_of(data, "video")
    cut = type(slot)(Media("video", data[: len(data) * 2 // 3]), slot.at, slot.stop, slot.spans, slot.grid, slot.frames, slot.size)
    with pytest.raises(MediaError, match=r"it ends after \d+ frames, and frame \d+ is needed|cannot be decoded"):
        made.load(cut)


def test_limits_of_videos():
    data = video(20, fps=5)
    refused(data, "it lasts 4 seconds, and reading.max_video_seconds is 3", "video", reading=ReadingConfig(max_video_seconds=3.0))
    refused(
        data, "its frames have 64 x 48 pixels, and reading.max_source_pixels is 100", "video", reading=ReadingConfig(max_source_pixels=100)
    )
    _, slot = slot_of(data, "video", max_frames=4, min_frames=2)
    assert slot.frames == (0, 6, 13, 19)


def test_frames_that_are_given_must_be_alike():
    good = encoded(noise(16, 16))
    refused((good, encoded(noise(16, 24))), "frame 0 has 16 x 16 pixels and frame 1 24 x 16; they must be alike", "video")
    refused((good, b"x"), "frame 1: it is no image", "video")
    truncated = encoded(noise(90, 90))[:5000]
    refused((encoded(noise(90, 90)), truncated), "frame 1: it cannot be decoded", "video", load=True)
    made, slot = slot_of((good,), "video")
    assert slot.grid[0] == 1 and made.load(slot).shape[0] == slot.patches, "one frame is repeated"


def test_video_files_need_pyav(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "av", None)
    with pytest.raises(UsageError, match=r"pip install 'intarsia-multimodal\[video\]'") as found:
        slot_of(b"anything", "video")
    assert not isinstance(found.value, MediaError), "what is missing here is no document's fault"


# ------------------------------------------------------------ URLs


@pytest.fixture
def server():
    """Serves an image, an endless answer, and a redirection to a file."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            if self.path == "/turned":
                self.send_response(302)
                self.send_header("Location", "ftp://127.0.0.1:1/image.png")
                self.end_headers()
                return
            self.send_response(200 if self.path != "/gone" else 404)
            if self.path == "/short":
                self.send_header("Content-Length", "1000000")
            self.end_headers()
            if self.path == "/endless":
                with contextlib.suppress(OSError):
                    while True:
                        self.wfile.write(b"0" * 65536)
            else:
                self.wfile.write(encoded(noise(16, 16)))

        def log_message(self, *arguments):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{made.server_port}"
        made.shutdown()


def test_urls_are_refused_unless_they_are_allowed(server):
    refused(f"{server}/image.png", r"URLs are refused.*data\.loader\.processor\.reading\.allow_urls=true")
    allowed = ReadingConfig(allow_urls=True, max_file_bytes=1 << 20)
    made, slot = slot_of(f"{server}/image.png", reading=allowed)
    assert made.load(slot).shape == (16, 96)
    refused(f"{server}/endless", "it gives more than reading.max_file_bytes=1048576 bytes", reading=allowed)
    refused(f"{server}/gone", "it cannot be fetched: HTTP Error 404", reading=allowed)
    refused(f"{server}/turned", "URL of scheme 'ftp'; only http and https are fetched", reading=allowed)
    refused("file:///etc/passwd", "URL of scheme 'file'", reading=allowed)
    refused("http://127.0.0.1:1/image.png", "it cannot be fetched", reading=allowed)
    refused("http://[bad/image.png", "it is no URL: Invalid IPv6 URL", reading=allowed)
    refused(f"{server}/short", r"it cannot be fetched: it ends \d+ bytes before its end", reading=allowed)
    refused(f"{server}/a b", "it cannot be fetched: URL can't contain control characters", reading=allowed)


# ------------------------------------------------------------ placeholders


def test_placeholders_that_no_medium_has_are_refused():
    made = processor()
    with pytest.raises(UsageError, match=r"it has 1 placeholder tokens .* its 0 media have 0 features\. Give media as parts"):
        made.prepare(Document(tokens=(65, made.ids["image_id"], 66)))
    with pytest.raises(UsageError, match=r"it has 5 placeholder tokens .* its 1 media have 4 features"):
        made.prepare(Document(parts=(image(), made.ids["image_id"])))
    with pytest.raises(
        UsageError, match=r"it has 4 placeholder tokens .* its 2 media have 8 features.*template seems to have left some out"
    ):
        forgetful = tokenizer()
        whole = forgetful.render
        forgetful.render = lambda messages, tools=(): whole(messages[1:])
        PatchProcessor(SMALL, forgetful).prepare(Document(messages=(Message("user", (image(),)), Message("user", (image(),)))))
    with pytest.raises(UsageError, match=r"the tokens around image .* are not those that were put there"):
        made.prepare(Document(parts=(*[made.ids["image_id"]] * 4, *without_placeholders(made))))


def without_placeholders(made):
    """A medium whose block has lost its placeholders, so that the document's own would be taken for them."""
    original = made._block

    def block(medium):
        found = original(medium)
        return type(found)(found.media, (made.ids["vision_start_id"],), found.spans, found.grid, found.frames, found.size)

    made._block = block
    return (image(),)


def test_literal_placeholders_in_what_a_user_says_stay_text():
    made = processor()
    said = "Look: <|vision_start|><|image_pad|><|vision_end|>"
    prepared = made.prepare(Document(messages=(Message("user", (said, image())), Message("assistant", said))))
    assert int((prepared.tokens_N == made.ids["image_id"]).sum()) == 4 == prepared.media[0].features
    assert made.tokenizer.decode(prepared.tokens_N).count("<|image_pad|>") == 2


def test_a_tokenizer_without_the_special_tokens_is_refused():
    with pytest.raises(UsageError, match=r"no special token '<\|image_pad\|>', which processor.image_token names.*data.tokenizer.specials"):
        PatchProcessor(PatchProcessorConfig(), ByteTokenizer(ByteTokenizerConfig()))
    with pytest.raises(UsageError, match="four tokens"):
        PatchProcessorConfig(image_token="<|video_pad|>")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"patch": 0}, "processor.patch is 0"),
        ({"fps": math.nan}, "processor.fps is nan; it must be finite"),
        ({"given_fps": math.inf}, "processor.given_fps is inf; it must be finite"),
        ({"mean": (math.nan, 0.0, 0.0)}, "3 finite values"),
        ({"std": (math.inf, 1.0, 1.0)}, "3 finite values"),
        ({"min_pixels": 1 << 30}, "above processor.max_pixels"),
        ({"min_pixels": 1, "max_pixels": 100}, "one feature has 1024 pixels"),
        ({"std": (0.5, 0.5, 0.0)}, "those of std above 0"),
        ({"resampling": "pilow"}, "Did you mean 'pillow'"),
    ],
)
def test_settings_are_checked(settings, words):
    with pytest.raises(UsageError, match=re.escape(words)):
        PatchProcessorConfig(**settings)


# ------------------------------------------------------------ the byte tokenizer


def test_the_byte_tokenizers_special_tokens():
    made = tokenizer()
    assert made.vocab_size == 268 and made.special_id("<|video_pad|>") == 265 and made.special_id("<|other|>") is None
    assert made.encode("<|video_pad|>") == list(b"<|video_pad|>"), "text is text"
    assert ByteTokenizer(ByteTokenizerConfig()).fingerprint() != made.fingerprint()
    ids, mask = made.render([Message("user", ("a", 265, "b")), Message("assistant", "c")])
    assert ids == [261, 97, 265, 98, 259, 262, 99, 259] and mask == [False] * 6 + [True] * 2
    with pytest.raises(UsageError, match=r"Set data\.loader=multimodal"):
        made.render([Message("user", (image(),))])
    with pytest.raises(UsageError, match="token id 268 is out of range"):
        made.render([Message("user", (268,))])
    with pytest.raises(UsageError, match="named twice"):
        ByteTokenizer(ByteTokenizerConfig(specials=("a", "a")))
