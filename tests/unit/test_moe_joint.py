"""The balance loss of all layers together: its value and gradients by hand, through recomputation, stages and further depths; padding; what is refused."""

from __future__ import annotations

from typing import Any

import chz
import pytest
import torch
import torch.nn.functional as F
from intarsia import logical
from intarsia.contracts import StagePart
from intarsia.errors import UsageError
from intarsia.plugins import current
from intarsia_eager.context import TrainContext
from intarsia_models_common.config import SwiGLUConfig
from intarsia_models_common.moe import balance
from intarsia_models_common.moe.balance import Sequences
from intarsia_models_common.moe.config import MoEConfig, SigmoidRouterConfig, SoftmaxRouterConfig, softmax_experts
from intarsia_models_common.moe.joint import JointLoss
from intarsia_qwen3.config import qwen3
from intarsia_testing.model import fill
from torch import Tensor
from torch.utils.checkpoint import checkpoint

TOKENS, EXPERTS, TOP_K = 8, 6, 2


def model_of(layers: int = 3, **router: Any) -> Any:
    feed_forward = chz.replace(softmax_experts(EXPERTS, TOP_K, 12, joint_loss=0.25), hidden=12)
    if router:
        feed_forward = MoEConfig(router=SigmoidRouterConfig(experts=EXPERTS, top_k=TOP_K, joint_loss=0.25, **router), hidden=12)
    config = qwen3(
        dim=16,
        layers=layers,
        heads=2,
        kv_heads=1,
        head_dim=8,
        feed_forward=feed_forward,
        dense=SwiGLUConfig(hidden=16),
        dense_layers=(1,),
        vocab_size=32,
    )
    return fill(current().build(config)).train()


def context_of(**extra: Any) -> TrainContext:
    return TrainContext(torch.arange(TOKENS).expand(2, TOKENS), None, ((TOKENS,),) * 2, extra=extra)


def inputs() -> Tensor:
    return torch.randint(0, 32, (2, TOKENS), generator=torch.Generator().manual_seed(3))


def by_hand(model: Any, context: TrainContext, keep_N: Tensor | None = None) -> Tensor:
    """T E sum f_e P_e from the routers' logits in a plain pass."""
    seen: list[Tensor] = []
    routers = [layer.feed_forward.router for layer in model.layers if hasattr(layer.feed_forward, "router")]
    hooks = [router.register_forward_pre_hook(lambda module, args: seen.append(args[0] @ module.weight.t())) for router in routers]
    was, model.joint_loss = model.joint_loss, None
    model(inputs(), context)
    model.joint_loss = was
    for hook in hooks:
        hook.remove()
    keep = torch.ones(2 * TOKENS) if keep_N is None else keep_N
    scores = [
        torch.softmax(z, -1) if model.config.layers[0].feed_forward.router.__class__ is SoftmaxRouterConfig else z.sigmoid() for z in seen
    ]
    scores = [s / s.sum(-1, keepdim=True) for s in scores]
    pairs = sum((F.one_hot(s.topk(TOP_K).indices, EXPERTS).sum(1) * keep[:, None]).sum(0) for s in scores)
    mass = sum((s * keep[:, None]).sum(0) for s in scores)
    rows = keep.sum() * len(scores)
    return 0.25 * keep.sum() * EXPERTS * ((pairs / rows) * (mass / rows)).sum()


def gradients(model: Any) -> dict[str, Tensor]:
    found = {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return found


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, each in expected.items():
        torch.testing.assert_close(found[name], each, rtol=1e-5, atol=1e-7, msg=name)
    assert any(each.abs().max() > 1e-4 for name, each in expected.items() if "router" in name)


@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_value_and_every_gradient_by_hand(scores: str, padding: bool) -> None:
    model = model_of(**({} if scores == "softmax" else {"scale": 1.5}))
    padding_BS = torch.arange(TOKENS).expand(2, TOKENS) >= torch.tensor([[5], [8]])
    context = context_of(**({"padding_BS": padding_BS} if padding else {}))
    expected = by_hand(model, context, (~padding_BS).flatten().float() if padding else None)
    (0.5 * expected).backward()
    wanted = gradients(model)
    with logical.micro_batch(0.5) as sums:
        (model(inputs(), context) * 0).sum().backward()
    assert sums["moe.joint_loss"].item() == pytest.approx(expected.item(), rel=1e-5)
    assert_equal(gradients(model), wanted)


def test_recomputation_changes_nothing() -> None:
    model = model_of()
    with logical.micro_batch(0.5) as plain:
        model(inputs(), context_of()).cos().sum().backward()
    wanted = gradients(model)
    for layer in model.layers:
        forward = layer.forward
        layer.forward = lambda *args, forward=forward: checkpoint(forward, *args, use_reentrant=False)
    with logical.micro_batch(0.5) as sums:
        model(inputs(), context_of()).cos().sum().backward()
    assert sums["moe.joint_loss"].item() == plain["moe.joint_loss"].item()
    assert_equal(gradients(model), wanted)


def test_compiled_blocks_change_nothing() -> None:
    model = model_of()
    with logical.micro_batch(0.5) as plain:
        model(inputs(), context_of()).cos().sum().backward()
    wanted = gradients(model)
    torch._dynamo.reset()
    for layer in model.layers:
        layer.compile(backend="eager")
    with logical.micro_batch(0.5) as sums:
        model(inputs(), context_of()).cos().sum().backward()
    assert sums["moe.joint_loss"].item() == pytest.approx(plain["moe.joint_loss"].item(), rel=1e-6)
    assert_equal(gradients(model), wanted)


def test_stages_hand_statistics_on() -> None:
    """What a pipeline hands on and back: leaves of the next stage, whose gradients are the last stage's."""
    model, context = model_of(), context_of()
    with logical.micro_batch(0.5) as plain:
        model(inputs(), context).cos().sum().backward()
    wanted = gradients(model)
    first = StagePart(index=0, first=True, last=False, blocks=("layers.0", "layers.1"))
    last = StagePart(index=1, first=False, last=True, blocks=("layers.2",))
    with logical.micro_batch(0.5) as sums:
        hidden, statistics = handed = model(inputs(), context, stage=first)
        leaves = [each.detach().requires_grad_() for each in handed]
        model(tuple(leaves), context, stage=last).cos().sum().backward()
        torch.autograd.backward((hidden, statistics), [leaf.grad for leaf in leaves])
    assert sums["moe.joint_loss"].item() == pytest.approx(plain["moe.joint_loss"].item(), rel=1e-6)
    assert_equal(gradients(model), wanted)


def test_evaluation_has_no_loss_and_balanced_experts_have_the_least() -> None:
    model = model_of().eval()
    with logical.micro_batch(1.0) as sums, torch.no_grad():
        model(inputs(), context_of())
    assert not sums
    loss = JointLoss(4, 1.0)
    pairs, mass = torch.full((4,), 8.0), torch.full((4,), 4.0)
    # 16 rows are 8 tokens in 2 layers, each of which goes to 2 experts.
    assert loss.value(torch.cat((pairs, mass, torch.tensor([16.0, 2.0])))).item() == pytest.approx(8 * 2)
    assert not loss.value(torch.zeros(10)).item()


def test_it_is_no_mean_of_layers_own_losses() -> None:
    """Two layers that each send all tokens to one half of the experts are balanced together."""
    loss, half = JointLoss(4, 1.0), torch.tensor([1.0, 1.0, 0.0, 0.0])
    one, other = (torch.cat((8 * each, 4 * each, torch.tensor([8.0, 1.0]))) for each in (half, 1 - half))
    assert loss.value(one).item() == loss.value(other).item() == pytest.approx(2 * 8 * 2)
    assert loss.value(one + other).item() == pytest.approx(8 * 2)


def test_padding_is_left_out_of_every_loss() -> None:
    p, experts_NK = torch.softmax(torch.randn(8, 4), -1), torch.randint(0, 4, (8, 2))
    keep_N = torch.tensor([1.0, 1, 1, 0, 1, 1, 1, 1])
    kept = keep_N.bool()
    found = balance.balance_loss(p * keep_N[:, None], experts_NK, keep_N)
    torch.testing.assert_close(found, balance.balance_loss(p[kept], experts_NK[kept]))
    rows = balance.sequence_loss(p * keep_N[:, None], experts_NK, Sequences(2, padding_BS=~kept.view(2, 4)))
    apart = sum(balance.sequence_loss(p[part], experts_NK[part], Sequences(1)) for part in (kept.nonzero()[:3, 0], torch.arange(4, 8)))
    torch.testing.assert_close(rows, apart)
    torch.testing.assert_close(balance.z_loss(p, keep_N), balance.z_loss(p[kept]))


def test_layers_that_differ_are_told() -> None:
    config = model_of().config
    other = chz.replace(config.layers[2], feed_forward=softmax_experts(EXPERTS, TOP_K, 12, joint_loss=0.5))
    with pytest.raises(UsageError, match=r"6 experts with 0\.25, 6 experts with 0\.5"):
        current().build(chz.replace(config, layers=(*config.layers[:2], other)))
