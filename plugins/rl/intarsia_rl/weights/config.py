"""Settings of the weight transports. Torch-free."""

from __future__ import annotations

import chz

from intarsia_rl.bases import WeightTransportConfig


@chz.chz(typecheck=True)
class SharedMemoryConfig(WeightTransportConfig):
    """Through memory that trainer and generators of one machine share."""

    folder: str | None = chz.field(
        default=None, doc="Where the memory's files are; none: /dev/shm where there is room for two versions, else the run's directory."
    )
    versions: int = chz.field(
        default=4,
        doc="Most versions that are kept while somebody may still read them; the oldest is then overwritten, which its readers notice.",
    )


@chz.chz(typecheck=True)
class ServedConfig(WeightTransportConfig):
    """Of transports whose trainer ranks serve what they hold."""

    host: str | None = chz.field(
        default=None,
        doc="Address at which readers reach every trainer rank; none: of each rank the one that it reaches MASTER_ADDR by, else 127.0.0.1.",
    )
    versions: int = chz.field(default=4, doc="Most versions that are kept while nobody has retired them.")
    attempts: int = chz.field(default=4, doc="How often a reader tries before it gives up on a rank.")
    timeout_s: float = chz.field(default=30.0, doc="Longest wait for the next bytes.")


@chz.chz(typecheck=True)
class SocketConfig(ServedConfig):
    """Over TCP: each trainer rank serves the parts that it holds."""

    port: int = chz.field(default=0, doc="First port: rank r of a machine listens on port + r; 0: any that is free.")


@chz.chz(typecheck=True)
class CollectiveConfig(ServedConfig):
    """Over process groups of PyTorch, one for each pair of a trainer rank and a reader: NCCL from device to device, else gloo."""

    backend: str = chz.field(
        default="auto",
        doc="auto: nccl where both sides' tensors are on CUDA devices of their own, else gloo; nccl: refuse where that cannot be; gloo: always through the host.",
    )
    piece_bytes: int = chz.field(
        default=2**25, doc="Most bytes that are sent at once. A trainer rank has two buffers of this size for each reader."
    )
