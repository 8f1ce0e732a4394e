"""How long work takes on a device: a roofline for each class of operation. Seconds. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from intarsia_planner.devices import Device
    from intarsia_planner.fake import Message
    from intarsia_planner.trace import Work

# What a matrix product's multiprocessors compute at a time, and how many steps of the sum it takes to get going: fits H200's products of 1024 to 14336.
TILE = (128, 256)
RAMP = 192
# What compilation leaves of the bytes that memory-bound operators move as written: llama3-1b-h200.json, 63 ms for 32 layers of 32768 tokens.
FUSED = 0.2
# Torch's flash attention, which context parallelism calls, over cuDNN's, which whole rows take: operators-h200.json, 7.3 and 4.8 ms.
FLASH = 0.66
# What an optimizer's products of stacked matrices reach of the rate of large products: flexshard-h200/muon.json, 37.5 TFLOP of Newton-Schulz in 52 ms of kernels.
STACKED = 0.95


def product(device: Device, m: int, n: int, k: int, dtype: str) -> float:
    """Seconds of one matrix product."""
    if not m * n * k:
        return 0.0
    rate = device.product * min(device.peak.get(dtype, device.peak["float32"]) / device.peak["bfloat16"], 1.0)
    if device.units > 1:
        waves = math.ceil(m / TILE[0]) * math.ceil(n / TILE[1]) / device.units
        rate *= waves / math.ceil(waves) * k / (k + RAMP)
    width = 2 if dtype in ("bfloat16", "float16") else 4
    return max(2.0 * m * n * k / rate, width * (m * n + m * k + n * k) / device.streaming, device.launch / 2)


def matrices(device: Device, flops: float, dtype: str) -> float:
    """Seconds of an optimizer's products."""
    peak = device.peak.get(dtype, device.peak["float32"])
    return flops / (STACKED * device.product * min(peak / device.peak["bfloat16"], 1.0))


def attention(device: Device, dim: int, backward: bool, flash: bool) -> float:
    """FLOP/s of attention with heads of `dim`."""
    nearest = min(device.attention, key=lambda each: abs(each - dim))
    rate = device.attention[nearest][backward]
    return rate * FLASH if flash and device.is_accelerator else rate


def compute(device: Device, work: Work, dtype: str, compiled: bool) -> float:
    """Seconds of a piece's computation, communication apart."""
    total = sum(product(device, *shape, dtype) * count for shape, count in work.products.items())
    total += sum(flops / attention(device, dim, backward, flash) for (dim, backward, flash), flops in work.attention.items())
    share = FUSED if compiled else 1.0
    streams = (work.moved * share + work.moved_alone) / device.streaming
    return total + max(streams, (work.launches * share + work.launches_alone) * device.launch)


def message(device: Device, each: Message, span: int, alone: bool) -> float:
    """Seconds of one collective whose group spans `span` neighbouring ranks; `alone`: nothing computes meanwhile."""
    is_far = span > device.domain
    rate = (
        device.joining if is_far else device.gathering if each.call in ("gather_v", "broadcast", "receive", "exchange") else device.reducing
    )
    return (device.far_latency if is_far else device.latency) + each.received / (rate * (device.alone if alone else 1.0))


def messages(device: Device, found: Iterable[Message], spans: dict[str, int], alone: bool) -> float:
    """Seconds of several, one after the other."""
    return sum(message(device, each, spans.get(each.axes, each.ranks), alone) for each in found)
