"""Language models that see. B rows, S tokens, D model width, N patches, C values of a patch, M features.

features_MD, deepstack = tower(patches)
x = Embedding[tokens], but feature m in the place of the token whose `visual_BS` is m
for each layer k:  x = Block(x);  behind block k < K:  x = x + deepstack_k in the same places
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from intarsia import logical, ops
from intarsia.contracts import Regions, SequenceContext
from intarsia.errors import PluginError, UsageError
from torch import Tensor, nn

from intarsia_models_common.base import LanguageModel
from intarsia_models_common.build import build
from intarsia_models_common.vision.config import VisionLanguageModelConfig
from intarsia_models_common.vision.flops import tower_flops
from intarsia_models_common.vision.tower import linear_flops, passes

Seen = tuple[Tensor, tuple[Tensor, ...]]
"""Features [M, D] and those that are added behind the first blocks."""
Carry = Tensor | tuple[Tensor, Tensor, tuple[Tensor, ...]]
"""The residual stream [B, S, D]; while there are DeepStack features to come: with each token's feature [B, S], and these features [M, D]."""


class TokenFeatures(nn.Module):
    """Which feature stands in the place of each token of the residual stream, -1 none. Here as it is given; where a mesh cuts the stream, its role cuts this likewise."""

    def forward(self, visual_BS: Tensor) -> Tensor:
        """Same shape."""
        return visual_BS


class VisionLanguageModel(LanguageModel):
    """A decoder with a vision tower (an `intarsia.contracts.Model`). Stability: provisional.

    Where a context's `extra` has `patches_NC`, the tower runs on them, be they none, and its features take the places that `visual_BS` says; else the model is one of text. So whether it
    runs depends on the loader alone, and ranks with images and ranks without make the same calls. `features` in `extra` are what `see` gave before: generation, which reads a prompt in
    pieces, looks at its images once.
    """

    def __init__(self, config: VisionLanguageModelConfig) -> None:
        super().__init__(config)
        self.config: VisionLanguageModelConfig = config
        self.visual = None if config.vision is None else build(config.vision, self.scope_of(None).inside("visual", config.vision.dim))
        self.visual_rows = None if config.vision is None else TokenFeatures()

    def see(self, patches_NC: Tensor, grids: Sequence[Sequence[int]]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Features [M, D] of images and video in order, and those that are added behind the first blocks. UsageError where the model has no vision tower."""
        if self.visual is None:
            raise UsageError(
                f"The batch has images, and this {type(self).__name__} has no vision tower: model.vision is none. Choose a loader of text, or a size of the family with a tower."
            )
        features_MD, deepstack = self.visual(patches_NC, grids)
        return features_MD, deepstack

    def enter(self, tokens_BS: Tensor, context: SequenceContext) -> Carry:
        """The residual stream, with features in their tokens' places. UsageError or PluginError where features and places do not fit."""
        return self.placed(tokens_BS, self.seen(context), context)

    def seen(self, context: SequenceContext) -> Seen | None:
        """What `see` gives of what the context shows, now or before; None where it shows nothing, of which even no images are something."""
        extra: Mapping[str, Any] = getattr(context, "extra", None) or {}
        if "features" in extra:
            given: Seen = extra["features"]
            return given
        if "patches_NC" not in extra:
            return None
        patches = extra["patches_NC"]
        return self.see(patches() if callable(patches) else patches, extra["grids"])

    def placed(self, tokens_BS: Tensor, seen: Seen | None, context: SequenceContext) -> Carry:
        """The residual stream, with what was seen in its tokens' places."""
        x_BSD = self.tok_embeddings(tokens_BS)
        if seen is None:
            return x_BSD
        features_MD, deepstack = seen
        visual_BS = context.extra["visual_BS"]  # type: ignore[attr-defined]
        check_places(visual_BS, tokens_BS, features_MD.shape[0])
        rows_BS = self.rows_of(visual_BS)
        picked_BSD = pick(features_MD, rows_BS, x_BSD.dtype)
        x_BSD = torch.where((rows_BS >= 0)[..., None], picked_BSD, x_BSD)
        return (x_BSD, rows_BS, deepstack) if deepstack else x_BSD

    def rows_of(self, visual_BS: Tensor) -> Tensor:
        """Which feature stands in the place of each token of the residual stream, where a mesh may cut that further than the row."""
        # A size without a tower has no module that a mesh could have replaced.
        rows_BS: Tensor = visual_BS if self.visual_rows is None else self.visual_rows(visual_BS)
        return rows_BS

    def run_block(self, name: str, carry: Any, shared: Any, context: SequenceContext) -> Any:
        """The tower's blocks are regions like those of the trunk, but `enter` runs them. Behind each of the first blocks of the trunk one DeepStack feature is added."""
        if name.startswith("visual."):
            return carry
        if not isinstance(carry, tuple):
            return super().run_block(name, carry, shared, context)
        x_BSD, rows_BS, (features_MD, *later) = carry
        x_BSD = super().run_block(name, x_BSD, shared, context)
        x_BSD = x_BSD + pick(features_MD, rows_BS, x_BSD.dtype)
        return (x_BSD, rows_BS, tuple(later)) if later else x_BSD

    def regions(self) -> Regions:
        """The tower's blocks, too, are units of sharding and recomputation, not of compilation; a pipeline is cut behind the last layer that a DeepStack feature is added to."""
        plain = super().regions()
        if self.config.vision is None:
            return plain
        tower = () if self.visual is None else tuple(f"visual.blocks.{j}" for j in range(self.config.vision.depth))
        together = {f"layers.{i}" for i in range(len(self.config.vision.deepstack))}
        cuts = tuple(name for name in plain.stages or plain.blocks if name not in together)
        return dataclasses.replace(plain, blocks=tower + plain.blocks, stages=cuts)

    def stage_modules(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Outside of the blocks: what a pipeline's first stage needs, and what its last."""
        return ("tok_embeddings", *(() if self.config.vision is None else ("visual",))), ("norm", "head")

    def flops_per_token(self, sequence_tokens: int) -> float:
        """The text's: what the tower costs depends on the images (`media_flops`)."""
        inside = 0.0 if self.visual is None else linear_flops(self.visual)
        return super().flops_per_token(sequence_tokens) - 3.0 * inside

    def media_flops(self, extra: Mapping[str, Any]) -> float:
        """Forward plus backward FLOPs of the tower for what a loader added to one batch, from `grids` alone; 0 where there is nothing to see. What is frozen has a backward pass only where something before it
        trains, and then half of one."""
        if self.config.vision is None:
            return 0.0
        # A later stage of a pipeline has no tower; what it says is not told.
        return tower_flops(self.config.vision, extra.get("grids", ()), *((3.0, 3.0) if self.visual is None else passes(self.visual)))


def pick(features_MD: Tensor, rows_BS: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, S, D]: feature `rows_BS` of each token, zeros where it is -1. Also of no features, whose (empty) gradient then leads on to the tower."""
    padded_MD = torch.cat((features_MD, features_MD.new_zeros(1, features_MD.shape[1]))).to(dtype)
    return ops.embedding(torch.where(rows_BS < 0, features_MD.shape[0], rows_BS), padded_MD)


@torch.compiler.disable
def check_places(visual_BS: Tensor, tokens_BS: Tensor, features: int) -> None:
    """Raise PluginError unless `visual_BS` counts the features in order, each once. Where the row is cut over ranks each sees a part, which is held against order and range only; the
    contents are looked at where that costs no wait for a device (loaders look at all of them on the host)."""
    if visual_BS.shape != tokens_BS.shape or visual_BS.dtype != torch.int64:
        raise PluginError(
            f"The batch's visual_BS has shape {list(visual_BS.shape)} and dtype {visual_BS.dtype}; it must be int64 and of the tokens' shape {list(tokens_BS.shape)}."
        )
    if visual_BS.device.type == "cpu":
        check_order(visual_BS[visual_BS >= 0], features, logical.ranks(["sequence"]) == 1)


def check_order(seen_N: Tensor, features: int, is_whole: bool = True) -> None:
    """Raise PluginError unless the numbers of features in tokens' places, in the order of tokens (row after row), rise strictly below `features`; with `is_whole`: are all of them."""
    count = seen_N.numel()
    if is_whole and count != features:
        raise PluginError(
            f"The batch has {count} tokens in whose places visual features stand, and {features} features. Its loader must leave an image out with all of its tokens, or not at all."
        )
    if count and (int(seen_N[-1]) >= features or not bool((seen_N[1:] > seen_N[:-1]).all())):
        raise PluginError(
            f"The batch's visual_BS must count the {features} features in the order of tokens; it begins {seen_N[:8].tolist()} and ends {seen_N[-4:].tolist()}."
        )
