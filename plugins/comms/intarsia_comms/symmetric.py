"""Memory that the GPUs of one host map into each other, through torch's symmetric memory.

The one module that calls `torch.distributed._symmetric_memory`. NVLink multicast stays off: mapping it can take a host's fabric down for all who
share it, and copies between two GPUs have no use for it.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from intarsia.comm import Communicator
from intarsia.errors import UsageError
from torch import Tensor

NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
GRANULE = 2 << 20
"""The driver hands out memory that can be mapped by others in pages of this many bytes."""


class Block(Protocol):
    """Memory of one size on every rank of a group. `views[r]` is rank r's as bytes (uint8, 1-D), readable here; this rank's own is what it writes."""

    views: Sequence[Tensor]

    def barrier(self, channel: int) -> None:
        """On the current stream: what comes after runs once every rank has come here. Channels do not disturb each other."""


class Memory(Protocol):
    """What provides blocks."""

    def fault(self, comm: Communicator) -> str | None:
        """Why this rank cannot take part, whatever the others are; None when it can. No collective."""

    def facts(self, comm: Communicator) -> dict[str, Any]:
        """JSON by which the ranks judge whether they reach each other (`unreachable`). No collective."""

    def unreachable(self, facts: Sequence[dict[str, Any]], rank: int) -> str | None:
        """Why `rank` cannot reach another, from all ranks' facts; None when it can."""

    def usable(self, size: int) -> int:
        """How many bytes a block has that is asked for with `size`: what rounding leaves is usable."""

    def footprint(self, size: int) -> int:
        """How many bytes of the device such a block takes."""

    def block(self, comm: Communicator, size: int) -> Block:
        """A new block of `size` bytes. A collective: every rank asks for the same size."""


class DeviceBlock:
    """Symmetric memory of torch."""

    def __init__(self, comm: Communicator, size: int) -> None:
        library = importlib.import_module("torch.distributed._symmetric_memory")
        group: Any = getattr(comm, "group", None)
        self._own = library.empty(size, dtype=torch.uint8, device=comm.device)
        self._handle = library.rendezvous(self._own, group.group_name)
        if self._handle.multicast_ptr:
            raise UsageError(
                f"The memory of group {comm.name!r} was mapped with NVLink multicast. Set {NO_MULTICAST}=1 in the environment of every process."
            )
        peers = [self._own if rank == comm.rank else self._handle.get_buffer(rank, (size,), torch.uint8) for rank in range(comm.size)]
        self.views: Sequence[Tensor] = peers
        # A rank that never comes would leave the others' device spinning: the kernel gives up and says which rank it missed. A little later than
        # the communicator, which knows the names of things, says so.
        self._timeout_ms = int(getattr(comm, "timeout_s", 600.0) * 1250)

    def barrier(self, channel: int) -> None:
        """See `Block.barrier`."""
        self._handle.barrier(channel, self._timeout_ms)


class DeviceMemory:
    """Blocks of symmetric memory on CUDA devices."""

    def fault(self, comm: Communicator) -> str | None:
        """See `Memory.fault`."""
        if comm.device.type != "cuda":
            return f"its tensors are on the device {str(comm.device)!r}, which has no copy engines; it needs an NVIDIA GPU for each process"
        if getattr(comm, "group", None) is None:
            return f"its communicator ({type(comm).__name__}) stands on no torch process group, through which memory is mapped"
        try:
            library = importlib.import_module("torch.distributed._symmetric_memory")
        except ImportError as error:
            return f"this torch ({torch.__version__}) has no symmetric memory ({error})"
        missing = [name for name in ("empty", "rendezvous") if not hasattr(library, name)]
        if missing or torch.version.cuda is None:
            return f"the symmetric memory of this torch ({torch.__version__}) lacks {', '.join(missing) or 'CUDA'}"
        backend = os.environ.get("TORCH_SYMMMEM", "CUDA")
        if backend != "CUDA":
            return f"TORCH_SYMMMEM={backend} chooses another kind of symmetric memory; unset it, or set it to CUDA"
        return multicast_fault()

    def facts(self, comm: Communicator) -> dict[str, Any]:
        """See `Memory.facts`: the host, this rank's GPU, the GPUs that it sees, those whose memory it can reach, and where sockets lie."""
        if comm.device.type != "cuda":
            return {}
        seen = range(torch.cuda.device_count())
        own = torch.cuda.current_device() if comm.device.index is None else comm.device.index
        names = [str(torch.cuda.get_device_properties(index).uuid) for index in seen]
        reached = [names[index] for index in seen if index == own or torch.cuda.can_device_access_peer(own, index)]
        folder = next((os.environ[name] for name in ("TMPDIR", "TMP", "TEMP", "TEMPDIR") if name in os.environ), "/tmp")
        return {"host": host(), "index": own, "gpu": names[own], "sees": names, "reaches": reached, "sockets": folder}

    def unreachable(self, facts: Sequence[dict[str, Any]], rank: int) -> str | None:
        """See `Memory.unreachable`."""
        own = facts[rank]
        for peer, other in enumerate(facts):
            if other["host"] != own["host"]:
                return (
                    f"ranks {rank} and {peer} run on different hosts ({own['host']}, {other['host']}); copy engines reach GPUs of one host"
                )
            if peer != rank and other["gpu"] == own["gpu"]:
                return f"ranks {rank} and {peer} share one GPU ({own['gpu']}); start one process for each GPU"
            if other["gpu"] not in own["sees"] or (peer != rank and other["index"] == own["index"]):
                return (
                    f"rank {rank} does not see the GPU of rank {peer} under its own number: let every process see all GPUs (the same "
                    f"CUDA_VISIBLE_DEVICES for all) and choose its own by LOCAL_RANK"
                )
            if other["gpu"] not in own["reaches"]:
                return f"the GPUs of ranks {rank} and {peer} (cuda:{own['index']}, cuda:{other['index']}) have no access to each other's memory"
            if other["sockets"] != own["sockets"]:
                return f"ranks {rank} and {peer} have different TMPDIR ({own['sockets']}, {other['sockets']}), and handles go through sockets in it"
        return None

    def usable(self, size: int) -> int:
        """See `Memory.usable`."""
        return self.footprint(size) - self._pads()

    def footprint(self, size: int) -> int:
        """See `Memory.footprint`."""
        return -(-(size + self._pads()) // GRANULE) * GRANULE

    def block(self, comm: Communicator, size: int) -> Block:
        """See `Memory.block`."""
        fault = multicast_fault()
        if fault is not None:
            raise UsageError(f"Memory of group {comm.name!r} cannot be mapped: {fault}.")
        return DeviceBlock(comm, size)

    def _pads(self) -> int:
        """Bytes that the signals of a block take, rounded up generously: torch aligns them by rules of its own."""
        library = importlib.import_module("torch.distributed._symmetric_memory")
        return int(getattr(library, "get_signal_pad_size", lambda: 2048)()) + 4096


def multicast_fault() -> str | None:
    """Turn NVLink multicast off in this process, unless its environment says otherwise: then why memory must not be mapped."""
    said = os.environ.setdefault(NO_MULTICAST, "1")
    # torch takes 1 and 0, and reads any other word as if nothing had been said.
    return None if said == "1" else f"{NO_MULTICAST} is {said!r}, and NVLink multicast must stay off: set it to 1, or unset it"


def host() -> str:
    """What tells this host from others. Containers of one host count as several: mapping memory needs one space of process numbers."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{os.uname().nodename}, started as {boot.read_text()[:8]}" if boot.exists() else os.uname().nodename
