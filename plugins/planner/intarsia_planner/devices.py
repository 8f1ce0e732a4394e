"""Devices that runs can be planned for, with where each number is from. Torch-free.

Peaks, memory and links are the vendors' (dense rates): H100 and H200 data sheets (NVIDIA, 2024); Blackwell architecture brief and the DGX B200 and GB300 NVL72 data sheets (NVIDIA, 2025). What is reached of
them is measured on H200 (`benchmarks/results`: `llama3-1b-h200.json`, `flexshard-h200/large.json`, `operators-h200.json`, `optimizer-kernels-h200.json`) and taken over in proportion for the other GPUs,
on which nothing has been measured.
"""

from __future__ import annotations

import dataclasses

from intarsia.errors import UsageError, did_you_mean

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Device:
    """One device, and the links between several. Bytes, bytes per second and seconds; bandwidths are one direction's of one device.

    `memory` is what programs see, `reserve` what is left for the CUDA context, communication libraries and fragments of the allocator. `domain` devices are joined by fast links, more by a network. `product` is the rate of
    large matrix products in bfloat16, `attention` forward and backward rates by head dim; `streaming` what memory-bound kernels reach, `adding` what additions of two dtypes do.
    `gathering` and `reducing` are the rates of gathers and reductions over links beside computation, `alone` times these while nothing computes, `joining` the rate over networks; `sharing` is how much of the time of
    communication beside computation is lost to it. `workspace` is what matrix libraries allocate once.
    """

    name: str
    title: str
    peak: dict[str, float]
    memory: int
    reserve: int
    capabilities: frozenset[str]
    units: int
    product: float
    attention: dict[int, tuple[float, float]]
    streaming: float
    adding: float
    domain: int
    gathering: float
    reducing: float
    joining: float
    alone: float
    latency: float
    far_latency: float
    launch: float
    sharing: float
    workspace: int
    measured: str

    @property
    def usable(self) -> int:
        """What a run may take."""
        return self.memory - self.reserve

    @property
    def is_accelerator(self) -> bool:
        """Whether it has streams, so that communication runs beside computation."""
        return "cuda" in self.capabilities


def _gpu(level: int) -> frozenset[str]:
    levels = {f"sm{each}" for each in (70, 75, 80, 86, 89, 90, 100) if each <= level}
    return frozenset({"cpu", "bf16", "cuda", "fp8", "triton", "flex_backward", "varlen"} | levels | {f"sm{level}"})


H200 = Device(
    name="h200",
    title="NVIDIA H200",
    peak={"bfloat16": 989e12, "float16": 989e12, "float32": 495e12, "float8_e4m3fn": 1979e12},
    memory=int(139.8 * GIB),
    reserve=5 * GIB,
    capabilities=_gpu(90),
    units=132,
    # flexshard-h200/large.json, ours-copy-engine: 111.6 TFLOP of products in 156.8 ms are 712e12; the rest are waves and short sums (`rates.product`).
    product=760e12,
    # large.json: one row of 8192, 32/8 heads of 128; llama3-1b-h200.json: 4 rows of 8192, 32/8 heads of 64.
    attention={64: (415e12, 353e12), 128: (558e12, 432e12)},
    # optimizer-kernels-h200.json: AdamW moves 28 bytes of each of 262 M elements in 1.746 ms; llama3-1b-h200.json: additions of bfloat16 to float32.
    streaming=4.1e12,
    adding=2.4e12,
    domain=8,
    # large.json: 4.1 GB of gathers in 29.4 ms, 2.8 GB of reductions in 23.0 ms, beside computation (NCCL, two GPUs).
    gathering=140e9,
    reducing=122e9,
    joining=40e9,
    # Not measured: without matrix products beside them NCCL's kernels get all the memory bandwidth that they ask for.
    alone=1.2,
    latency=20e-6,
    far_latency=40e-6,
    launch=4.5e-6,
    # large.json and one.json: 52 ms of communication cost 9 ms of a step.
    sharing=0.17,
    workspace=100 * 2**20,
    measured="calibrated with runs on one and two H200 (NCCL over NVLink); more than two GPUs and networks are extrapolated",
)


def _scaled(
    name: str, title: str, peak: float, memory: float, bandwidth: float, link: float, network: float, domain: int, units: int, level: int
) -> Device:
    """Another GPU, on which nothing was measured: H200's efficiencies at its own peaks."""
    compute, stream, wire = peak / 989e12, bandwidth / 4.8e12, link / 450e9
    return dataclasses.replace(
        H200,
        name=name,
        title=title,
        peak={"bfloat16": peak, "float16": peak, "float32": peak / 2, "float8_e4m3fn": 2 * peak},
        memory=int(memory * GIB),
        capabilities=_gpu(level),
        units=units,
        product=H200.product * compute,
        attention={dim: (forward * compute, backward * compute) for dim, (forward, backward) in H200.attention.items()},
        streaming=H200.streaming * stream,
        adding=H200.adding * stream,
        domain=domain,
        gathering=H200.gathering * wire,
        reducing=H200.reducing * wire,
        joining=0.8 * network,
        measured=f"nothing is measured on it: the efficiencies of H200 at {title}'s peaks",
    )


DEVICES = {
    "h200": H200,
    "h100": _scaled("h100", "NVIDIA H100 SXM", 989e12, 79.1, 3.35e12, 450e9, 50e9, 8, 132, 90),
    "b200": _scaled("b200", "NVIDIA B200", 2250e12, 178.4, 8.0e12, 900e9, 50e9, 8, 148, 100),
    "gb300": _scaled("gb300", "NVIDIA GB300 NVL72", 2500e12, 277.0, 8.0e12, 900e9, 100e9, 72, 148, 100),
    "cpu": Device(
        name="cpu",
        title="one CPU thread",
        peak={"float32": 100e9, "bfloat16": 100e9, "float64": 50e9},
        memory=16 * GIB,
        reserve=2 * GIB,
        capabilities=frozenset({"cpu", "bf16"}),
        units=1,
        product=70e9,
        attention={64: (50e9, 50e9), 128: (50e9, 50e9)},
        streaming=8e9,
        adding=6e9,
        domain=2**20,
        gathering=1e9,
        reducing=1e9,
        joining=1e9,
        alone=1.0,
        latency=100e-6,
        far_latency=100e-6,
        launch=5e-6,
        sharing=1.0,
        workspace=0,
        measured="round numbers of one thread with AVX-512 and 16 GiB for each process; times are of the right order at best",
    ),
}


def find(name: str) -> Device:
    """The device `name`. UsageError with the nearest name."""
    if name not in DEVICES:
        raise UsageError(f"--device: there is no device {name!r}. {did_you_mean(name, DEVICES)} Known: {', '.join(DEVICES)}.")
    return DEVICES[name]
