"""The Llama that `flexshard_gpu.py` trains with both runtimes: plain modules, the loss inside of `head`, initial values drawn on the device.

Shape suffixes: B rows, S tokens, D model width, H query heads, K key/value heads, F width of one head, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from intarsia import ops
from intarsia.contracts import Init, Region, Regions
from intarsia.layout import region_numel, slices
from intarsia.parameters import ParameterTable
from intarsia_models_common.scaled_linear import scaled_linear
from torch import Tensor, nn

ROPE_BASE = 500_000.0
STD = 0.02


@dataclasses.dataclass(frozen=True)
class Size:
    """Sizes of a model and of what one process trains on in one step."""

    vocabulary: int
    dim: int
    heads: int
    kv_heads: int
    hidden: int
    layers: int
    tokens: int
    rows: int = 1


SIZES = {
    "large": Size(128_256, 4096, 32, 8, 14_336, layers=8, tokens=8192),
    "small": Size(32_000, 1024, 16, 8, 2816, layers=24, tokens=1024),
    "fp8": Size(32_000, 4096, 32, 8, 14_336, layers=8, tokens=512),
    "curve": Size(1024, 512, 8, 4, 1536, layers=6, tokens=512, rows=4),
}
DEBUG_SIZES = {
    "large": Size(256, 128, 4, 2, 256, layers=3, tokens=32),
    "small": Size(128, 64, 4, 2, 128, layers=4, tokens=16),
    "fp8": Size(128, 128, 4, 2, 256, layers=3, tokens=16),
    "curve": Size(128, 128, 4, 2, 256, layers=2, tokens=16, rows=2),
}


class Linear(nn.Linear):
    """y = x W^T. Where a sharder gathers float8, it puts payload and scales beside the weight, which then only takes the gradient."""

    reads_payload: ClassVar[tuple[str, ...]] = ("weight",)
    weight_payload: Tensor | None = None
    weight_scales: Tensor | None = None
    weight_tile: tuple[int, int] = (128, 128)

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] to [..., outputs]."""
        if self.weight_payload is None or self.weight_scales is None:
            return ops.linear(x, self.weight)
        return scaled_linear(x, self.weight, self.weight_payload, self.weight_scales, None, self.weight_tile)


class Block(nn.Module):
    """Attention with rotary positions and grouped heads, then SwiGLU, each behind a norm and added to the stream."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.width = size.dim // size.heads
        self.attention_norm = nn.RMSNorm(size.dim, eps=1e-5)
        self.q = Linear(size.dim, size.dim)
        self.k = Linear(size.dim, size.kv_heads * self.width)
        self.v = Linear(size.dim, size.kv_heads * self.width)
        self.o = Linear(size.dim, size.dim)
        self.mlp_norm = nn.RMSNorm(size.dim, eps=1e-5)
        self.gate = Linear(size.dim, size.hidden)
        self.up = Linear(size.dim, size.hidden)
        self.down = Linear(size.hidden, size.dim)

    def forward(self, x_BSD: Tensor, cos_SF: Tensor, sin_SF: Tensor) -> Tensor:
        """The stream after this block."""
        y_BSD = self.attention_norm(x_BSD)
        q_BHSF, k_BKSF, v_BKSF = (linear(y_BSD).unflatten(-1, (-1, self.width)).transpose(1, 2) for linear in (self.q, self.k, self.v))
        q_BHSF, k_BKSF = rotate(q_BHSF, cos_SF, sin_SF), rotate(k_BKSF, cos_SF, sin_SF)
        z_BHSF = F.scaled_dot_product_attention(q_BHSF, k_BKSF, v_BKSF, is_causal=True, enable_gqa=True)
        x_BSD = x_BSD + self.o(z_BHSF.transpose(1, 2).flatten(-2))
        y_BSD = self.mlp_norm(x_BSD)
        return x_BSD + self.down(F.silu(self.gate(y_BSD)) * self.up(y_BSD))


class Head(nn.Module):
    """Final norm, projection and loss in one module, so that a sharder unshards the projection around its only use."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(size.dim, eps=1e-5)
        self.weight = nn.Parameter(torch.empty(size.vocabulary, size.dim))
        self.loss = cross_entropy

    def forward(self, x_BSD: Tensor, labels_BS: Tensor) -> Tensor:
        """Mean cross-entropy."""
        return self.loss(F.linear(self.norm(x_BSD), self.weight), labels_BS)


class Llama(nn.Module):
    """Embedding, blocks, head. An `intarsia.contracts.Model` as far as sharders look at it."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        self.embedding = nn.Embedding(size.vocabulary, size.dim)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.head = Head(size)

    def forward(self, tokens_BS: Tensor, labels_BS: Tensor, cos_SF: Tensor, sin_SF: Tensor) -> Tensor:
        """The loss."""
        x_BSD = self.embedding(tokens_BS)
        for block in self.blocks:
            x_BSD = block(x_BSD, cos_SF, sin_SF)
        return self.head(x_BSD, labels_BS)

    def regions(self) -> Regions:
        """The blocks."""
        return Regions(blocks=tuple(f"blocks.{index}" for index in range(len(self.blocks))))

    def inits(self) -> Mapping[str, Init]:
        """Normal but for the norms."""
        return {name: Init("ones") if parameter.dim() < 2 else Init("normal", std=STD) for name, parameter in self.named_parameters()}


def rotate(x: Tensor, cos_SF: Tensor, sin_SF: Tensor) -> Tensor:
    """Rotary positions on the last dimension, halves paired."""
    first, second = x.chunk(2, -1)
    return x * cos_SF + torch.cat((-second, first), -1) * sin_SF


def cross_entropy(logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
    """Mean over tokens, in float32."""
    return F.cross_entropy(logits_BSV.flatten(0, 1).float(), labels_BS.flatten())


def rotary_tables(size: Size, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines [S, F]. In the compute dtype for both runtimes: `fully_shard` casts the inputs of what it wraps."""
    width = size.dim // size.heads
    rates = ROPE_BASE ** (-torch.arange(0, width, 2, device=device, dtype=torch.float32) / width)
    angles_SF = torch.outer(torch.arange(size.tokens, device=device, dtype=torch.float32), rates).repeat(1, 2)
    return angles_SF.cos().to(dtype), angles_SF.sin().to(dtype)


def initial_values(name: str, shape: Sequence[int], device: torch.device, seed: int = 0) -> Tensor:
    """A parameter's whole float32 initial value, drawn on the device: the same bits for every runtime and rank, and fast at eight billion elements' width."""
    if len(shape) < 2:
        return torch.ones(tuple(shape), device=device)
    generator = torch.Generator(device)
    generator.manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
    return torch.empty(tuple(shape), device=device).normal_(std=STD, generator=generator)


class DeviceTable(ParameterTable):
    """A parameter table whose initial values are `initial_values`: the framework's own are drawn on the CPU, minutes at this size."""

    def fill(self, name: str, region: Region, out: Tensor, seed: int | None = None) -> None:
        """See `ParameterTable.fill`."""
        info = self[name]
        device = torch.device(self.mesh.device) if self.mesh is not None else out.device
        whole = initial_values(info.name, info.shape, device, self.seed if seed is None else seed)
        flat, offset = out.detach().view(-1), 0
        assert flat.numel() == region_numel(region)
        for box in region:
            flat[offset : offset + box.numel].view(box.size).copy_(whole[slices(box)])
            offset += box.numel


def random_batch(size: Size, device: torch.device, seed: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels [B, S], uniform."""
    generator = torch.Generator(device)
    generator.manual_seed(seed)
    ids = torch.randint(size.vocabulary, (size.rows, size.tokens + 1), device=device, generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def learnable_batches(size: Size, device: torch.device, steps: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Batches that a model learns from: each id is followed by one of four of its own, one of them more often, one time in ten by any."""
    rule = torch.Generator().manual_seed(0)
    followers_V4 = torch.randint(size.vocabulary, (size.vocabulary, 4), generator=rule)
    draw = torch.Generator().manual_seed(1 + seed)
    ids = torch.empty(steps * size.rows, size.tokens + 1, dtype=torch.int64)
    ids[:, 0] = torch.randint(size.vocabulary, (len(ids),), generator=draw)
    choices = torch.randint(6, ids.shape, generator=draw).clamp(max=3)
    noise = torch.randint(size.vocabulary, ids.shape, generator=draw)
    is_noise = torch.rand(ids.shape, generator=draw) < 0.1
    for position in range(1, ids.shape[1]):
        next_ids = followers_V4[ids[:, position - 1], choices[:, position]]
        ids[:, position] = torch.where(is_noise[:, position], noise[:, position], next_ids)
    ids = ids.to(device)
    return [(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in ids.split(size.rows)]
