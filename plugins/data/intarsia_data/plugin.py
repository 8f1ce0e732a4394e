"""The loader, sources and the byte tokenizer. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from intarsia.contracts import BuildStage, Entry, Run
from intarsia.hookspecs import hookimpl

INTARSIA_API = 1


@hookimpl
def offer_loaders() -> Sequence[Entry]:
    """Loaders."""
    return [
        Entry(
            name="packed",
            config="intarsia_data.config:PackedConfig",
            target="intarsia_data.loader:build",
            doc="Rows packed from tokenised documents, in an exact global order.",
        )
    ]


@hookimpl
def offer_data_sources() -> Sequence[Entry]:
    """Sources of documents."""
    home, configs = "intarsia_data.sources", "intarsia_data.config"
    return [
        Entry(
            name="stdlib", config=f"{configs}:StdlibConfig", target=f"{home}:StdlibSource", doc="The Python standard library's source code."
        ),
        Entry(
            name="text",
            config=f"{configs}:TextConfig",
            target=f"{home}:TextSource",
            doc="Text files, one document each or cut by a separator.",
        ),
        Entry(
            name="jsonl",
            config=f"{configs}:JsonlConfig",
            target=f"{home}:JsonlSource",
            doc="One JSON object on each line: text, chat or ids.",
        ),
    ]


@hookimpl
def after_build(run: Run, stage: BuildStage) -> None:
    """Compare over ranks what the order of samples depends on, as soon as collectives are allowed."""
    if stage == "model":
        from intarsia_data.steps import agree_on_order

        agree_on_order(run)


@hookimpl
def offer_tokenizers() -> Sequence[Entry]:
    """Tokenizers."""
    return [
        Entry(
            name="byte",
            config="intarsia_data.config:ByteTokenizerConfig",
            target="intarsia_data.tokenizer:ByteTokenizer",
            doc="Bytes of UTF-8 and a few special ids.",
        )
    ]
