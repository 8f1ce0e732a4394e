"""Offers what comes from the Hugging Face ecosystem: tokenizers, data sets, and model folders as a checkpoint format."""

from __future__ import annotations

from collections.abc import Sequence

from intarsia.contracts import Entry
from intarsia.hookspecs import hookimpl

INTARSIA_API = 1


@hookimpl
def offer_tokenizers() -> Sequence[Entry]:
    """Any `tokenizer.json`."""
    return [
        Entry(
            name="tokenizer_json",
            config="intarsia_huggingface.config:TokenizerJsonConfig",
            target="intarsia_huggingface.tokenizers_json:TokenizerJson",
            doc="Any tokenizer.json, by the tokenizers library.",
        )
    ]


@hookimpl
def offer_data_sources() -> Sequence[Entry]:
    """Data sets of the `datasets` library, which is installed apart: `pip install intarsia-huggingface[datasets]`."""
    return [
        Entry(
            name="hf_datasets",
            config="intarsia_huggingface.config:HFDatasetsConfig",
            target="intarsia_huggingface.hf_datasets:HFDatasetsSource",
            doc="A data set of the datasets library: from the hub, local files, or a folder made by save_to_disk.",
        )
    ]


@hookimpl
def offer_checkpoint_formats() -> Sequence[Entry]:
    """Folders that transformers reads."""
    return [
        Entry(
            name="hf",
            target="intarsia_huggingface.hf_format:HFFormat",
            doc="A Hugging Face model folder. Options: to: dtype, shard_size; from: recipe, dtype, backend.",
        )
    ]
