"""The pipeline engine with ranks as threads: every schedule equals one process, and misuse is told."""

from __future__ import annotations

import dataclasses
from typing import Any

import chz
import pytest
import torch
from _pipeline import SCHEDULES, Alone, batches_of, build_stage, model_of, one_process, pipelined, recipe_of, worst
from intarsia import ops
from intarsia.config import CompileConfig
from intarsia.contracts import PipelinePart
from intarsia.errors import PluginError, UsageError
from intarsia_eager.context import TrainContext
from intarsia_models_common.build import Scope
from intarsia_models_common.moe.block import MoE
from intarsia_models_common.moe.config import MoEConfig, SoftmaxRouterConfig
from intarsia_models_common.moe.dispatch import Capabilities
from intarsia_models_common.moe.operators import GROUPED_LINEAR, SCALED_GROUPED_LINEAR
from intarsia_models_common.scaled_linear import scaled_linear
from intarsia_pipeline import weights
from intarsia_pipeline.capture import WARM_UP, check_batch, dispatch_problems, warm_up
from intarsia_testing.communicator import run_ranks
from torch.utils.checkpoint import checkpoint


def compare(
    recipe: Any, ranks: int, batches: Any, tolerance: float = 1e-6, sizes: dict[str, int] | None = None, **build: Any
) -> list[dict[str, Any]]:
    alone = {key: value for key, value in build.items() if key in ("streams", "dtype")}
    expected = one_process(recipe, batches, **alone)
    found = run_ranks(ranks, lambda world: pipelined(world, recipe, batches, sizes or {"pp": ranks}, **build))
    for what, value in worst(expected, found).items():
        assert value <= tolerance, f"{what} differ by {value}"
    return found


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_schedule_equals_one_process(schedule: str) -> None:
    compare(recipe_of(schedule, 5, layers=4, tied=True), 2, batches_of(5))


@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "dualpipev"])
def test_fewer_micro_batches_than_stages_where_it_is_allowed(schedule: str) -> None:
    compare(recipe_of(schedule, 1, few_micro_batches=True), 4, batches_of(1))


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zbv", "dualpipev"])
def test_payloads_are_trees_of_mixed_dtypes(schedule: str) -> None:
    found = compare(recipe_of(schedule, 5, few_micro_batches=True), 2, batches_of(5), streams=True)
    assert all(set(rank["sums"]) >= {"blocks", "size"} for rank in found)


def test_a_float32_stream_beside_a_bfloat16_one() -> None:
    compare(recipe_of("zb_h1", 4), 2, batches_of(4), tolerance=2e-2, streams=True, dtype="bfloat16", flexshard=True)


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_recomputation(schedule: str) -> None:
    compare(recipe_of(schedule, 4, recompute=True), 2, batches_of(4), streams=True)


@pytest.mark.parametrize(
    "settings", [{}, {"unshard": "action"}, {"reduce": "each"}, {"unshard": "action", "reduce": "each", "unshard_ahead": 0}]
)
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zbv"])
def test_flexshard_is_driven_by_the_schedule(schedule: str, settings: dict[str, Any]) -> None:
    recipe = recipe_of(schedule, 4, tied=True, recompute=schedule == "1f1b", **settings)
    compare(recipe, 2, batches_of(4), steps=2, flexshard=True)


def test_rows_may_differ_between_micro_batches() -> None:
    compare(recipe_of("interleaved", 6), 2, batches_of(6, rows=(2, 1, 3, 0)), streams=True, steps=2)


def test_three_virtual_stages_and_an_odd_number_of_micro_batches() -> None:
    found = compare(recipe_of("interleaved", 5, settings=("virtual_stages=3",)), 2, batches_of(5))
    assert [rank["stages"] for rank in found] == [[0, 2, 4], [1, 3, 5]]


def test_tied_embeddings_are_copies_on_the_last_stage_and_one_in_a_v() -> None:
    found = compare(recipe_of("1f1b", 4, tied=True), 2, batches_of(4))
    assert [rank["copies"] for rank in found] == [[], ["tok_embeddings.weight"]]
    assert all("tok_embeddings.weight" in rank["gradients"] for rank in found)
    found = compare(recipe_of("zbv", 4, tied=True), 2, batches_of(4))
    assert [rank["copies"] for rank in found] == [[], []]
    assert ["tok_embeddings.weight" in rank["gradients"] for rank in found] == [True, False]


def test_weight_gradients_are_put_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """W does the matrices: without it their gradients are missing, and only theirs."""
    monkeypatch.setattr(weights, "run", lambda queue: queue.clear())
    recipe = recipe_of("zb_h1", 4)
    expected = one_process(recipe, batches_of(4))
    (first, second) = run_ranks(2, lambda world: pipelined(world, recipe, batches_of(4), {"pp": 2}))
    found = first["gradients"] | second["gradients"]
    zero = {name for name, value in found.items() if not bool(value.any())}
    matrices = {name for name in expected["gradients"] if name.startswith("layers") and "norm" not in name}
    assert zero == matrices


def test_backward_need_not_be_split() -> None:
    compare(recipe_of("zbv", 4, split_backward=False), 2, batches_of(4))


def test_a_step_that_is_not_finite_is_explained() -> None:
    recipe = recipe_of("1f1b", 4)
    batches = batches_of(4)

    def work(world: Any) -> str:
        engine, sharded, *_ = build_stage(world, recipe, {"pp": 2})
        if world.rank == 1:
            with torch.no_grad():
                sharded.parameters()["layers.5.feed_forward.w1.weight"][0, 0] = float("nan")
        engine.run(batches, 0.01, sharded)
        return engine.explain_not_finite(batches, 0.01, sharded, world)

    texts = run_ranks(2, work)
    assert texts[0] == texts[1]
    assert "layers.5.feed_forward" in texts[0] and "rank 1" in texts[0] and "micro-batch 0" in texts[0]


def test_what_cannot_run_is_refused_at_build() -> None:
    def build(recipe: Any, ranks: int = 2) -> None:
        run_ranks(ranks, lambda world: build_stage(world, recipe, {"pp": ranks})[0])

    with pytest.raises(
        UsageError, match=r"needs at least 4 micro-batches in a step, and there are 3.*Take 4.*mesh.pp of at most 3.*few_micro_batches"
    ):
        build(recipe_of("1f1b", 3), 4)
    with pytest.raises(UsageError, match=r"needs 8 pipeline stages, and the model has 4 blocks: at most 4 stages"):
        build(recipe_of("zbv", 8, layers=4), 4)
    with pytest.raises(
        UsageError, match=r"keeps 4 activations alive on rank 0, at position 3 \(F\(stage 0, micro-batch 3\)\), and max_live is 3"
    ):
        build(recipe_of("gpipe", 4, max_live=3))
    with pytest.raises(UsageError, match=r"engine.unshard is 'steps'.*'step'"):
        build(recipe_of("1f1b", 4, unshard="steps"))


def test_a_payload_that_changes_its_form_is_told() -> None:
    recipe = recipe_of("1f1b", 4)

    def work(world: Any) -> None:
        engine, sharded, *_ = build_stage(world, recipe, {"pp": 2}, streams=True)
        block = engine._model.run_block
        count = 0

        def other(name: str, carry: Any, shared: Any, context: Any) -> Any:
            nonlocal count
            count += 1
            result = block(name, carry, shared, context)
            return result if count < 6 else {**result, "x": result["x"].double()}

        if world.rank == 0:
            engine._model.run_block = other
        engine.run(batches_of(4), 0.01, sharded)

    with pytest.raises((PluginError, RuntimeError), match=r"stage 0 hands on another payload|expected"):
        run_ranks(2, work)


def test_capture_is_refused_by_name_where_it_cannot_be() -> None:
    recipe = recipe_of("zbv", 4, layers=4, capture=True, unshard="action", recompute=True)
    with pytest.raises(UsageError) as caught:
        run_ranks(2, lambda world: build_stage(world, recipe, {"pp": 2})[0])
    for told in (
        "the device is cpu",
        "splits backward",
        "engine.unshard is action",
        "recompute.mode is blocks",
        "data.packing is concatenate",
    ):
        assert told in str(caught.value)


def test_a_batch_that_no_recording_serves_is_told() -> None:
    batch = batches_of(1)[0]
    context = TrainContext.of(batch)
    check_batch(0, batch, context)
    with pytest.raises(UsageError, match="rows of several documents"):
        check_batch(0, dataclasses.replace(batch, lengths=((3, 4), (7,))), context)
    with pytest.raises(UsageError, match="a context of type object"):
        check_batch(0, batch, object())


def mixture(jitter: float = 0.0) -> MoE:
    scope = Scope("layers.3.feed_forward", 8, 3, 4, False, 0.1, 0.1)
    layer = MoE(MoEConfig(router=SoftmaxRouterConfig(experts=4, top_k=2, jitter=jitter), hidden=6), scope)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    return layer


def test_dispatchers_that_no_recording_serves_are_named() -> None:
    layer = mixture()
    assert dispatch_problems(layer) == []
    for host, static, told in ((True, False, "waits for the device"), (False, False, "shapes that depend on numbers")):
        layer.experts.dispatcher.capabilities = Capabilities(needs_host_sync=host, static_shapes=static, drops_tokens=False)
        (problem,) = dispatch_problems(layer)
        assert "the dispatcher of experts, Local," in problem and told in problem and "fixed_capacity" in problem


def test_capture_refuses_a_dispatcher_at_build(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of("1f1b", 4, layers=4, capture=True)
    monkeypatch.setattr("intarsia_pipeline.capture.dispatch_problems", lambda model: [f"{type(model).__name__} waits"])
    with pytest.raises(UsageError, match=r"the device is cpu.*; Llama3 waits"):
        run_ranks(2, lambda world: build_stage(world, recipe, {"pp": 2})[0])


def test_what_is_run_before_a_recording_is_not_counted() -> None:
    layer, x = mixture().train(), torch.randn(1, 5, 8)
    layer(x)
    counted, runs = layer.router.counters.clone(), []
    warm_up(0, layer, lambda: runs.append(layer(x)))
    assert len(runs) == WARM_UP and counted.any()
    assert torch.equal(layer.router.counters, counted)


def test_random_numbers_of_the_host_cannot_be_recorded() -> None:
    layer, x = mixture(jitter=0.1).train(), torch.randn(1, 5, 8)
    with pytest.raises(UsageError, match="stage 2 draws random numbers on the host"):
        warm_up(2, layer, lambda: layer(x))


def test_compiled_models_and_split_backward_do_not_join() -> None:
    recipe = chz.replace(recipe_of("zb_h1", 4, layers=4), compile=CompileConfig(mode="local"))
    with pytest.raises(UsageError, match=r"compile.mode=local traces.*'zb_h1' puts off.*engine.split_backward=False"):
        run_ranks(2, lambda world: build_stage(world, recipe, {"pp": 2})[0])


def test_the_engine_wants_stages() -> None:
    from intarsia import plugins

    recipe = recipe_of("1f1b", 4, layers=4)
    model, _ = model_of(recipe.model, streams=False)
    with pytest.raises(UsageError, match=r"mesh.pp is 1.*engine=eager"):
        plugins.current().build(recipe.engine, model, None, recipe, None)
    with pytest.raises(PluginError, match=r"split gives, and the paralleliser made a PipelinePart"):
        plugins.current().build(recipe.engine, model, None, recipe, Alone(PipelinePart((), 2)))


def test_deferred_operators_give_the_gradients_of_the_plain_ones() -> None:
    """Every operator with a weight, with bias, and inside a recomputed region; the inner graph is not kept after W."""
    weights.install()
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(*shape, generator=generator) for shape in ((5, 4), (3, 4), (3,)))

    def gradients(queue: Any, recomputed: bool) -> list[torch.Tensor]:
        inputs = [each.clone().requires_grad_() for each in (x, weight, bias)]

        def forward(*tensors: torch.Tensor) -> torch.Tensor:
            return ops.linear(*tensors).square()

        with weights.deferring(queue):
            result = checkpoint(forward, *inputs, use_reentrant=False) if recomputed else forward(*inputs)
            result.sum().backward()
        if queue is not None:
            assert inputs[1].grad is None and len(queue) == 1
            weights.run(queue)
        return [each.grad for each in inputs]  # type: ignore[misc]

    for recomputed in (False, True):
        for mine, plain in zip(gradients([], recomputed), gradients(None, recomputed), strict=True):
            torch.testing.assert_close(mine, plain)


@pytest.mark.parametrize("name", ["linear", "scaled_linear", "grouped_linear", "scaled_grouped_linear", "unknown"])
def test_each_deferred_operator_gives_the_gradients_of_the_plain_one(name: str) -> None:
    """Also one of which no rule for the weight's gradient is known."""
    generator = torch.Generator().manual_seed(1)
    grouped = name.endswith("grouped_linear")
    x = torch.randn(6, 4, generator=generator)
    weight = torch.randn(*((2,) if grouped else ()), 3, 4, generator=generator)
    payload = weight.to(torch.float8_e4m3fn)
    scales = torch.ones(*weight.shape[:-2], 1, 1)
    counts = torch.tensor([4, 1])
    rest: tuple[Any, ...] = {"linear": (), "unknown": (), "scaled_linear": (payload, scales, None), "grouped_linear": (counts,)}.get(
        name, (payload, scales, counts)
    )
    operator = (
        ops.Operator("mine", lambda x, weight: (x @ weight.t()).sin(), "other", invariant=False)
        if name == "unknown"
        else {
            "linear": ops.linear,
            "scaled_linear": scaled_linear,
            "grouped_linear": GROUPED_LINEAR,
            "scaled_grouped_linear": SCALED_GROUPED_LINEAR,
        }[name]
    )
    plain = ops.Operator(operator.name, operator.reference, "other", invariant=False)
    call = weights._deferring_form(plain)

    def gradients(queue: Any) -> list[torch.Tensor]:
        inputs = [each.clone().requires_grad_() for each in (x, weight)]
        with weights.deferring(queue):
            (call(*inputs, *rest) * torch.arange(3.0)).sum().backward()
        if queue is not None:
            assert inputs[1].grad is None
            weights.run(queue)
        return [each.grad for each in inputs]  # type: ignore[misc]

    for mine, expected in zip(gradients([]), gradients(None), strict=True):
        torch.testing.assert_close(mine, expected)


def test_the_weights_product_runs_with_w_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    from intarsia_models_common.moe import products

    calls: list[str] = []
    product, gradient = products.product, products.grouped_linear.weight_gradient
    mine = products.grouped(
        lambda *each: (calls.append("product"), product(*each))[1], lambda *each: (calls.append("weight"), gradient(*each))[1]
    )
    monkeypatch.setattr(products.grouped_linear, "weight_gradient", lambda *each: (calls.append("weight"), gradient(*each))[1])
    call = weights._deferring_form(ops.Operator("grouped_linear", mine, "other", invariant=False))
    x, weight = torch.randn(5, 4, requires_grad=True), torch.randn(2, 3, 4, requires_grad=True)
    queue: Any = []
    with weights.deferring(queue):
        call(x, weight, torch.tensor([2, 3])).sum().backward()
    assert calls == ["product", "product"]
    weights.run(queue)
    assert calls == ["product", "product", "weight"]
