"""Settings of the Parquet and Arrow sources. Imports neither torch nor pyarrow."""

from __future__ import annotations

import chz
from intarsia.config.bases import DataSourceConfig


@chz.chz(typecheck=True)
class ParquetConfig(DataSourceConfig):
    """Parquet files."""

    paths: tuple[str, ...] = chz.field(doc="Files or globs (** goes into folders). Each must match something.")
    column: str = chz.field(
        default="text",
        doc="The column that holds the document: a string is text, a list of {role, content} a conversation, a list of integers token ids.",
    )
    trained: str = chz.field(
        default="trained", doc="The column that, where a file has it, holds for each token id whether it is trained on."
    )


@chz.chz(typecheck=True)
class ArrowConfig(DataSourceConfig):
    """Arrow IPC files (file and stream format) and Feather files of version 2."""

    paths: tuple[str, ...] = chz.field(doc="Files or globs (** goes into folders). Each must match something.")
    column: str = chz.field(
        default="text",
        doc="The column that holds the document: a string is text, a list of {role, content} a conversation, a list of integers token ids.",
    )
    trained: str = chz.field(
        default="trained", doc="The column that, where a file has it, holds for each token id whether it is trained on."
    )
