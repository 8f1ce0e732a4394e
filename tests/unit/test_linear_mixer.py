"""The component `gated_delta_net`: transformers' layer number for number, packed documents, what it declares, what is refused, and how it is planned and cut."""

from __future__ import annotations

from typing import Any

import chz
import pytest
import torch
from intarsia import logical, ops, plugins
from intarsia.errors import UsageError
from intarsia.mesh import check_mesh
from intarsia_models_common.build import Scope
from intarsia_models_common.build import build as build_component
from intarsia_models_common.linear_attention.config import GatedDeltaNetConfig
from intarsia_models_common.linear_attention.delta_rule import gated_delta_rule
from intarsia_models_common.linear_attention.mixer import GatedDeltaNet
from intarsia_models_common.linear_attention.sharding import delta_rows
from intarsia_parallel.table import place, rows_of
from intarsia_planner import delta_rule as planned_rule
from intarsia_planner import stand_ins
from intarsia_planner.devices import find
from intarsia_planner.plan import make_plan
from intarsia_testing.model import packed_context
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from tests.support.small_models import hybrid, recipe_of

SIZES = {"key_heads": 2, "value_heads": 4, "key_dim": 16, "value_dim": 12}


def mixer(chunk: int = 64, **changes: Any) -> GatedDeltaNet:
    made = build_component(
        GatedDeltaNetConfig(**{**SIZES, **changes}, chunk=chunk), Scope("layers.0.attention", 64, 0, 4, False, 0.02, 0.02)
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    assert isinstance(made, GatedDeltaNet)
    return made


def test_it_is_transformers_layer() -> None:
    """Outputs and every gradient, over two borders of chunks."""
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

    config = Qwen3_5TextConfig(
        hidden_size=64,
        linear_key_head_dim=16,
        linear_value_head_dim=12,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=4,
        vocab_size=32,
    )
    theirs: Any = Qwen3_5GatedDeltaNet(config, 0)
    ours = mixer()
    fused = {
        "in_proj_qkv.weight": torch.cat((ours.wq.weight, ours.wk.weight, ours.wv.weight)),
        "conv1d.weight": torch.cat((ours.q_conv.weight, ours.k_conv.weight, ours.v_conv.weight))[:, None],
    }
    alike = {"in_proj_z": "wz", "in_proj_b": "wb", "in_proj_a": "wa", "out_proj": "wo", "norm": "norm"}
    same = {f"{name}.weight": ours.get_parameter(f"{own}.weight") for name, own in alike.items()}
    theirs.load_state_dict({**fused, **same, "A_log": ours.log_a, "dt_bias": ours.dt_bias})
    x = torch.randn(2, 150, 64, generator=torch.Generator().manual_seed(1))
    y, expected = ours(x, (), packed_context(((150,), (150,)))), theirs(x)  # type: ignore[arg-type]
    assert (y - expected).abs().max() < 1e-5 * expected.abs().max()
    y.square().sum().backward()
    expected.square().sum().backward()

    def close(own: Tensor | None, other: Tensor) -> None:
        assert own is not None and (own - other).abs().max() < 1e-4 * other.abs().max()

    for name, own in alike.items():
        close(ours.get_parameter(f"{own}.weight").grad, theirs.get_parameter(f"{name}.weight").grad)
    for own, other in ((ours.log_a.grad, theirs.A_log.grad), (ours.dt_bias.grad, theirs.dt_bias.grad)):
        close(own, other)
    for projection, taps, at in (("wq", "q_conv", slice(32)), ("wk", "k_conv", slice(32, 64)), ("wv", "v_conv", slice(64, None))):
        close(ours.get_parameter(f"{projection}.weight").grad, theirs.in_proj_qkv.weight.grad[at])
        close(ours.get_parameter(f"{taps}.weight").grad, theirs.conv1d.weight.grad[at, 0])


def test_documents_packed_equal_documents_alone() -> None:
    made, lengths = mixer(chunk=8), (2, 1, 20, 14)
    x = torch.randn(1, 37, 64, generator=torch.Generator().manual_seed(1))
    packed = made(x, (), packed_context((lengths,)))  # type: ignore[arg-type]
    start = 0
    for length in lengths:
        alone = made(x[:, start : start + length], (), packed_context(((length,),)))  # type: ignore[arg-type]
        torch.testing.assert_close(packed[:, start : start + length], alone, atol=1e-5, rtol=1e-5)
        start += length


def test_decays_are_float32_in_a_bfloat16_model() -> None:
    assert set(GatedDeltaNet.keeps_float32) == {"log_a", "dt_bias"}
    made = mixer().bfloat16()
    made.log_a.data, made.dt_bias.data = made.log_a.data.float(), made.dt_bias.data.float()
    seen: dict[str, Tensor] = {}

    def noting(*inputs: Tensor, **settings: Any) -> Any:
        seen.update(decay=inputs[3], beta=inputs[4], q=inputs[0])
        return gated_delta_rule(*inputs, **settings)

    with ops.installed({"gated_delta_rule": ops.Choice("tests:noting", "a test", noting)}):
        y = made(torch.randn(1, 5, 64).bfloat16(), (), packed_context(((5,),)))  # type: ignore[arg-type]
    assert (seen["decay"].dtype, seen["beta"].dtype, seen["q"].dtype, y.dtype) == (
        torch.float32,
        torch.float32,
        torch.bfloat16,
        torch.bfloat16,
    )
    assert seen["q"].shape[2] == 4


def test_heads_start_with_memories_of_all_lengths() -> None:
    inits = mixer().inits()
    assert (inits["log_a"].kind, inits["dt_bias"].kind, inits["dt_bias"].value) == ("normal", "constant", -3.0)
    steps = 1 / (torch.tensor([-2.0, 0.0, 2.0]).exp() * torch.nn.functional.softplus(torch.tensor(-3.0)))
    assert steps[0] > 100 and 15 < steps[1] < 25 and steps[2] < 4


@pytest.mark.parametrize("wrong", [{"value_heads": 3}, {"key_dim": 0}, {"kernel": 0}, {"chunk": 0}], ids=str)
def test_sizes_that_do_not_fit_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(UsageError, match=rf"gated_delta_net\.{next(iter(wrong))}"):
        GatedDeltaNetConfig(**{**SIZES, **wrong})


def test_flops_are_near_what_torch_counts() -> None:
    """The triangular system, which torch does not count, and half of the triangles apart."""
    made = mixer(key_dim=64, value_dim=64)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        made(torch.randn(1, 256, 64), (), packed_context(((256,),)))  # type: ignore[arg-type]
    layers = sum(2 * each.weight.numel() for each in made.modules() if isinstance(each, nn.Linear))
    counted = counter.get_total_flops() / 256 - layers
    assert 0.9 < made.mixing_flops_per_token(256) / counted < 1.15


def test_more_ranks_than_key_heads_are_refused() -> None:
    model = nn.ModuleDict({"attention": mixer()})
    placed, problems = place(rows_of(delta_rows("attention"), None, "Test"), model)
    assert not problems
    placed[0].ask("check", {"tp": 2})
    with pytest.raises(UsageError, match=r"attention has 2 key/value heads, which tp=4 does not divide.*The nearest degrees that do: 2"):
        placed[0].ask("check", {"tp": 4})


def test_a_plan_knows_what_the_kernel_keeps() -> None:
    """Where a device has a kernel, its stand-in: less memory than the reference's, and the work of its products."""
    recipe = recipe_of(hybrid(vocab_size=264, max_positions=512))
    recipe = chz.replace(recipe, train=chz.replace(recipe.train, sequence_length=512, micro_batch=2, global_batch=2))
    try:
        cpu, gpu = (make_plan(recipe, check_mesh(recipe.mesh, 1), find(device), plugins.current()) for device in ("cpu", "h200"))
    finally:
        logical.reset()
    assert cpu.flops == gpu.flops > 0
    offered = any(getattr(entry, "op", "") == "gated_delta_rule" for entry in plugins.current().registry("kernel").entries())
    assert offered and "gated_delta_rule" in stand_ins.STAND_INS
    given = [torch.empty(2, 200, 4, n, device="meta", dtype=torch.bfloat16, requires_grad=True) for n in (64, 64, 32)]
    further = [torch.empty(2, 200, 4, device="meta", requires_grad=True) for _ in range(2)]
    y, after = planned_rule.gated_delta_rule(*given, *further, scale=1.0, normalise=True)
    assert (y.shape, y.dtype, after.shape, after.dtype) == ((2, 200, 4, 32), torch.bfloat16, (2, 4, 64, 32), torch.float32)
    y.float().sum().backward()
    assert all(x.grad is not None and x.grad.shape == x.shape for x in (*given, *further))
