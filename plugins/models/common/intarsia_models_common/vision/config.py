"""Settings of vision towers and of language models that see. Torch-free."""

from __future__ import annotations

import chz
from intarsia.config import ComponentConfig
from intarsia.errors import UsageError, did_you_mean

from intarsia_models_common.config import LanguageModelConfig, NormConfig, check_between

RECOMPUTE = ("recipe", "always", "never")


@chz.chz(typecheck=True)
class LayerNormConfig(NormConfig):
    """Layer norm with a weight and a bias."""

    eps: float = chz.field(default=1e-6, doc="Added to the variance.")

    @chz.validate
    def _eps_is_small(self) -> None:
        check_between("layer_norm.eps", self.eps, 0, 1)


@chz.chz(typecheck=True)
class VisionConfig(ComponentConfig):
    """A vision transformer over patches of images and of video frames, whose merged outputs are features in the language model's width."""

    depth: int = chz.field(doc="Blocks.")
    dim: int = chz.field(doc="Width of a patch's stream.")
    hidden: int = chz.field(doc="Width between the two projections of a block's feed-forward layer.")
    heads: int = chz.field(doc="Attention heads.")
    out_dim: int = chz.field(doc="Width of a feature: the language model's.")
    channels: int = chz.field(default=3, doc="Colour channels.")
    patch: int = chz.field(default=16, doc="Side of a patch in pixels.")
    temporal_patch: int = chz.field(default=2, doc="Video frames that one patch spans; a still image is repeated as often.")
    merge: int = chz.field(default=2, doc="Side of the square of patches that become one feature.")
    table: int = chz.field(
        default=48, doc="Side of the square table of learned positions, which is resampled to each image's rows and columns."
    )
    eps: float = chz.field(default=1e-6, doc="The layer norms' epsilon.")
    deepstack: tuple[int, ...] = chz.field(
        default=(), doc="Blocks whose outputs, too, become features: the k-th is added behind the language model's block k (DeepStack)."
    )
    share: float = chz.field(
        default=0.5,
        doc="Part of a row's tokens that is taken to be visual where pipeline stages are balanced.",
        metadata={"computes": False},
    )
    position_std: float | None = chz.field(
        default=None,
        doc="Standard deviation of the table of positions at the start; none: that of projections. Small towers learn where things are sooner from a larger one.",
        metadata={"computes": False},
    )
    recompute: str = chz.field(
        default="recipe",
        doc="Whether the tower's blocks are recomputed in backward: always, never, or as the recipe says of all blocks (recipe).",
        metadata={"computes": False},
    )

    @chz.validate
    def _recompute_is_known(self) -> None:
        if self.recompute not in RECOMPUTE:
            raise UsageError(f"vision.recompute is {self.recompute!r}. {did_you_mean(self.recompute, RECOMPUTE)}")

    @chz.validate
    def _sizes_are_positive(self) -> None:
        for field in ("depth", "dim", "hidden", "heads", "out_dim", "channels", "patch", "temporal_patch", "merge", "table"):
            check_between(f"vision.{field}", getattr(self, field), 1)
        check_between("vision.eps", self.eps, 0, 1)
        if self.position_std is not None:
            check_between("vision.position_std", self.position_std, 0)
        if not 0 <= self.share <= 1:
            raise UsageError(f"vision.share = {self.share}: it is a part of all tokens, so it must be between 0 and 1.")

    @chz.validate
    def _heads_divide(self) -> None:
        if self.dim % self.heads or self.dim // self.heads % 4:
            raise UsageError(
                f"vision.dim = {self.dim} over vision.heads = {self.heads}: a head's width must be whole and a multiple of 4, since half of it is turned by "
                "a patch's row and half by its column, in pairs."
            )

    @chz.validate
    def _deepstack_is_in_order(self) -> None:
        if any(not 0 <= block < self.depth for block in self.deepstack) or list(self.deepstack) != sorted(set(self.deepstack)):
            raise UsageError(
                f"vision.deepstack = {self.deepstack}: it names blocks of the tower (0 to {self.depth - 1}), each once, in rising order."
            )

    @property
    def values(self) -> int:
        """Values of one patch: the C of `patches_NC`."""
        return self.channels * self.temporal_patch * self.patch**2


@chz.chz(typecheck=True)
class VisionLanguageModelConfig(LanguageModelConfig):
    """A decoder-only language model that reads features of images and video in tokens' places. Families derive from it."""

    vision: VisionConfig | None = chz.field(default=None, doc="The vision tower; none: text only.")
    image_id: int = chz.field(doc="Token that stands in the place of an image's features.", metadata={"computes": False})
    video_id: int = chz.field(doc="Token that stands in the place of a video's features.", metadata={"computes": False})
    vision_start_id: int = chz.field(doc="Token before an image, and before each frame of a video.", metadata={"computes": False})
    vision_end_id: int = chz.field(doc="Token behind an image, and behind each frame of a video.", metadata={"computes": False})

    @chz.validate
    def _vision_fits(self) -> None:
        if self.vision is None:  # the ids mean nothing then, and folders of text models name none
            return
        ids = {name: getattr(self, name) for name in ("image_id", "video_id", "vision_start_id", "vision_end_id")}
        for name, value in ids.items():
            if not 0 <= value < self.vocab_size:
                raise UsageError(f"model.{name} = {value}: the model knows the ids 0 to {self.vocab_size - 1}.")
        if len(set(ids.values())) < len(ids):
            raise UsageError(f"model: {', '.join(f'{name} = {value}' for name, value in ids.items())}: each must be a token of its own.")
        if self.vision.out_dim != self.dim:
            raise UsageError(
                f"model.vision.out_dim = {self.vision.out_dim}, and model.dim = {self.dim}: features stand in tokens' places, so they must be equal."
            )
        if len(self.vision.deepstack) > len(self.layers):
            raise UsageError(
                f"model.vision.deepstack has {len(self.vision.deepstack)} entries, and the model {len(self.layers)} layers behind which they could be added."
            )
