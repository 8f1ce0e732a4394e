"""The stream backend keeps every promise of the contract."""

from __future__ import annotations

from intarsia_checkpoint_stream.config import StreamConfig
from intarsia_testing.checkpoint_backend import CheckpointBackendConformance


class TestStream(CheckpointBackendConformance):
    entry = "intarsia-checkpoint-stream:stream"
    configs = (StreamConfig(), StreamConfig(file_bytes=1, chunk_bytes=3, alignment=1), StreamConfig(file_bytes=500, alignment=4096))
