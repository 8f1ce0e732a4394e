"""Conformance of processors of media. Subclass, name your entry, run pytest; a failure says which promise is broken, in words.

    class TestTiles(ProcessorConformance):
        entry = "acme-tiles:tiles"
        special_tokens = ("<image>", "<video>", "<media>", "</media>")

The promises are those of `intarsia_multimodal.contracts.Processor`. Images are drawn by the kit. Run as a module, this file answers from another process.
"""

from __future__ import annotations

import hashlib
import io
import json
import sys
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy
from intarsia.contracts import Document, Media, Message, Tokenizer
from intarsia.errors import UsageError
from intarsia.plugins import current
from intarsia_data.config import ByteTokenizerConfig
from intarsia_data.tokenizer import ByteTokenizer
from intarsia_multimodal.contracts import MediaError, Prepared, Processor
from PIL import Image

from intarsia_testing.base import Conformance, heavy
from intarsia_testing.plain import ask_another_process, from_plain
from intarsia_testing.promise import broken, keep

SIZES = ((40, 64), (97, 31), (16, 16), (150, 75))
"""(height, width) of the images that the kit draws."""


def picture(height: int, width: int, number: int = 0) -> bytes:
    """An image as PNG: smooth colours, another one for each number."""
    rows, columns = numpy.mgrid[:height, :width]
    planes = [(rows * (2 + number) + columns * 3) % 256, (rows * 5 + columns * (1 + number)) % 256, (rows * columns + 40 * number) % 256]
    output = io.BytesIO()
    Image.fromarray(numpy.stack(planes, axis=-1).astype(numpy.uint8)).save(output, "PNG")
    return output.getvalue()


def image(height: int, width: int, number: int = 0) -> Media:
    """Such an image as a medium."""
    return Media("image", picture(height, width, number), "image/png")


def documents() -> list[Document]:
    """What the kit prepares: text alone, images between text, images one after the other, a conversation, a video of given frames."""
    images = [image(*size, number) for number, size in enumerate(SIZES)]
    asked = Message("user", ("What is ", images[0], " and ", images[1], "?"))
    return [
        Document(text="Text alone."),
        Document(parts=("Before ", images[0], " between ", images[1], " behind.")),
        Document(parts=(images[2], images[3])),
        Document(messages=(asked, Message("assistant", "Pictures."), Message("user", (images[2],)), Message("assistant", "Another."))),
        Document(parts=("A video: ", Media("video", tuple(picture(48, 64, number) for number in range(5))), " and ", images[0])),
    ]


def digest(processor: Processor, document: Document) -> str:
    """All that a processor makes of a document, short enough to compare."""
    prepared = processor.prepare(document)
    found = hashlib.blake2b(digest_size=12)
    for array in (prepared.tokens_N, prepared.trained_N, prepared.positions_3N, *(processor.load(slot) for slot in prepared.media)):
        found.update(numpy.ascontiguousarray(array).tobytes())
    found.update(repr([(slot.at, slot.stop, slot.spans, slot.grid) for slot in prepared.media]).encode())
    return found.hexdigest()


class ProcessorConformance(Conformance):
    """Every promise of `intarsia_multimodal.contracts.Processor`, one test each.

    Set `entry`, `config` where settings have no defaults, and `special_tokens` to those that the processor asks of its tokenizer (the kit's is the byte tokenizer). Override
    `changed` to give settings that make something else of media. `takes_video` False: it takes images alone.
    """

    kind: ClassVar[str] = "processor"
    special_tokens: ClassVar[Sequence[str]] = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
    takes_video: ClassVar[bool] = True

    # ------------------------------------------------------------ what is tested

    def changed(self) -> Any | None:
        """Settings with which something else comes out; None where there are none."""
        return None

    def tokenizer(self) -> Any:
        """The byte tokenizer with the special tokens."""
        return ByteTokenizer(ByteTokenizerConfig(specials=tuple(self.special_tokens)))

    def processor(self) -> Processor:
        """A freshly built processor under test."""
        return current().build(self.given_configs()[0], self.tokenizer())

    def documents(self) -> list[Document]:
        """The kit's documents that it takes."""
        return documents() if self.takes_video else documents()[:-1]

    # ------------------------------------------------------------ promises

    def test_it_is_a_processor(self) -> None:
        """It has `prepare`, `load`, `fingerprint`, and says the size of its patches and its special tokens."""
        processor = self.processor()
        keep(
            "is a processor", isinstance(processor, Processor), f"{processor!r} lacks something of intarsia_multimodal.contracts.Processor."
        )
        keep("is a processor", processor.patch_values > 0 and processor.merge > 0, "`patch_values` and `merge` must be above 0.")
        tokens = {self.tokenizer().special_id(text) for text in self.special_tokens}
        keep(
            "names its tokens",
            processor.ids and set(processor.ids.values()) <= tokens,
            f"`ids` is {dict(processor.ids)}, and its special tokens have the ids {sorted(map(str, tokens))}.",
        )

    def test_target_imports_no_torch(self) -> None:
        """Processes that decode are light."""
        if not self.entry:
            return
        module = self.found_entry().target.partition(":")[0]
        problem = heavy([module])
        keep("light", not problem, f"importing {module} {problem}.")

    def test_prepared_documents_are_well_formed(self) -> None:
        """Shapes, dtypes, blocks in order, spans inside blocks, as many tokens as features, none of a block trained."""
        processor, tokenizer = self.processor(), self.tokenizer()
        for number, document in enumerate(self.documents()):
            check_prepared(processor, tokenizer, processor.prepare(document), f"document {number} of the kit")

    def test_media_are_kept_in_order(self) -> None:
        """Each medium of a document has its slot, in the order in which they stand."""
        processor = self.processor()
        for number, document in enumerate(self.documents()):
            parts = document.parts or tuple(part for message in document.messages or () for part in message.content)
            given = [part for part in parts if isinstance(part, Media)]
            found = [slot.media for slot in processor.prepare(document).media]
            keep(
                "media in order",
                found == given,
                f"document {number} of the kit has {len(given)} media, and its slots hold {len(found)}, or others.",
            )

    def test_media_are_found_in_final_tokens(self) -> None:
        """`locate` finds in a document's tokens what `prepare` put there, and refuses them with a medium less; `as_ids` gives a medium's whole block."""
        processor = self.processor()
        for number, document in enumerate(self.documents()):
            prepared = processor.prepare(document)
            media = [slot.media for slot in prepared.media]
            found = processor.locate(prepared.tokens_N.tolist(), media)
            same = found.media == prepared.media and (found.positions_3N == prepared.positions_3N).all() and not found.trained_N.any()
            keep(
                "media are found in final tokens",
                same,
                f"document {number} of the kit: `locate` gives other slots or positions than `prepare`.",
            )
            for slot in prepared.media:
                block = processor.as_ids((slot.media,))
                expected = tuple(prepared.tokens_N[slot.at : slot.stop].tolist())
                keep("media are found in final tokens", block == expected, f"`as_ids` gives {block[:8]}, and `prepare` {expected[:8]}.")
            if media:
                try:
                    processor.locate(prepared.tokens_N.tolist(), media[:-1])
                except UsageError:
                    continue
                broken("media are found in final tokens", "`locate` takes tokens with a medium more than it is given.")

    def test_text_has_ordinary_positions(self) -> None:
        """Text counts from 0 on all three axes, and is trained on; a conversation where the assistant speaks."""
        prepared = self.processor().prepare(Document(text="Text alone."))
        count = len(prepared.tokens_N)
        keep(
            "positions of text",
            (prepared.positions_3N == numpy.arange(count)).all(),
            f"text has the positions {prepared.positions_3N.tolist()}.",
        )
        keep("text is trained on", prepared.trained_N.all(), "not all of a text is trained on.")
        talk = self.processor().prepare(documents()[3])
        keep(
            "the assistant is trained on",
            talk.trained_N.any() and not talk.trained_N.all(),
            "of a conversation all is trained on, or nothing.",
        )

    def test_what_looks_special_in_text_is_text(self) -> None:
        """The special tokens' names in text are text: a user cannot put placeholders there."""
        processor = self.processor()
        text = " ".join(self.special_tokens)
        for words, document in (
            ("text", Document(text=text)),
            ("a part", Document(parts=(text, image(*SIZES[0])))),
            ("a user's turn", Document(messages=(Message("user", text), Message("assistant", "No.")))),
        ):
            prepared = processor.prepare(document)
            shown = sum(slot.features for slot in prepared.media)
            found = int(
                numpy.isin(prepared.tokens_N, [processor.ids[name] for name in ("image_id", "video_id") if name in processor.ids]).sum()
            )
            keep("text is text", found == shown, f"special tokens' names in {words} give {found - shown} placeholders.")

    def test_patches_are_as_promised(self) -> None:
        """float32 [product of the grid, C], finite, the same when asked again and in another order."""
        processor = self.processor()
        for number, document in enumerate(self.documents()):
            slots = processor.prepare(document).media
            first = [processor.load(slot) for slot in slots]
            for slot, patches in zip(slots, first, strict=True):
                shape = (slot.patches, processor.patch_values)
                keep(
                    "patches are as promised",
                    isinstance(patches, numpy.ndarray) and patches.dtype == numpy.float32 and patches.shape == shape,
                    f"document {number} of the kit: `load` gives {getattr(patches, 'dtype', type(patches))} {getattr(patches, 'shape', '')}, not float32 {shape}.",
                )
                keep(
                    "patches are finite",
                    numpy.isfinite(patches).all(),
                    f"document {number} of the kit: a patch has a value that is not finite.",
                )
            again = [processor.load(slot) for slot in slots[::-1]][::-1]
            same = all((one == other).all() for one, other in zip(first, again, strict=True))
            keep("patches stay", same, f"document {number} of the kit: patches are others when they are loaded in another order.")

    def test_preparing_reads_headers_alone(self) -> None:
        """An image whose pixels are damaged is found by `load`, as a MediaError: `prepare` does not decode."""
        processor, whole = self.processor(), picture(90, 120)
        damaged = Media("image", whole[: len(whole) // 2], "image/png")
        try:
            (slot,) = processor.prepare(Document(parts=(damaged,))).media
        except MediaError as error:
            broken("headers alone", f"`prepare` decodes: half a PNG file is refused by it ({error}).")
        expect_media_error("damaged pixels", lambda: processor.load(slot), "an image whose second half is missing")

    def test_what_is_no_image_is_a_media_error(self) -> None:
        """Nothing else reaches the policy that decides about it."""
        processor = self.processor()
        for words, data in (("an empty file", b""), ("text", b"This is no image."), ("a missing file", "no/such/file.png")):
            expect_media_error("what is no image", lambda data=data: processor.prepare(Document(parts=(Media("image", data),))), words)  # type: ignore[misc]
        if self.takes_video:
            expect_media_error(
                "what is no video", lambda: processor.prepare(Document(parts=(Media("video", ()),))), "a video without frames"
            )

    def test_a_tokenizer_without_its_tokens_is_refused(self) -> None:
        """As a UsageError that names one of them."""
        try:
            current().build(self.given_configs()[0], ByteTokenizer(ByteTokenizerConfig()))
        except UsageError as error:
            named = any(text in str(error) for text in self.special_tokens)
            keep("missing tokens are named", named, f"a tokenizer without the special tokens is refused, but none is named: {error}")
            return
        broken("missing tokens are refused", "a tokenizer without the special tokens is accepted.")

    def test_another_process_agrees(self) -> None:
        """Workers build their own processors and must make the same of documents."""
        config = self.given_configs()[0]
        here = {"fingerprint": self.processor().fingerprint(), "documents": [digest(self.processor(), each) for each in self.documents()]}
        try:
            there = ask_another_process("intarsia_testing.processor", config, specials=list(self.special_tokens), video=self.takes_video)
        except RuntimeError as error:
            broken("the same in another process", f"a fresh process cannot do it: {error}")
        keep("the same in another process", here == there, f"it makes {here} here and {there} there.")

    def test_fingerprint_follows_the_settings(self) -> None:
        """Equal for equal settings, another one for those that make something else of media. It is what finds stale indices."""
        before = self.processor().fingerprint()
        keep("the fingerprint is text", isinstance(before, str) and before, f"it is {before!r}.")
        keep("the fingerprint stays", self.processor().fingerprint() == before, "it differs between two processors with the same settings.")
        changed = self.changed()
        if changed is not None:
            other = current().build(changed, self.tokenizer())
            keep("the fingerprint follows the settings", other.fingerprint() != before, "other settings have the same fingerprint.")


def check_prepared(processor: Processor, tokenizer: Tokenizer, prepared: Prepared, where: str) -> None:
    """Every promise about what `prepare` gives."""
    promise, count = "prepared documents are well formed", len(prepared.tokens_N)
    for name, array, dtype, shape in (
        ("tokens_N", prepared.tokens_N, numpy.int64, (count,)),
        ("trained_N", prepared.trained_N, numpy.bool_, (count,)),
        ("positions_3N", prepared.positions_3N, numpy.int64, (3, count)),
    ):
        keep(
            promise,
            array.dtype == dtype and array.shape == shape,
            f"{where}: {name} is {array.dtype} {array.shape}, not {dtype.__name__} {shape}.",
        )
    keep(
        promise,
        count and 0 <= prepared.tokens_N.min() <= prepared.tokens_N.max() < tokenizer.vocab_size,
        f"{where}: it has ids that the tokenizer does not have, or none.",
    )
    keep(promise, (prepared.positions_3N >= 0).all() and (prepared.positions_3N[:, 0] == 0).all(), f"{where}: positions must begin at 0.")
    behind = 0
    for number, slot in enumerate(prepared.media):
        here = f"{where}: medium {number}"
        keep(
            promise,
            behind <= slot.at < slot.stop <= count,
            f"{here} has the block {slot.at} to {slot.stop}, behind one that ends at {behind}.",
        )
        keep(promise, not prepared.trained_N[slot.at : slot.stop].any(), f"{here}: a token of its block is trained on.")
        inside = slot.at
        for first, length in slot.spans:
            keep(
                promise,
                inside <= first and first + length <= slot.stop,
                f"{here}: the span {first}, {length} is not in its block, behind the one before it.",
            )
            inside = first + length
        keep(promise, slot.patches == slot.features * processor.merge**2, f"{here} has {slot.patches} patches for {slot.features} tokens.")
        behind = slot.stop


def expect_media_error(promise: str, call: Any, words: str) -> None:
    """Fail the test unless the call raises a MediaError that says something."""
    try:
        call()
    except MediaError as error:
        keep(promise, len(str(error)) >= 20, f"for {words} the message {str(error)!r} does not say what is wrong.")
        return
    except Exception as error:
        broken(promise, f"{words} raises {type(error).__name__} ({error}) instead of MediaError.")
    broken(promise, f"{words} is accepted without a word.")


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    made = current().build(from_plain(asked["config"]), ByteTokenizer(ByteTokenizerConfig(specials=tuple(asked["specials"]))))
    given = documents() if asked["video"] else documents()[:-1]
    print(json.dumps({"fingerprint": made.fingerprint(), "documents": [digest(made, each) for each in given]}))
