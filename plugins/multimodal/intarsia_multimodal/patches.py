"""The processor `patches`: resizing by the Qwen-VL rule, placeholders, positions on three axes, patches of pixels."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence

import chz
import numpy
from intarsia.contracts import Document, Media, Message, Parts, Tokenizer
from intarsia.errors import UsageError
from intarsia_data.store import framed, is_whole, rendered
from intarsia_data.tokenizer import encode_parts, text_of

from intarsia_multimodal import media, video
from intarsia_multimodal.config import PatchProcessorConfig
from intarsia_multimodal.contracts import MediaError, Prepared, Slot
from intarsia_multimodal.resampling import from_patches, level_table, resize, to_patches
from intarsia_multimodal.sizes import frame_numbers, image_size, timestamps, video_size

CHANNELS = 3


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """A medium's tokens before it is known where they stand: ids, and in them the spans (first, count) that stand for features."""

    media: Media
    ids: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    grid: tuple[int, int, int]
    frames: tuple[int, ...]
    size: tuple[int, int]


def build(config: PatchProcessorConfig, tokenizer: Tokenizer) -> PatchProcessor:
    """The entry's target."""
    return PatchProcessor(config, tokenizer)


class PatchProcessor:
    """See `intarsia_multimodal.contracts.Processor`."""

    def __init__(self, config: PatchProcessorConfig, tokenizer: Tokenizer):
        self.config, self.tokenizer, self.merge = config, tokenizer, config.merge
        self.patch_values = CHANNELS * config.temporal_patch * config.patch**2
        self.shape = {"patch": config.patch, "temporal_patch": config.temporal_patch, "merge": config.merge, "channels": CHANNELS}
        names = ("image_token", "video_token", "start_token", "end_token")
        found = {name: special_id(tokenizer, getattr(config, name), f"processor.{name}") for name in names}
        self._image, self._video, self._start, self._end = (found[name] for name in names)
        self.ids = {"image_id": self._image, "video_id": self._video, "vision_start_id": self._start, "vision_end_id": self._end}
        if len(set(found.values())) < len(found):
            raise UsageError(f"processor: the tokenizer gives one id to several of its special tokens: {found}.")
        self._table = level_table(config.mean, config.std, config.resampling)

    # ------------------------------------------------------------ tokens, from headers

    def prepare(self, document: Document) -> Prepared:
        """See Processor."""
        blocks: list[Block] = []
        raw, mask, text = self._encoded(document, blocks)
        array, whole = numpy.asarray(raw, dtype=numpy.int64), is_whole(document, self.tokenizer)
        ids, trained = framed(array, mask, self.tokenizer, frame_start=document.tokens is None, whole=whole)
        slots = tuple(self._placed(ids, blocks))
        kept = trained.astype(bool)
        for slot in slots:
            kept[slot.at : slot.stop] = False
        return Prepared(ids, kept, positions_of(len(ids), slots, self.merge), slots, len(text.encode()))

    def as_ids(self, parts: Parts) -> Parts:
        """See Processor."""
        return self._expanded(parts, [])

    def locate(self, tokens: Sequence[int], media: Sequence[Media]) -> Prepared:
        """See Processor."""
        ids = numpy.asarray(tokens, dtype=numpy.int64)
        slots = tuple(self._placed(ids, [self._block(medium) for medium in media]))
        size = len(self.tokenizer.decode(list(tokens)).encode())
        return Prepared(ids, numpy.zeros(len(ids), bool), positions_of(len(ids), slots, self.merge), slots, size)

    def _encoded(self, document: Document, blocks: list[Block]) -> tuple[Sequence[int], Sequence[bool] | None, str]:
        """Ids, mask (None: all trained) and text of a document; its media as blocks, in order."""
        if document.tokens is not None:
            return document.tokens, document.trained, self.tokenizer.decode(document.tokens)
        if document.text is not None:
            return self.tokenizer.encode(document.text), None, document.text
        if document.parts is not None:
            parts = self._expanded(document.parts, blocks)
            return encode_parts(parts, self.tokenizer.encode, self.tokenizer.vocab_size), None, text_of(document.parts)
        if document.messages is None:
            raise UsageError("it has neither text nor messages nor tokens nor parts")
        turns = [self._turn(message, blocks) for message in document.messages]
        return (
            *rendered(dataclasses.replace(document, messages=tuple(turns)), self.tokenizer),
            "".join(text_of(message.content) for message in document.messages),
        )

    def _turn(self, message: Message, blocks: list[Block]) -> Message:
        """A turn whose media are ids."""
        if isinstance(message.content, str):
            return message
        return dataclasses.replace(message, content=self._expanded(message.content, blocks))

    def _expanded(self, parts: Parts, blocks: list[Block]) -> Parts:
        """Parts whose media are ids."""
        found: list[str | int | Media] = []
        for part in parts:
            if isinstance(part, Media):
                blocks.append(self._block(part))
                found += blocks[-1].ids
            else:
                found.append(part)
        return tuple(found)

    def _block(self, medium: Media) -> Block:
        """A medium's tokens. Errors: MediaError that names it."""
        try:
            return self._image_block(medium) if medium.kind == "image" else self._video_block(medium)
        except MediaError as error:
            raise MediaError(f"{media.describe(medium)}: {error}") from error

    def _image_block(self, medium: Media) -> Block:
        if isinstance(medium.data, tuple):
            raise MediaError("an image is one file, not several frames")
        config = self.config
        size = media.header_size(medium.data, config.reading)
        height, width = image_size(*size, config.patch * config.merge, config.min_pixels, config.max_pixels)
        grid = (1, height // config.patch, width // config.patch)
        count = grid[1] * grid[2] // config.merge**2
        return Block(medium, (self._start, *[self._image] * count, self._end), ((1, count),), grid, (), size)

    def _video_block(self, medium: Media) -> Block:
        config = self.config
        if isinstance(medium.data, tuple):
            facts = video.given_facts(medium.data, config.given_fps, config.reading)
            taken = tuple(range(facts.frames))
        else:
            facts = video.facts(medium.data, config.reading)
            taken = frame_numbers(facts.frames, facts.fps, config.fps, config.min_frames, config.max_frames)
        height, width = self._frame_size(max(len(taken), config.temporal_patch), facts)
        seconds = timestamps(taken, facts.fps, config.temporal_patch)
        grid = (len(seconds), height // config.patch, width // config.patch)
        count = grid[1] * grid[2] // config.merge**2
        ids: list[int] = [self._start] if config.video_marks else []
        spans = []
        for second in seconds:
            ids += [*(self.tokenizer.encode(f"<{second:.1f} seconds>") if config.timestamps else ()), self._start]
            spans.append((len(ids), count))
            ids += [*[self._video] * count, self._end]
        ids += [self._end] if config.video_marks else []
        return Block(medium, tuple(ids), tuple(spans), grid, taken, (facts.height, facts.width))

    def _frame_size(self, count: int, facts: video.VideoFacts) -> tuple[int, int]:
        """Size of each of `count` frames after resizing."""
        config, factor, most = self.config, self.config.patch * self.config.merge, self.config.video_max_pixels
        if config.max_frame_tokens:
            each = min(config.max_frame_tokens * factor**2, most // count)
            most = count * max(each, int(config.video_min_pixels * 1.05))
        return video_size(count, facts.height, facts.width, config.temporal_patch, factor, config.video_min_pixels, most)

    def _placed(self, ids: numpy.ndarray, blocks: Sequence[Block]) -> Iterator[Slot]:
        """Where the blocks stand in a document's ids. Errors: UsageError where there are more placeholders than its media have, or fewer."""
        where = numpy.flatnonzero((ids == self._image) | (ids == self._video))
        needed = sum(count for block in blocks for _, count in block.spans)
        if len(where) != needed:
            raise UsageError(
                f"it has {len(where)} placeholder tokens ({self.config.image_token}, {self.config.video_token}), and its {len(blocks)} media have {needed} "
                f"features. Give media as parts and write no placeholders: they are put there{self._lost(len(where), needed)}"
            )
        done = 0
        for block in blocks:
            at = int(where[done]) - block.spans[0][0]
            stop = at + len(block.ids)
            if at < 0 or tuple(ids[at:stop].tolist()) != block.ids:
                raise UsageError(
                    f"the tokens around {media.describe(block.media)} are not those that were put there: the tokenizer has changed them, or the document has placeholders of its own"
                )
            yield Slot(
                block.media, at, stop, tuple((at + first, count) for first, count in block.spans), block.grid, block.frames, block.size
            )
            done += sum(count for _, count in block.spans)

    @staticmethod
    def _lost(found: int, needed: int) -> str:
        return " (the tokenizer's template seems to have left some out)." if found < needed else "."

    # ------------------------------------------------------------ patches, from pixels

    def load(self, slot: Slot) -> numpy.ndarray:
        """See Processor."""
        try:
            return self._loaded(slot)
        except MediaError as error:
            raise MediaError(f"{media.describe(slot.media)}: {error}") from error

    def _loaded(self, slot: Slot) -> numpy.ndarray:
        config, data = self.config, slot.media.data
        height, width = slot.grid[1] * config.patch, slot.grid[2] * config.patch
        found: Iterator[numpy.ndarray]
        if slot.media.kind == "image":
            found = iter([media.pixels(data, config.reading)])  # type: ignore[arg-type]
        elif isinstance(data, tuple):
            found = video.given_frames(data, config.reading)
        else:
            found = video.frames(data, slot.frames, config.reading)
        frames = []
        for frame in found:
            if frame.shape[:2] != slot.size:
                raise MediaError(
                    f"it has {frame.shape[1]} x {frame.shape[0]} pixels, and had {slot.size[1]} x {slot.size[0]} when it was prepared: it has changed"
                )
            frames.append(resize(frame, height, width, config.resampling))
        frames += [frames[-1]] * (slot.grid[0] * config.temporal_patch - len(frames))
        return to_patches(numpy.stack(frames), self._table, config.patch, config.temporal_patch, config.merge)

    def picture(self, patches_NC: numpy.ndarray, grid: tuple[int, int, int]) -> numpy.ndarray:
        """The frames of a medium's patches, as the model sees them, uint8 [T, H, W, 3]; those of an image are alike."""
        config = self.config
        return from_patches(patches_NC, grid, config.mean, config.std, config.patch, config.temporal_patch, config.merge)

    def fingerprint(self) -> str:
        """Over the settings, without the limits of what may be read."""
        settings = {name: getattr(self.config, name) for name in sorted(chz.chz_fields(type(self.config))) if name != "reading"}
        return hashlib.blake2b(f"patches 2 {settings} {self.ids}".encode(), digest_size=16).hexdigest()


def special_id(tokenizer: Tokenizer, text: str, setting: str) -> int:
    """The id of a special token. Errors: UsageError where the tokenizer has none of that name."""
    find = getattr(tokenizer, "special_id", None)
    found = find(text) if find is not None else None
    if found is None:
        raise UsageError(
            f"The tokenizer has no special token {text!r}, which {setting} names. Take the tokenizer that belongs to the model, set {setting} to a token "
            "that it has, or, for the byte tokenizer, add it to data.tokenizer.specials."
        )
    return found


def positions_of(length: int, slots: Sequence[Slot], merge: int) -> numpy.ndarray:
    """Positions in time, height and width, int64 [3, length]. Text counts on all three axes; features of one frame have the time of its beginning, and count rows and
    columns from there; what follows begins behind the longer of the frame's sides."""
    positions = numpy.empty((3, length), numpy.int64)
    place = counter = 0
    for slot in slots:
        rows, columns = slot.grid[1] // merge, slot.grid[2] // merge
        for first, count in slot.spans:
            positions[:, place:first] = numpy.arange(counter, counter + first - place)
            counter += first - place
            positions[0, first : first + count] = counter
            positions[1, first : first + count] = counter + numpy.repeat(numpy.arange(rows), columns)
            positions[2, first : first + count] = counter + numpy.tile(numpy.arange(columns), rows)
            counter, place = counter + max(rows, columns), first + count
    positions[:, place:] = numpy.arange(counter, counter + length - place)
    return positions
