"""Our roles keep the promises of roles, and the kit finds those that do not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from intarsia.comm import Communicator
from intarsia_eager.context import TrainContext
from intarsia_llama3 import recipes
from intarsia_models_common.build import Linear, Scope, build
from intarsia_models_common.config import AttentionConfig, RMSNormConfig, RopeConfig, SwiGLUConfig
from intarsia_models_common.feed_forward import SwiGLU
from intarsia_models_common.norm import RMSNorm
from intarsia_models_common.rope import Rope
from intarsia_models_common.vision.base import TokenFeatures, pick
from intarsia_models_common.vision.config import VisionConfig
from intarsia_models_common.vision.sharding import vision_rows
from intarsia_models_common.vision.tower import VisionTower
from intarsia_parallel.config import DeclaredConfig
from intarsia_parallel.roles import row
from intarsia_parallel.roles.sequence import Sequence
from intarsia_parallel.table import Placed
from intarsia_testing import RoleConformance
from torch import Tensor, nn

SCOPE = Scope("layer", 24, 0, 1, False, 0.1, 0.1)


class Layer(nn.Module):
    """A norm, and a feed-forward layer behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.feed_forward = RMSNorm(RMSNormConfig(), SCOPE), SwiGLU(SwiGLUConfig(hidden=26), SCOPE)
        self.feed_forward.w2 = Linear(26, 24, 0.1, bias=True)

    def forward(self, x_BSD: Tensor) -> Tensor:
        return x_BSD + self.feed_forward(self.norm(x_BSD))


class TestRegion(RoleConformance):
    entry = "intarsia-parallel:region"
    rows = (
        ("norm", "sequence"),
        ("feed_forward", "region"),
        ("feed_forward.w1", "column"),
        ("feed_forward.w3", "column"),
        ("feed_forward.w2", "row"),
    )

    def module(self) -> nn.Module:
        return Layer()


class TestColumn(TestRegion):
    entry = "intarsia-parallel:column"
    rows = (
        ("norm", "sequence"),
        *((f"feed_forward.{name}", "column", {"gather": True}) for name in ("w1", "w3")),
        ("feed_forward.w2", "row"),
    )


class TestRow(TestRegion):
    entry = "intarsia-parallel:row"


class TestSequence(TestRegion):
    entry = "intarsia-parallel:sequence"


class TestReplicated(TestRegion):
    entry = "intarsia-parallel:replicated"
    rows = (("norm", "sequence"), ("feed_forward", "replicated"))


class TestAttentionHeads(RoleConformance):
    entry = "intarsia-parallel:attention_heads"
    rows = (("", "attention_heads"), ("wq", "column"), ("wk", "column"), ("wv", "column"), ("wo", "row"))
    rows = tuple((f"mixer{'.' if name else ''}{name}", role) for name, role in rows)

    def module(self) -> nn.Module:
        config = AttentionConfig(heads=6, kv_heads=2, head_dim=4, sinks=True, qk_norm=RMSNormConfig())
        return nn.ModuleDict({"mixer": build(config, SCOPE)})

    def call(self, module: nn.Module, x_BSD: Tensor, length: int) -> Tensor:
        context = TrainContext(torch.arange(length).expand(2, length))
        return module["mixer"](x_BSD, Rope(RopeConfig(dim=4), SCOPE)(context.positions_BS), context)  # type: ignore[index]


class Seeing(nn.Module):
    """A tower, and what puts its features into a stream of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.visual = VisionTower(VisionConfig(depth=2, dim=16, hidden=20, heads=2, out_dim=24, patch=2, table=3, deepstack=(0,)), SCOPE)
        self.visual_rows = TokenFeatures()

    def forward(self, x_BSD: Tensor, length: int) -> Tensor:
        grids = ((1, 2, 2), (2, 2, 2), (1, 2, 4))[: length // 3]
        visual_BS = torch.full((2, length), -1)
        visual_BS[0, : min(length, 3)] = torch.tensor([0, -1, 1])[: min(length, 3)]
        visual_BS[1, -2:] = torch.tensor([2, 3])[:2]
        features = sum(frames * rows * columns // 4 for frames, rows, columns in grids)
        visual_BS[visual_BS >= features] = -1
        patches_NC = torch.randn(4 * features, 24, generator=torch.Generator().manual_seed(length))
        found_MD, (deepstack_MD,) = self.visual(patches_NC, grids)
        rows_BS = self.visual_rows(visual_BS)
        x_BSD = torch.where((rows_BS >= 0)[..., None], pick(found_MD, rows_BS, x_BSD.dtype), x_BSD)
        return x_BSD * 2 + pick(deepstack_MD, rows_BS, x_BSD.dtype)


class TestMedia(RoleConformance):
    entry = "intarsia-parallel:media"
    rows = tuple((f"sees.{name}", *row) for name, *row in vision_rows("visual"))
    vision = "whole"

    def module(self) -> nn.Module:
        return nn.ModuleDict({"sees": Seeing()})

    def call(self, module: nn.Module, x_BSD: Tensor, length: int) -> Tensor:
        return module["sees"](x_BSD, length)  # type: ignore[index]

    def _placed(self, module: nn.Module) -> list[Placed]:
        placed = super()._placed(module)
        for each in placed:
            if each.role_name == "media":
                each.role.prepare(DeclaredConfig(vision=self.vision), recipes.debug())  # type: ignore[attr-defined]
        return placed


class TestMediaShared(TestMedia):
    vision = "shared"


class TestMediaBalanced(TestMedia):
    vision = "balanced"


class TestReplicatedOfTheBatch(TestMedia):
    entry = "intarsia-parallel:replicated"


def unsummed(partial: Tensor, dim: int, counts: Any, comm: Communicator, what: str) -> Tensor:
    return partial.split(counts, dim)[comm.rank]


def test_a_row_that_is_not_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row, "scatter_sum", unsummed)
    TestRow().test_one_rank_changes_nothing()
    with pytest.raises(pytest.fail.Exception, match="the output on 2 ranks, 12 tokens is off"):
        TestRow().test_equals_one_process()


def test_a_gradient_that_is_summed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    def apply(self: Sequence, name: str, module: nn.Module, groups: Any) -> None:
        module.weight.register_hook(lambda grad: grad * groups("tp").size)  # type: ignore[union-attr]

    monkeypatch.setattr(Sequence, "apply", apply)
    with pytest.raises(pytest.fail.Exception, match=r"norm.weight on 2 ranks.*2 times that: summed too often"):
        TestSequence().test_equals_one_process()


def test_a_check_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row.Row, "check", lambda self, name, module, sizes: None)
    with pytest.raises(pytest.fail.Exception, match=r"feed_forward.w2 \(row\), tp 64: `check` let pass what cannot be cut"):
        TestRow().test_checks_before_anything_is_cut()


def test_a_check_that_changes_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row.Row, "check", lambda self, name, module, sizes: setattr(module, "forward", module.forward))
    monkeypatch.setattr(row.Row, "cut", lambda self, name, module, sizes: {})
    with pytest.raises(pytest.fail.Exception, match="`check` or `cut` changed the module"):
        TestRow().test_checks_before_anything_is_cut()


def test_a_module_that_hands_on_all_tokens() -> None:
    class Gathers(TestSequence):
        __test__ = False
        rows = (("norm", "sequence", {"gather": True}),)

        def module(self) -> nn.Module:
            return nn.ModuleDict({"norm": RMSNorm(RMSNormConfig(), SCOPE)})

        def call(self, module: nn.Module, x_BSD: Tensor, length: int) -> Tensor:
            return module["norm"](x_BSD)  # type: ignore[index]

    with pytest.raises(pytest.fail.Exception, match=r"\(2, 6, 24\) came in, and \(2, 12, 24\) came out"):
        Gathers().test_equals_one_process()
