"""Settings of the tokenizer and of the data source. Imports neither torch nor a Hugging Face library."""

from __future__ import annotations

import chz
from intarsia.config.bases import DataSourceConfig, TokenizerConfig


@chz.chz(typecheck=True)
class TokenizerJsonConfig(TokenizerConfig):
    """A tokenizer in the format of the `tokenizers` library."""

    path: str = chz.field(doc="The tokenizer.json, or the folder it lies in.")
    bos: str | None = chz.field(
        default=None, doc="Text of the token that begins a document; empty: none; not set: as tokenizer_config.json beside it says."
    )
    eos: str | None = chz.field(
        default=None, doc="Text of the token that ends a document; empty: none; not set: as tokenizer_config.json beside it says."
    )
    pad: str | None = chz.field(
        default=None, doc="Text of the token that fills rows; empty: none (eos is taken); not set: as tokenizer_config.json beside it says."
    )
    turn_start: str = chz.field(
        default="", doc="Chat: what stands before a turn's content, with {role} in it: <|im_start|>{role} and a new line, for example."
    )
    turn_end: str = chz.field(
        default="", doc="Chat: what stands after a turn's content and is trained on with it: <|im_end|>, for example."
    )
    roles: tuple[str, ...] = chz.field(default=("system", "user", "assistant", "tool"), doc="Chat: the roles that turns may have.")


@chz.chz(typecheck=True)
class HFDatasetsConfig(DataSourceConfig):
    """A data set as `datasets.load_dataset` takes it. Scripts that come with a data set are never run."""

    path: str = chz.field(
        doc="A name on the hub, a kind of local file (json, parquet, text ...) with data_files, or a folder made by save_to_disk."
    )
    name: str | None = chz.field(default=None, doc="Configuration of the data set, where it has several.")
    split: str = chz.field(default="train", doc="The split; slices such as train[:10%] too.")
    column: str = chz.field(
        default="text",
        doc="The column that holds the document: a string is text, a list of {role, content} a conversation, a list of integers token ids.",
    )
    trained: str = chz.field(
        default="trained", doc="The column that, where there is one, holds for each token id whether it is trained on."
    )
    data_files: tuple[str, ...] = chz.field(default=(), doc="Files, where path names a kind of local file.")
    revision: str | None = chz.field(default=None, doc="Commit, tag or branch on the hub; give a commit for data that never changes.")
