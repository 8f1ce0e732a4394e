"""The kind of this distribution. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from intarsia.contracts import Entry
from intarsia.hookspecs import offer


@offer("processor", base="intarsia_data.bases:ProcessorConfig")
def offer_processors() -> Sequence[Entry]:
    """Processors, which turn documents with images and video into tokens and patches. Target: `build(config, tokenizer) -> Processor`
    (`intarsia_multimodal.contracts`), in a module that imports no torch: processes that decode are light."""
    return ()
