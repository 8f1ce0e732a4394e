"""A vision transformer over packed patches, on one device. N patches, C values of a patch, D width, H heads, d half of a head's width, F hidden width, m patches of a feature, M features.

x = W patch + b + position, the position resampled from a square table of learned ones
for each block:  x = x + Attention(LayerNorm(x));  x = x + W2 gelu(W1 LayerNorm(x)),  attention within each frame, turned by a patch's row and column
features = W2 gelu(W1 [LayerNorm(x) of m patches]);  deepstack_k = W2 gelu(W1 LayerNorm([x behind block k of m patches]))

As transformers' `Qwen3VLVisionModel` computes it. Images of any number of patches, and no image at all, are ordinary: with no patches every module runs and every gradient is zeros.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from intarsia import ops
from intarsia.contracts import Init
from intarsia.errors import UsageError
from torch import Tensor, nn

from intarsia_models_common.build import Linear, Scope, parameter
from intarsia_models_common.config import RopeConfig
from intarsia_models_common.rope import Rope, RopeTables
from intarsia_models_common.vision import grids as sizes
from intarsia_models_common.vision.config import LayerNormConfig, VisionConfig
from intarsia_models_common.vision.flops import frame_flops
from intarsia_models_common.vision.norm import LayerNorm
from intarsia_models_common.vision.operators import SEGMENT_ATTENTION

THETA = 10000.0


class PositionTable(nn.Module):
    """Learned positions on a square of table x table, between which patches' positions are interpolated."""

    def __init__(self, table: int, dim: int, std: float) -> None:
        super().__init__()
        self.std = std
        self.weight = parameter(table * table, dim)

    def forward(self, entries_4N: Tensor, weights_4N: Tensor) -> Tensor:
        """[N, D] in float32 or better: the weighted sum of four entries for each patch."""
        taps = zip(entries_4N, weights_4N, strict=True)
        return torch.stack([ops.embedding(entries_N, self.weight) * weights_N[:, None] for entries_N, weights_N in taps]).sum(0)

    def inits(self) -> dict[str, Init]:
        """Normal."""
        return {"weight": Init("normal", std=self.std)}


class AxialRope(Rope):
    """Half of a head's pairs turn by the patch's row, half by its column. Its scope's `dim` is half of the head dim."""

    def forward(self, places_N2: Tensor) -> RopeTables:
        """cos and sin, [1, N, d]: the rows', then the columns'."""
        cos_N2d, sin_N2d = super().forward(places_N2)
        return cos_N2d.flatten(1)[None], sin_N2d.flatten(1)[None]


class SegmentAttention(nn.Module):
    """softmax(q k^T / sqrt(d)) v within each frame, in both directions."""

    def __init__(self, config: VisionConfig, scope: Scope) -> None:
        super().__init__()
        self.head_dim = config.dim // config.heads
        self.wq = Linear(config.dim, config.dim, scope.std, bias=True)
        self.wk = Linear(config.dim, config.dim, scope.std, bias=True)
        self.wv = Linear(config.dim, config.dim, scope.std, bias=True)
        self.wo = Linear(config.dim, config.dim, scope.output_std, bias=True)

    def forward(self, x_ND: Tensor, rope: RopeTables, lengths: Sequence[int]) -> Tensor:
        """Same shape and dtype. `lengths` are the patches of each frame."""
        q_NHd, k_NHd, v_NHd = (project(x_ND).unflatten(-1, (-1, self.head_dim)) for project in (self.wq, self.wk, self.wv))
        q_NHd, k_NHd = ops.rope(q_NHd[None], *rope)[0], ops.rope(k_NHd[None], *rope)[0]
        y_NHd = SEGMENT_ATTENTION(q_NHd, k_NHd, v_NHd, lengths, scale=self.head_dim**-0.5)
        return self.wo(y_NHd.flatten(1))


class VisionFeedForward(nn.Module):
    """y = W2 gelu(W1 x), gelu by its tanh form."""

    def __init__(self, config: VisionConfig, scope: Scope) -> None:
        super().__init__()
        self.w1 = Linear(config.dim, config.hidden, scope.std, bias=True)
        self.w2 = Linear(config.hidden, config.dim, scope.output_std, bias=True)

    def forward(self, x_ND: Tensor) -> Tensor:
        """Same shape and dtype."""
        return self.w2(F.gelu(self.w1(x_ND), approximate="tanh"))


class VisionBlock(nn.Module):
    """a = x + Attention(LayerNorm(x));  y = a + FeedForward(LayerNorm(a))."""

    def __init__(self, config: VisionConfig, scope: Scope) -> None:
        super().__init__()
        norm = LayerNormConfig(eps=config.eps)
        self._patches_of_token = config.share * config.merge**2
        # Read by engines that recompute regions.
        self.recompute = config.recompute
        self.norm1 = LayerNorm(norm, scope)
        self.attention = SegmentAttention(config, scope)
        self.norm2 = LayerNorm(norm, scope)
        self.feed_forward = VisionFeedForward(config, scope)

    def forward(self, x_ND: Tensor, rope: RopeTables, lengths: Sequence[int]) -> Tensor:
        """Same shape and dtype."""
        a_ND = x_ND + self.attention(self.norm1(x_ND), rope, lengths)
        return a_ND + self.feed_forward(self.norm2(a_ND))

    def forward_flops_per_token(self, sequence_tokens: int) -> float:
        """For one token of a row of which `VisionConfig.share` is visual; scores are left out, since they depend on the images."""
        return self._patches_of_token * linear_flops(self)


class Merger(nn.Module):
    """m patches become one feature: [N, D] to [N / m, outputs]. The norm is over each patch, or over the m patches that were put together (`norm_merged`)."""

    def __init__(self, config: VisionConfig, scope: Scope, norm_merged: bool) -> None:
        super().__init__()
        self.patches = config.merge**2
        self.norm_merged = norm_merged
        self._features_of_token = config.share
        merged = self.patches * config.dim
        norm = LayerNormConfig(eps=config.eps)
        self.norm = LayerNorm(norm, scope.inside("norm", merged if norm_merged else config.dim))
        self.w1 = Linear(merged, merged, scope.std, bias=True)
        self.w2 = Linear(merged, config.out_dim, scope.std, bias=True)

    def forward(self, x_ND: Tensor) -> Tensor:
        """Features [M, outputs]; the patches of a feature follow each other."""
        x_ND = x_ND if self.norm_merged else self.norm(x_ND)
        x_MD = x_ND.reshape(x_ND.shape[0] // self.patches, self.patches * x_ND.shape[1])
        x_MD = self.norm(x_MD) if self.norm_merged else x_MD
        return self.w2(F.gelu(self.w1(x_MD)))

    def forward_flops_per_token(self, sequence_tokens: int) -> float:
        """For one token of a row of which `VisionConfig.share` is visual."""
        return self._features_of_token * linear_flops(self)


class PatchEmbedding(Linear):
    """Patches' values to the tower's width: what a convolution over frames and pixels computes whose stride is its size."""

    patches_of_token: float = 0.0

    def forward_flops_per_token(self, sequence_tokens: int) -> float:
        """For one token of a row of which `VisionConfig.share` is visual."""
        return self.patches_of_token * 2.0 * self.in_features * self.out_features


class VisionTower(nn.Module):
    """Features of images and video, in the language model's width."""

    def __init__(self, config: VisionConfig, scope: Scope) -> None:
        super().__init__()
        self.config = config
        scope = Scope(
            name=scope.name,
            dim=config.dim,
            layer=-1,
            layers=config.depth,
            rope_interleaved=False,
            std=scope.std,
            output_std=scope.std / math.sqrt(2 * config.depth),
        )
        self.patch_embedding = PatchEmbedding(config.values, config.dim, scope.std, bias=True)
        self.patch_embedding.patches_of_token = config.share * config.merge**2
        self.positions = PositionTable(config.table, config.dim, scope.std if config.position_std is None else config.position_std)
        self.rope = AxialRope(RopeConfig(theta=THETA), scope.inside("rope", config.dim // config.heads // 2))
        self.blocks = nn.ModuleList([VisionBlock(config, scope.inside(f"blocks.{j}")) for j in range(config.depth)])
        self.merger = Merger(config, scope.inside("merger"), norm_merged=False)
        self.deepstack = nn.ModuleList([Merger(config, scope.inside(f"deepstack.{k}"), True) for k in range(len(config.deepstack))])

    # What it computes depends on the sizes of every batch's images: compiled, it would be so for each of them anew.
    @torch.compiler.disable
    def forward(self, patches_NC: Tensor, grids: Sequence[Sequence[int]]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Features [M, D] of all images in order, and those of each DeepStack block, in the tower's dtype.

        `grids` are (frames, rows, columns) of each image or video, whose patches follow each other in merge-block order (`intarsia_models_common.vision.grids`). UsageError where sizes do
        not fit each other or the model.
        """
        config = self.config
        checked = sizes.checked(grids, config.merge)
        check_patches(patches_NC, checked, config)
        layout = sizes.layout(checked, config.table, config.merge)
        entries_4N, weights_4N, places_N2 = (
            torch.from_numpy(each).to(patches_NC.device) for each in (layout.entries_4N, layout.weights_4N, layout.places_N2)
        )
        x_ND = self.patch_embedding(patches_NC.to(self.patch_embedding.weight.dtype))
        x_ND = x_ND + self.positions(entries_4N, weights_4N).to(x_ND.dtype)
        rope = self.rope(places_N2)
        deepstack: list[Tensor] = []
        for j, block in enumerate(self.blocks):
            x_ND = block(x_ND, rope, layout.lengths)
            if j in config.deepstack:
                deepstack.append(self.deepstack[config.deepstack.index(j)](x_ND))
        return self.merger(x_ND), tuple(deepstack)

    def frame_flops(self, rows: int, columns: int) -> float:
        """FLOPs of the forward pass over one frame of so many patches."""
        return frame_flops(self.config, rows, columns)


def check_patches(patches_NC: Tensor, grids: Sequence[sizes.Grid], config: VisionConfig) -> None:
    """UsageError unless these are the patches of these grids, and of the tower's size."""
    count = sizes.patches_of(grids)
    if patches_NC.ndim != 2 or patches_NC.shape[1] != config.values:
        raise UsageError(
            f"The batch's patches have shape {list(patches_NC.shape)}, and the model takes patches of {config.values} values (channels {config.channels} x frames "
            f"{config.temporal_patch} x {config.patch} x {config.patch}). Give the data's processor the model's patch and temporal_patch."
        )
    if patches_NC.shape[0] != count:
        raise UsageError(f"The batch has {patches_NC.shape[0]} patches, and its grids {tuple(grids)} speak of {count}.")


def linear_flops(module: nn.Module) -> float:
    """FLOPs of the forward pass of each projection within, over one row."""
    return sum(2.0 * each.in_features * each.out_features for each in module.modules() if isinstance(each, nn.Linear))


def passes(tower: VisionTower) -> tuple[float, float]:
    """What forward and backward of a tower cost, in its forward passes: before the mergers, and in them. A part that is frozen has no backward pass, or half of one where something before it trains; one of which a
    piece trains counts whole."""
    merging = (tower.merger, tower.deepstack)
    trunk, mergers = (any(_trains(part) for part in tower.children() if (part in merging) is is_merging) for is_merging in (False, True))
    return (3.0 if trunk else 1.0), 3.0 if mergers else 2.0 if trunk else 1.0


def _trains(part: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in part.parameters())
