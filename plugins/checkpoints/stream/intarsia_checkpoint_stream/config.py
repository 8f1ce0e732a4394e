"""Settings of the stream backend. Torch-free."""

from __future__ import annotations

import chz
from intarsia.config import CheckpointBackendConfig


@chz.chz(typecheck=True)
class StreamConfig(CheckpointBackendConfig):
    """Settings of writing; reading never depends on them."""

    file_bytes: int = chz.field(default=4 << 30, doc="A rank begins a further file when its file has reached this many bytes.")
    chunk_bytes: int = chz.field(default=16 << 20, doc="Bytes handed to the storage at once.")
    alignment: int = chz.field(default=128, doc="Tensors start at multiples of this many bytes.")

    @chz.validate
    def _positive(self) -> None:
        for name in ("file_bytes", "chunk_bytes", "alignment"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, is {getattr(self, name)}")
