"""The first-party processor keeps every promise, by either library's resampling; and the kit finds processors that do not."""

from __future__ import annotations

import chz
import numpy
import pytest
from intarsia_data.config import ByteTokenizerConfig
from intarsia_data.tokenizer import ByteTokenizer
from intarsia_multimodal.config import PatchProcessorConfig
from intarsia_multimodal.patches import PatchProcessor
from intarsia_testing.processor import ProcessorConformance

SMALL = PatchProcessorConfig(patch=4, min_pixels=256, max_pixels=4096, video_min_pixels=256, video_max_pixels=16384)


class TestPatches(ProcessorConformance):
    entry = "intarsia-multimodal:patches"
    config = SMALL

    def changed(self):
        return chz.replace(SMALL, mean=(0.4, 0.5, 0.5))


class TestPatchesOfTorch(ProcessorConformance):
    entry = "intarsia-multimodal:patches"
    config = chz.replace(SMALL, resampling="torch", video_marks=True, max_frame_tokens=8)


class Trains(PatchProcessor):
    """Trains on the tokens of media."""

    def prepare(self, document):
        prepared = super().prepare(document)
        prepared.trained_N[:] = True
        return prepared


class Decodes(PatchProcessor):
    """Decodes as it prepares."""

    def prepare(self, document):
        prepared = super().prepare(document)
        for slot in prepared.media:
            self.load(slot)
        return prepared


class Doubles(PatchProcessor):
    """Gives float64."""

    def load(self, slot):
        return super().load(slot).astype(numpy.float64)


class Forgets(PatchProcessor):
    """Has one fingerprint for all settings."""

    def fingerprint(self):
        return "always"


class Loses(PatchProcessor):
    """Leaves out the last medium's slot."""

    def prepare(self, document):
        prepared = super().prepare(document)
        return type(prepared)(prepared.tokens_N, prepared.trained_N, prepared.positions_3N, prepared.media[:-1], prepared.text_bytes)


class Lenient(PatchProcessor):
    """Finds media that it is not given."""

    def locate(self, tokens, media):
        return super().locate(tokens, media if len(media) != 1 else [*media, *self.more])

    more = ()

    def prepare(self, document):
        prepared = super().prepare(document)
        self.more = tuple(slot.media for slot in prepared.media[1:])
        return prepared


@pytest.mark.parametrize(
    ("processor", "test", "words"),
    [
        (Trains, "test_prepared_documents_are_well_formed", "a token of its block is trained on"),
        (Decodes, "test_preparing_reads_headers_alone", "`prepare` decodes"),
        (Doubles, "test_patches_are_as_promised", "`load` gives float64"),
        (Forgets, "test_fingerprint_follows_the_settings", "other settings have the same fingerprint"),
        (Loses, "test_media_are_kept_in_order", "its slots hold"),
        (Lenient, "test_media_are_found_in_final_tokens", "a medium more than it is given"),
    ],
)
def test_the_kit_finds_broken_processors(monkeypatch, processor, test, words):
    monkeypatch.setattr("intarsia_multimodal.patches.PatchProcessor", processor)
    with pytest.raises(pytest.fail.Exception, match=words):
        getattr(TestPatches(), test)()


def test_the_kits_tokenizer_has_the_special_tokens():
    tokenizer = TestPatches().tokenizer()
    assert isinstance(tokenizer, ByteTokenizer) and ByteTokenizerConfig().specials == ()
    assert [tokenizer.special_id(text) for text in ProcessorConformance.special_tokens] == [264, 265, 266, 267]
