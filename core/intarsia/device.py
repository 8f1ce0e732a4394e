"""CPU and CUDA behind one facade: which device, what it can do, peak memory and peak speed.

Stability: provisional.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import operator
import os
import platform
import resource
import sys
from typing import TYPE_CHECKING

import torch

from intarsia.errors import UsageError

if TYPE_CHECKING:
    from intarsia.contracts import Batch

# Dense peak FLOP/s of matrix products by a part of the device's name (the longest that fits) and dtype, from the vendor's data sheets;
# float32 is TF32 where the device has it.
PEAK_FLOPS: dict[str, dict[str, float]] = {
    "B200": {"bfloat16": 2.25e15, "float16": 2.25e15, "float8_e4m3fn": 4.5e15, "float32": 1.1e15},
    "GB200": {"bfloat16": 2.5e15, "float16": 2.5e15, "float8_e4m3fn": 5.0e15, "float32": 1.25e15},
    "H200": {"bfloat16": 9.89e14, "float16": 9.89e14, "float8_e4m3fn": 1.979e15, "float32": 4.95e14},
    "H100 PCIe": {"bfloat16": 7.56e14, "float16": 7.56e14, "float8_e4m3fn": 1.513e15, "float32": 3.78e14},
    "H100 NVL": {"bfloat16": 8.35e14, "float16": 8.35e14, "float8_e4m3fn": 1.671e15, "float32": 4.18e14},
    "H100": {"bfloat16": 9.89e14, "float16": 9.89e14, "float8_e4m3fn": 1.979e15, "float32": 4.95e14},
    "H20": {"bfloat16": 1.48e14, "float16": 1.48e14, "float8_e4m3fn": 2.96e14, "float32": 7.4e13},
    "A100": {"bfloat16": 3.12e14, "float16": 3.12e14, "float32": 1.56e14},
    "L40S": {"bfloat16": 3.62e14, "float16": 3.62e14, "float8_e4m3fn": 7.33e14, "float32": 1.83e14},
    "A10": {"bfloat16": 1.25e14, "float16": 1.25e14, "float32": 6.25e13},
    "V100": {"float16": 1.25e14, "float32": 1.57e13},
}


def select(name: str = "auto") -> torch.device:
    """This process's device for `train.device`: auto (CUDA where there is one), cpu, or cuda; the GPU is the one that LOCAL_RANK numbers."""
    if name not in ("auto", "cpu", "cuda"):
        raise UsageError(f"train.device is {name!r}; it must be auto, cpu or cuda.")
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UsageError(
            "train.device is cuda, but torch sees no CUDA device here. Use train.device=cpu, or install a CUDA build of torch."
        )
    local, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local >= count:
        raise UsageError(
            f"LOCAL_RANK is {local}, but this machine shows {count} CUDA device{'s' * (count > 1)}. Start one process for each."
        )
    return torch.device("cuda", local)


def on_device(batch: Batch, device: torch.device) -> Batch:
    """The batch with its tensors on `device`, those in dicts and tuples of `extra` included; whatever holds none stays the very object. A function in `extra` makes its tensor there, whenever it is called."""
    if device.type == "cpu":
        return batch

    def move(value: object) -> object:
        if isinstance(value, torch.Tensor):
            # Pinned, since a copy from pageable memory would wait for all that the device has still to do.
            return value.pin_memory().to(device, non_blocking=True)
        if type(value) is dict:
            return {name: move(item) for name, item in value.items()}
        if type(value) is tuple:
            moved = tuple(map(move, value))
            return value if all(map(operator.is_, moved, value)) else moved
        return (lambda: move(value())) if callable(value) else value

    tensors = {name: move(getattr(batch, name)) for name in ("tokens_BS", "labels_BS", "positions_BS", "documents_BS")}
    return dataclasses.replace(batch, extra=move(batch.extra), **tensors)  # type: ignore[arg-type]


@functools.cache
def capabilities() -> frozenset[str]:
    """What kernels may need of this machine, probed: `cpu`, `cuda`, `sm80` ... (every compute capability up to the device's), `bf16`, `fp8`, `triton`,
    `flex_backward` (flex attention with gradients), `varlen` (variable-length attention), `fla` and `attn_gym` (those packages); where the CPU is the device that runs use, `onednn` and `avx512`."""
    found = {"cpu", "bf16"} | {each for each in ("fla", "attn_gym") if importlib.util.find_spec(each)}
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        found |= {"cuda", f"sm{major}{minor}"} | {
            f"sm{level}" for level in (70, 75, 80, 86, 89, 90, 100, 120) if level <= 10 * major + minor
        }
        found -= set() if torch.cuda.is_bf16_supported() else {"bf16"}
        found |= {"fp8"} if major * 10 + minor >= 89 else set()
        found |= {"triton", "flex_backward"} if importlib.util.find_spec("triton") else set()
        found |= {"varlen"} if importlib.util.find_spec("torch.nn.attention.varlen") and major >= 8 else set()
    else:
        found |= {"onednn"} if torch.backends.mkldnn.is_available() else set()
        found |= {"avx512"} if torch.backends.cpu.get_cpu_capability().startswith("AVX512") else set()
    return frozenset(found)


def peak_flops(device: torch.device, dtype: str) -> float | None:
    """The device's peak FLOP/s for matrix products in `dtype`; None where it is not known (a CPU, say): then there is no MFU."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    fitting = sorted((key for key in PEAK_FLOPS if key in name), key=len)
    return PEAK_FLOPS[fitting[-1]].get(dtype) if fitting else None


def describe(device: torch.device) -> str:
    """The device as a person would name it: the GPU's name, or the CPU's architecture and thread count."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {torch.get_num_threads()} thread{'s' * (torch.get_num_threads() > 1)}"


def peak_memory(device: torch.device) -> int:
    """The most memory in bytes that this process has used: allocated on the GPU, or resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
