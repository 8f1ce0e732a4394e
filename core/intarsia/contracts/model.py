"""What the run loop needs to know of a model. Torch-free at import."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor

    from intarsia.contracts.sequence import SequenceContext


@dataclasses.dataclass(frozen=True, slots=True)
class Init:
    """How a parameter starts: `kind` normal (mean 0, `std`, cut at `cut` standard deviations), zeros, ones or constant `value`. Stability: stable."""

    kind: Literal["normal", "zeros", "ones", "constant"]
    std: float = 0.0
    cut: float = 3.0
    value: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Regions:
    """Module names (dotted) by the purpose that a run may use them for. Stability: provisional.

    `blocks`: the repeated units in execution order (buckets, pipeline cuts, activation checkpoints); `compile`: modules that
    `local_compile` compiles; `ties`: groups of parameter names that are one tensor, canonical name first; `stages`: the blocks before which a
    pipeline may be cut (empty: before every block).
    """

    blocks: tuple[str, ...]
    compile: tuple[str, ...] = ()
    ties: tuple[tuple[str, ...], ...] = ()
    stages: tuple[str, ...] = ()


@runtime_checkable
class Model(Protocol):
    """A language model as `nn.Module`: built with shapes only (meta device allowed), filled by the ParameterTable. Stability: provisional.

    Parameters have canonical, unfused names, which are the names of `named_parameters()`. Logits are
    `project(hidden)`; the loss never needs them whole and calls `ops.cross_entropy(hidden, head_weight_VD, ...)`, or in its place the model's own
    `cross_entropy` of the same arguments, where it has one (a head that is cut over ranks). Losses of tokens' log-probabilities likewise call the operator
    `token_log_probs`, or the model's own one, whose results are those of all tokens on every rank.

    A model that sees images or videos finds them in `context.extra` and has a method `media_flops(extra: Mapping[str, Any]) -> float`: forward plus backward FLOPs for what a loader added to one
    micro-batch, from the host's numbers in it alone (`grids`). `flops_per_token` is then the text's; the run's utilisation counts both.

    A model that predicts further ahead than the next token has an attribute `predicts_ahead`, the number K of further depths. It is then given the
    following tokens by its context (`following_BSK`) and returns K + 1 hidden states, the next token's first.
    A model that sums over other ranks' rows (`logical.sum` along `batch`) has a true attribute `sums_over_batch`.
    """

    def __call__(self, tokens_BS: Tensor, context: SequenceContext) -> Tensor | tuple[Tensor, ...]:
        """Hidden states after the last norm, [B, S, D], in the compute dtype; a tuple of them from a model that predicts further ahead."""

    def project(self, hidden_BSD: Tensor) -> Tensor:
        """Logits [B, S, V]."""

    @property
    def head_weight_VD(self) -> Tensor:
        """The output projection's weight (the embedding's where tied)."""

    def regions(self) -> Regions:
        """Declared regions and ties."""

    def inits(self) -> Mapping[str, Init]:
        """For every parameter and every persistent buffer that is drawn, by canonical name, how it starts."""

    def fill_buffers(self) -> None:
        """Recompute non-persistent buffers (rope tables) after the module was moved off the meta device."""

    def flops_per_token(self, sequence_tokens: int) -> float:
        """Forward plus backward FLOPs for one trained token of a causal sequence of this length, without recomputation."""


@dataclasses.dataclass(frozen=True, slots=True)
class HFRule:
    """One row of a Hugging Face table. Stability: provisional.

    `theirs` and `ours` are names with at most one `{i}` for the layer; in `theirs` `{i+FIELD}` counts from what the config's FIELD says (layers behind the last). A rule
    whose `ours` the model does not have makes no row, so that one table serves layers that differ. `op` is what happens to the tensor on import (export does the
    inverse), or several of these joined by `|`, in the order of an import:

    `same`; `transpose` of the last two dims; `flatten:SIZES` of all dims but the first, which are SIZES, joined by commas: numbers, the config's fields, or `*` for what is left;
    `rope_half_to_pairs` with `heads` (a config field's name) to permute rows; `split:K` when `ours` is a tuple of K names that theirs concatenates along dim 0, `split:K@1` along dim 1;
    `split_heads:K` with `heads` where each head has rows of all K in turn; `stack` when `theirs` has an `{e}` that ours stacks along a new dim 0 (`HFTable.extra["experts_field"]`
    names the config field that counts them, or several joined by `|`, of which one is there); `copy`, alone, for a further copy of what another rule carries: written on export, compared on import where it is there;
    `heads` then names the config field that says for how many `{i}`.

    Fields of a config within the config have dotted names (`vision_config.patch_size`). Rules for the same name of ours are alternatives: on import the first whose names are there is
    taken, on export the first. Of rules for the same names on both sides the shapes decide, for all of them together.
    """

    theirs: str
    ours: str | tuple[str, ...]
    op: str = "same"
    heads: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class HFTable:
    """A family's Hugging Face interchange, both ways, as data. Stability: provisional.

    `config_to_ours(config_json) -> model config` and `config_to_theirs(model config) -> dict` are "module:function" strings.
    `ignored` are names in their files that carry nothing (`*.rotary_emb.inv_freq`), as globs. A checkpoint is read strictly: every name of theirs is
    used or ignored, every name of ours is filled, persistent buffers included. `extra["hints"]` maps a glob on our names to a sentence for the message where
    such a name's tensors are missing; `extra["where"]` maps a glob on rules' `theirs` to a name of ours, with `{i}`, that a layer must have for these rules to be its
    (`!name`: that the model must not have): where layers of two kinds have parameters of one name, or models of two kinds are stored under other names; `extra["keeps_dtype"]` are globs on our names that an export leaves in their dtype, whichever it writes the others in; `extra["processor_to_ours"]` and
    `extra["processor_to_theirs"]` read and write the files of processors of images (`intarsia_huggingface.processors`).
    """

    rules: tuple[HFRule, ...]
    config_to_ours: str
    config_to_theirs: str
    ignored: tuple[str, ...] = ()
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)
