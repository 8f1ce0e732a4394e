"""Settings of the loader, the sources and the byte tokenizer. Torch-free."""

from __future__ import annotations

import chz
from intarsia.config.bases import DataSourceConfig, LoaderConfig, TokenizerConfig


@chz.chz(typecheck=True)
class PackedConfig(LoaderConfig):
    """Rows of tokenised documents in an exact global order; how they are packed and shuffled is `data.packing` and `data.shuffle`."""


@chz.chz(typecheck=True)
class StdlibConfig(DataSourceConfig):
    """The source code of the Python standard library on this machine, one document for each file: real text without a download."""

    limit: int | None = chz.field(default=None, doc="Only the first this many files in alphabetical order; none: all.")


@chz.chz(typecheck=True)
class TextConfig(DataSourceConfig):
    """Text files, plain or .gz."""

    paths: tuple[str, ...] = chz.field(doc="Files or globs (** goes into folders). Each must match something.")
    separator: str = chz.field(
        default="", doc="What stands between documents in a file (two newlines: blank lines); empty: each file is one document."
    )
    errors: str = chz.field(default="strict", doc="Bytes that are no UTF-8: strict stops, replace puts U+FFFD.")


@chz.chz(typecheck=True)
class JsonlConfig(DataSourceConfig):
    """Files with one JSON object on each line, plain or .gz."""

    paths: tuple[str, ...] = chz.field(doc="Files or globs (** goes into folders). Each must match something.")
    field: str = chz.field(
        default="text",
        doc="The field that holds the document: a string is text, a list of {role, content} a conversation (its tools in the field tools), a list of integers token ids.",
    )
    trained: str = chz.field(
        default="trained", doc="The field that, where a record has it, holds for each token id whether it is trained on."
    )
    errors: str = chz.field(default="strict", doc="Bytes that are no UTF-8: strict stops, replace puts U+FFFD.")


@chz.chz(typecheck=True)
class ByteTokenizerConfig(TokenizerConfig):
    """One id for each byte of UTF-8, then bos, eos, pad, end of turn, one marker for each role, and the further special tokens: 264 ids by default."""

    roles: tuple[str, ...] = chz.field(
        default=("system", "user", "assistant", "tool"), doc="Roles of conversations, in the order of their ids."
    )
    specials: tuple[str, ...] = chz.field(
        default=(),
        doc="Further special tokens by what they are called (`<|image_pad|>`), in the order of their ids. They are never recognised in text.",
    )
