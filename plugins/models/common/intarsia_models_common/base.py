"""The base class of language model families. B rows, S tokens, D model width, V vocabulary."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from intarsia import ops
from intarsia.contracts import Init, Regions, SequenceContext, StagePart
from intarsia.errors import PluginError, UsageError
from torch import Tensor, nn

from intarsia_models_common.build import Linear, Scope, build, parameter
from intarsia_models_common.config import LanguageModelConfig
from intarsia_models_common.moe.config import routers_of
from intarsia_models_common.moe.joint import JointLoss
from intarsia_models_common.moe.replay import number_layers
from intarsia_models_common.rope import score_factor


class Embedding(nn.Module):
    """Row `id` of the weight [V, D]."""

    # Its gradient follows from the ids alone: a sharder need not bring the weight back for it.
    backward_reads_weights = False

    def __init__(self, vocab_size: int, dim: int, std: float) -> None:
        super().__init__()
        self.std = std
        self.weight = parameter(vocab_size, dim)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """[B, S, D]."""
        return ops.embedding(tokens_BS, self.weight)

    def inits(self) -> dict[str, Init]:
        """Normal."""
        return {"weight": Init("normal", std=self.std)}


class LanguageModel(nn.Module):
    """A decoder: embedding, blocks, norm, output projection (an `intarsia.contracts.Model`). Stability: provisional.

    A family derives from it and overrides what differs: the four steps of which `forward` is made, or what they call. Components come from config nodes through the registry. Nothing here or in the components
    knows of parallelism.
    """

    def __init__(self, config: LanguageModelConfig) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = Embedding(config.vocab_size, config.dim, config.embedding_std)
        self.rope = self.build_rope()
        self.layers = nn.ModuleList([build(block, self.scope_of(i)) for i, block in enumerate(config.layers)])
        number_layers(self.layers)
        self.joint_loss = JointLoss.of(config)
        self.sums_over_batch = any(router.sums_over_batch for router in routers_of(config))
        self.norm = build(config.norm, self.scope_of(None).inside("norm"))
        self.head = Linear(config.dim, config.vocab_size, config.initial_std)
        if config.tied:
            self.head.weight = self.tok_embeddings.weight

    def build_rope(self) -> nn.Module:
        """The tables' maker. Its head dim is the attention layers' (of MLA the rotated part's); a family whose layers differ overrides this."""
        mixers, said = [block.attention for block in self.config.layers], self.config.rope.dim
        found = [getattr(mixer, "rope_dim", getattr(mixer, "head_dim", None)) for mixer in mixers]
        dims: set[int] = {dim for dim in found if dim is not None}
        if said is None and len(dims) != 1:
            raise PluginError(
                f"{type(self).__name__} cannot tell its rotary dimension: attention.head_dim is {sorted(map(str, dims))}. Set rope.dim."
            )
        if said is not None and said > min(dims, default=said):
            raise UsageError(f"model.rope.dim = {said}: heads of {min(dims)} dimensions cannot have so many that are rotated.")
        return build(self.config.rope, self.scope_of(None).inside("rope", said or dims.pop()))

    def scope_of(self, layer: int | None) -> Scope:
        """The scope of block `layer`, or of what stands outside the blocks."""
        count = len(self.config.layers)
        std = self.config.initial_std
        return Scope(
            name="" if layer is None else f"layers.{layer}",
            dim=self.config.dim,
            layer=-1 if layer is None else layer,
            layers=count,
            rope_interleaved=self.config.rope.interleaved,
            std=std,
            output_std=std / math.sqrt(2 * max(count, 1)),
            score_factor=score_factor(self.config.rope),
        )

    def forward(self, inputs: Any, context: SequenceContext, stage: StagePart | None = None) -> Any:
        """Hidden states after the last norm, [B, S, D], of tokens [B, S]: what `leave` returns.

        With a `stage`, that part of it: from the tokens or what the stage before returned, to the hidden states or what the next stage takes.
        """
        if self.joint_loss is None or (stage is None and not self.training):
            return self._run(inputs, context, stage)
        return self.joint_loss.around(self._run, inputs, context, stage, self.training)

    def _run(self, inputs: Any, context: SequenceContext, stage: StagePart | None) -> Any:
        carry = self.enter(inputs, context) if stage is None or stage.first else inputs
        shared = self.shared(context)
        for name in [f"layers.{i}" for i in range(len(self.layers))] if stage is None else stage.blocks:
            carry = self.run_block(name, carry, shared, context)
        return self.leave(carry, shared, context) if stage is None or stage.last else carry

    def enter(self, tokens_BS: Tensor, context: SequenceContext) -> Any:
        """What the first block is given, a tensor or a tree of tuples and dicts of tensors: the residual stream [B, S, D]."""
        return self.tok_embeddings(tokens_BS)

    def shared(self, context: SequenceContext) -> Any:
        """What all blocks are given beside it, computed on every pipeline stage: the rotary tables."""
        positions = context.positions_BS
        if self.config.rope.sections is not None:
            positions = (getattr(context, "extra", None) or {}).get("positions_3BS", positions)
        return self.rope(positions)

    def run_block(self, name: str, carry: Any, shared: Any, context: SequenceContext) -> Any:
        """What block `name` makes of what the one before it made."""
        return self.get_submodule(name)(carry, shared, context)

    def leave(self, carry: Any, shared: Any, context: SequenceContext) -> Any:
        """Hidden states after the last norm, [B, S, D]; a tuple from a model that predicts further ahead, where the context has following tokens."""
        return self.norm(carry)

    def project(self, hidden_BSD: Tensor) -> Tensor:
        """Logits [B, S, V]."""
        return self.head(hidden_BSD)

    @property
    def head_weight_VD(self) -> Tensor:
        """The output projection's weight."""
        return self.head.weight

    def regions(self) -> Regions:
        """Each block is a unit of sharding, recomputation and compilation."""
        # On a pipeline stage what belongs to others is None.
        blocks = tuple(f"layers.{i}" for i, layer in enumerate(self.layers or ()) if layer is not None)
        tied = self.config.tied and self.tok_embeddings is not None and self.head is not None
        ties = (("tok_embeddings.weight", "head.weight"),) if tied else ()
        return Regions(blocks=blocks, compile=blocks, ties=ties)

    def inits(self) -> Mapping[str, Init]:
        """The start of every parameter, and of the buffers that are drawn, as the component that owns it says."""
        found: dict[str, Init] = {}
        for prefix, module in self.named_modules():
            say = getattr(module, "inits", None)
            if module is not self and say is not None:
                found.update({f"{prefix}.{name}": init for name, init in say().items()})
        names = [name for name, _ in self.named_parameters()]
        missing = [name for name in names if name not in found]
        if missing:
            owner = type(self.get_submodule(missing[0].rpartition(".")[0])).__name__
            raise PluginError(f"Parameter {missing[0]} has no initial value: its module {owner} needs a method `inits()` that names it.")
        names += [name for name, _ in self.named_buffers() if name in found]
        return {name: found[name] for name in names}

    def fill_buffers(self) -> None:
        """Recompute what modules derive from their configs (rope frequencies)."""
        for module in self.modules():
            fill = getattr(module, "fill_buffers", None)
            if module is not self and fill is not None:
                fill()

    def flops_per_token(self, sequence_tokens: int) -> float:
        """Three times the forward pass: 2 for each weight of each projection, and the mixers' own."""
        forward = 0.0
        for module in self.modules():
            if isinstance(module, nn.Linear):
                forward += 2.0 * module.in_features * module.out_features
                continue
            mixing = getattr(module, "mixing_flops_per_token", None)
            if mixing is not None:
                forward += mixing(sequence_tokens)
        return 3.0 * forward
