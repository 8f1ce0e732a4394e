"""Training with float8 on the wire: bit for bit what "gather bfloat16, then quantise" trains, fewer bytes, and masters that stay as they are."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from _sharded import placements, whole_tensors
from _spawn import spawn
from intarsia.comm import Communicator, SelfCommunicator
from intarsia.config import MeshConfig
from intarsia.contracts import Init, Regions
from intarsia.mesh import Mesh, check_mesh
from intarsia.parameters import ParameterTable
from intarsia_flexshard import bucket as bucket_module
from intarsia_flexshard.config import FlexShardConfig
from intarsia_flexshard.payload import PlainPayload
from intarsia_flexshard.quantised import reads_payload
from intarsia_flexshard.runtime import build
from intarsia_float8.format import dequantise, quantise
from intarsia_models_common.build import Linear
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

VOCAB, DIM, HIDDEN, TILE = 13, 16, 24, (4, 4)
STEPS = 5


class Block(nn.Module):
    """x + B relu(A x) + a stack of two matrices that is multiplied as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = Linear(DIM, HIDDEN, 0.3, bias=True), Linear(HIDDEN, DIM, 0.3)
        self.stack = nn.Parameter(torch.empty(2, DIM, DIM))

    def forward(self, x_ND: Tensor) -> Tensor:
        """[N, D]."""
        return x_ND + self.down(self.up(x_ND).relu()) + (x_ND @ self.stack[0]) @ self.stack[1]


class Model(nn.Module):
    """Embedding, blocks, norm, and a head that losses ask for."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.norm = nn.LayerNorm(DIM)
        self.head = Linear(DIM, VOCAB, 0.3)

    @property
    def head_weight_VD(self) -> Tensor:
        """Read outside of the head's forward."""
        return self.head.weight

    def regions(self) -> Regions:
        """Two blocks."""
        return Regions(blocks=("blocks.0", "blocks.1"))

    def inits(self) -> Mapping[str, Init]:
        """Normal, but for the norm."""
        inits = {name: Init("normal", std=0.3) for name, _ in self.named_parameters()}
        return {**inits, "norm.weight": Init("ones"), "norm.bias": Init("zeros")}

    def forward(self, tokens_N: Tensor, recompute: bool) -> Tensor:
        """Hidden states [N, D]."""
        x_ND = self.embedding(tokens_N)
        for block in self.blocks:
            x_ND = checkpoint(block, x_ND, use_reentrant=False) if recompute else block(x_ND)
        return self.norm(x_ND)


class GatherThenQuantise(PlainPayload):
    """The judge: gathers the compute dtype as if nothing were quantised, and quantises whole matrices when they have arrived."""

    def __init__(
        self,
        layout: Any,
        geometry: Any,
        index: int,
        master: Tensor,
        wire: Tensor,
        parameters: Any,
        owners: Any,
        dtype: Any,
        tile: Any,
        power: bool,
    ) -> None:
        self.model, self.owners, self.tile, self.power = list(parameters), list(owners), tile, power
        hidden = [nn.Parameter(torch.empty(0, dtype=dtype)) for _ in self.model]
        super().__init__(geometry, master, torch.zeros(master.numel(), dtype=dtype), hidden, dtype)

    def bind(self, buffer: Tensor, staging: Tensor) -> None:
        """The model's parameters have memory of their own, for good."""
        super().bind(buffer, staging)
        for whole, parameter, owners in zip(self._parameters, self.model, self.owners, strict=True):
            if whole.dim() not in (2, 3):
                parameter.data = whole.data
            elif not reads_payload(owners):
                parameter.data = torch.empty_like(whole.data)
            else:
                parameter.data = torch.full((), math.nan, dtype=self.dtype).expand(whole.shape)

    def decode(self) -> None:
        """Quantise."""
        super().decode()
        for whole, parameter, owners in zip(self._parameters, self.model, self.owners, strict=True):
            if whole.dim() not in (2, 3):
                continue
            payload, scales = quantise(whole.detach(), self.tile, self.power)
            if not reads_payload(owners):
                parameter.data.copy_(dequantise(payload, scales, self.tile, self.dtype))
                continue
            for module, name in owners:
                setattr(module, f"{name}_payload", payload)
                setattr(module, f"{name}_scales", scales)
                setattr(module, f"{name}_tile", self.tile)


def train(
    world: Communicator, payload: str, placement: str, micro_batches: int = 1, recompute: bool = False, **settings: Any
) -> dict[str, Any]:
    mesh = Mesh(check_mesh(MeshConfig(), world.size), world)
    with torch.device("meta"):
        model = Model()
    table = ParameterTable.from_model(model, "float32", "bfloat16", "float32", seed=3)
    config = FlexShardConfig(placement=placements()[placement], payload=payload, tile=TILE, **settings)
    sharded = build(config).shard(model, table, mesh, world)
    parameters = sharded.parameters()
    optimizer = torch.optim.AdamW(parameters.values(), lr=0.02, weight_decay=0.1)
    found: dict[str, Any] = {"logits": [], "gradients": []}
    for step in range(STEPS):
        for number in range(micro_batches):
            generator = torch.Generator().manual_seed(1000 * step + 10 * number + mesh.data_rank)
            tokens = torch.randint(VOCAB, (7,), generator=generator)
            sharded.set_last_micro_batch(number == micro_batches - 1)
            logits = (model(tokens, recompute) @ model.head_weight_VD.t()).float()
            found["logits"].append(logits.tolist())
            nn.functional.cross_entropy(logits, tokens.roll(-1), reduction="sum").backward()
        sharded.finish_gradients()
        gradients = {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}
        found["gradients"].append(whole_tensors(world, table, gradients))
        optimizer.step()
        sharded.zero_gradients()
        sharded.after_update()
    found["dtypes"] = sorted({str(parameter.dtype) for parameter in parameters.values()})
    found["parameters"] = whole_tensors(world, table, {name: parameter.detach() for name, parameter in parameters.items()})
    found["sent"] = {bucket.name: sum(bucket.payload.counts) * bucket.payload.dtype.itemsize for bucket in sharded.buckets}
    found["whole"] = {bucket.name: bucket.payload.whole_bytes for bucket in sharded.buckets}
    return found


def compare(world: Communicator, placement: str, options: dict[str, Any]) -> list[Any]:
    float8 = train(world, "fp8", placement, **options)
    own, bucket_module.QuantisedPayload = bucket_module.QuantisedPayload, GatherThenQuantise  # type: ignore[misc, assignment]
    try:
        judge = train(world, "fp8", placement, **options)
    finally:
        bucket_module.QuantisedPayload = own  # type: ignore[misc]
    plain = train(world, "plain", placement, **options)
    return [float8, judge, plain]


CASES: list[tuple[int, str, dict[str, Any]]] = [
    (1, "row", {}),
    (2, "flat", {"micro_batches": 3}),
    (2, "row", {"recompute": True, "scales": "power_of_two"}),
    (2, "owned", {"debug": True}),
    (3, "flat", {"reshard": "never"}),
]


@pytest.mark.parametrize(("ranks", "placement", "options"), CASES)
def test_training_equals_gathering_bfloat16_and_quantising_it(ranks: int, placement: str, options: dict[str, Any]) -> None:
    """Logits, gradients and parameters of five steps, bit for bit; and it is not the training without float8."""
    results = spawn(compare, ranks, placement, options) if ranks > 1 else [compare(SelfCommunicator(), placement, options)]
    for float8, judge, plain in results:
        for what in ("logits", "gradients", "parameters"):
            assert float8[what] == judge[what], f"{placement} over {ranks}: {what}"
        assert float8["logits"] != plain["logits"]
        assert all(math.isfinite(value) for step in float8["logits"] for row in step for value in row)
        assert float8["dtypes"] == ["torch.float32"]
        assert all(float8["sent"][name] < plain["sent"][name] for name in ("blocks.0", "blocks.1"))
