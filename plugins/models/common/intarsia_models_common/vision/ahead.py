"""Multi-token prediction of models that see. B rows, S tokens, D model width, K depths, M features.

A depth is given the token k places further on as the trunk is given it: a feature where one stands in its place, else its embedding. Features are there where a pipeline begins, and depths where it ends,
so what stands in the places of following tokens goes along with the residual stream.
"""

from __future__ import annotations

from typing import Any

import torch
from intarsia.contracts import SequenceContext
from torch import Tensor

from intarsia_models_common.ahead import AheadModel
from intarsia_models_common.vision.base import VisionLanguageModel, pick

STREAM, AHEAD = "stream", "ahead_BSKD"


class AheadVisionModel(AheadModel, VisionLanguageModel):
    """A decoder that sees and predicts further tokens. Stability: provisional.

    Where the context's `extra` has `following_visual_BSK` (which feature stands in the place of the token k places further on, -1 none), what blocks are given and give is a dict: the residual stream, and the
    features [B, S, K, D] in the places of following tokens, zeros where none stands.
    """

    def enter(self, tokens_BS: Tensor, context: SequenceContext) -> Any:
        """See VisionLanguageModel; with features in the places of following tokens beside it."""
        seen = self.seen(context)
        carry = self.placed(tokens_BS, seen, context)
        following_BSK = _following(context)
        if seen is None or following_BSK is None or not self.predicts_ahead:
            return carry
        stream_BSD = carry[0] if isinstance(carry, tuple) else carry
        picked = [pick(seen[0], self.rows_of(each_BS), stream_BSD.dtype) for each_BS in following_BSK.unbind(-1)]
        return {STREAM: carry, AHEAD: torch.stack(picked, 2)}

    def run_block(self, name: str, carry: Any, shared: Any, context: SequenceContext) -> Any:
        """A block sees the residual stream alone."""
        if not isinstance(carry, dict):
            return super().run_block(name, carry, shared, context)
        return {**carry, STREAM: super().run_block(name, carry[STREAM], shared, context)}

    def parted(self, carry: Any) -> tuple[Any, Tensor | None]:
        """See AheadModel."""
        return (carry[STREAM], carry[AHEAD]) if isinstance(carry, dict) else (carry, None)

    def token_ahead(self, k: int, following_BSK: Tensor, features_BSKD: Tensor | None, context: SequenceContext) -> Tensor:
        """Its embedding, or the feature that stands in its place."""
        embedded_BSD = super().token_ahead(k, following_BSK, features_BSKD, context)
        visual_BSK = _following(context)
        if features_BSKD is None or visual_BSK is None:
            return embedded_BSD
        rows_BS = self.rows_of(visual_BSK[..., k])
        return torch.where((rows_BS >= 0)[..., None], features_BSKD[:, :, k], embedded_BSD)


def _following(context: SequenceContext) -> Tensor | None:
    following_BSK: Tensor | None = (getattr(context, "extra", None) or {}).get("following_visual_BSK")
    return following_BSK
