"""Documents of parts in the text loaders: text and given ids are taken, media are refused by the name of what takes them."""

from __future__ import annotations

import hashlib

import pytest
from intarsia.contracts import Document, Media, Message, ToolCall, ToolSpec
from intarsia.errors import UsageError
from intarsia_data.config import ByteTokenizerConfig
from intarsia_data.store import open_store
from intarsia_data.tokenizer import ByteTokenizer, text_of


class Listed(list):
    """A source from documents in memory."""

    def fingerprint(self):
        return hashlib.sha256(repr(list(self)).encode()).hexdigest()


def store_of(folder, *documents, specials=("<x>",)):
    return open_store(Listed(documents), ByteTokenizer(ByteTokenizerConfig(specials=specials)), "data.mixture.0.source (listed)", folder)


def test_parts_become_tokens(tmp_path):
    store = store_of(
        tmp_path,
        Document(parts=("a<x>", 264, "b")),
        Document(messages=(Message("user", ("c", 264)), Message("assistant", "d"))),
    )
    first, second = (store.tokens[begin:end].tolist() for begin, end in zip(store.offsets[:-1], store.offsets[1:], strict=True))
    assert first == [256, *b"a<x>", 264, *b"b", 257]
    assert second == [256, 261, *b"c", 264, 259, 262, *b"d", 259, 257]
    assert store.document_bytes.tolist() == [5, 2], "of text alone"


@pytest.mark.parametrize(
    ("document", "words"),
    [
        (
            Document(parts=("a", Media("image", b"x"))),
            r"document 0 cannot be encoded: it holds a medium \(image\).*Set data\.loader=multimodal",
        ),
        (Document(messages=(Message("user", (Media("video", "v.mp4"),)),)), r"a medium \(video\).*Set data\.loader=multimodal"),
        (Document(parts=(265,)), "token id 265 is out of range: the tokenizer has the ids 0 to 264"),
        (Document(), "neither text nor messages nor tokens nor parts"),
        (Document(messages=(Message("user", "a"),), tools=(ToolSpec("t", "", {}),)), "has no form for tools"),
        (Document(messages=(Message("assistant", "", tool_calls=(ToolCall("1", "t", "{}"),)),)), "has no form for tools"),
    ],
)
def test_what_text_alone_cannot_hold_is_refused(tmp_path, document, words):
    with pytest.raises(UsageError, match=words):
        store_of(tmp_path, document)


def test_text_of_parts():
    assert text_of("a") == "a" and text_of(("a", 3, Media("image", b""), "b")) == "ab"
