"""One step on a model whose loss is known by hand: every quotient has the global number of counted tokens below the line."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from intarsia import plugins
from intarsia.comm import SelfCommunicator
from intarsia.contracts import IGNORE, Batch, LossSum, Run, StepSummary
from intarsia.errors import DistributedError, NumericsError
from intarsia.mesh import Mesh
from intarsia.train.built import Built
from intarsia.train.evaluate import evaluate
from intarsia.train.step import Flags, agree_on_tokens, clip, train_step
from intarsia.train.trainer import Trainer
from intarsia_eager.engine import EagerEngine
from torch import Tensor, nn


class Line(nn.Module):
    """hidden = weight x token, so that the loss of a token is weight x its id."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = Scale()

    def forward(self, tokens_BS: Tensor, context: Any) -> Tensor:
        return self.scale(tokens_BS)[..., None]


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, tokens_BS: Tensor) -> Tensor:
        return self.weight * tokens_BS.to(self.weight.dtype)


class Sum:
    """Sum of hidden over tokens whose label counts; the number of rows is a further sum."""

    def __call__(self, model: nn.Module, hidden_BSD: Tensor, batch: Batch) -> LossSum:
        total = (hidden_BSD[..., 0] * (batch.labels_BS != IGNORE)).sum()
        return LossSum(total, {"rows": torch.tensor(float(len(batch.labels_BS)))})

    def count(self, batch: Batch) -> int:
        return int((batch.labels_BS != IGNORE).sum())


def batch_of(*losses: float, size: int = 4) -> Batch:
    """One row whose counted tokens have these losses (at weight 1), the rest being padding."""
    tokens = torch.zeros(1, size, dtype=torch.float64)
    tokens[0, : len(losses)] = torch.tensor(losses, dtype=torch.float64)
    labels = torch.full((1, size), IGNORE)
    labels[0, : len(losses)] = 1
    places = torch.arange(size).expand(1, size)
    return Batch(tokens, labels, places, torch.zeros(1, size, dtype=torch.int32), ((size,),), (7,), {"bytes": len(losses)})


class Batches:
    """A loader that gives listed steps, then None."""

    def __init__(self, *steps: list[Batch]) -> None:
        self.steps, self.position = steps, 0

    def next_step(self) -> list[Batch] | None:
        self.position += 1
        return self.steps[self.position - 1] if self.position <= len(self.steps) else None

    def reset(self) -> None:
        self.position = 0


class Whole:
    """A sharder's result for one process."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.last = model, []

    def parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.model.named_parameters())

    def set_last_micro_batch(self, last: bool) -> None:
        self.last.append(last)

    def finish_gradients(self) -> None:
        pass

    def zero_gradients(self) -> None:
        self.model.zero_grad()

    def masters(self):
        return self.parameters()

    def load_masters(self, values) -> None:
        """They are in place."""

    def update(self, optimizer, factor) -> None:
        optimizer.step(factor)
        self.after_update()

    def after_update(self) -> None:
        pass


class Descent:
    """Keeps the gradients it was given."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.gradients, self.factors = model, [], []

    def step(self, factor: float) -> None:
        self.gradients.append({name: value.grad.clone() for name, value in self.model.named_parameters() if value.grad is not None})
        self.factors.append(factor)

    def learning_rates(self) -> dict[str, float]:
        return {"default": 0.5}


def make(*steps: list[Batch], clip_norm: float | None = None, world: Any = None) -> Built:
    train = SimpleNamespace(clip_norm=clip_norm, clip_norm_type=2.0, steps=10, seed=0)
    recipe = SimpleNamespace(train=train)
    model = Line().double()
    world = world or SelfCommunicator()
    hooks = plugins.load(entry_points=[]).hooks
    built = Built(Run(recipe, None), SimpleNamespace(recipe=recipe), None, hooks, world, torch.device("cpu"))  # type: ignore[arg-type]
    built.mesh = Mesh({"dp_shard": world.size}, world)
    built.data, built.loader, built.model, built.loss = world, Batches(*steps), model, Sum()  # type: ignore[assignment]
    built.engine, built.sharded, built.optimizer = EagerEngine(model, built.loss), Whole(model), Descent(model)  # type: ignore[assignment]
    built.schedule = SimpleNamespace(factor=lambda step, steps: 0.25)  # type: ignore[assignment]
    built.table = SimpleNamespace(norm=lambda gradients, comm, p: torch.stack([g.norm() for g in gradients.values()]).norm())  # type: ignore[assignment]
    built.progress = SimpleNamespace(tokens=0)  # type: ignore[assignment]
    built.manager = SimpleNamespace(latest=lambda verify=True: None, wait=lambda: None)  # type: ignore[assignment]
    return built


def step_of(built: Built) -> Any:
    result = train_step(built, Flags)
    assert result is not None
    return result[0]


def test_one_division_by_the_global_count_and_not_a_mean_of_means() -> None:
    built = make([batch_of(4.0), batch_of(1.0, 1.0, 1.0)])
    summary = step_of(built)
    assert summary.loss == 1.75  # The mean of the two means would be 2.5.
    assert built.optimizer.gradients[0]["scale.weight"] == 1.75
    assert (summary.counted_tokens, summary.tokens, summary.metrics["rows"], summary.learning_rate) == (4, 8, 0.5, 0.125)
    assert built.sharded.last == [False, True]


@pytest.mark.parametrize("cut", [[8], [1, 7], [2, 2, 4], [1] * 8])
def test_gradient_and_loss_do_not_depend_on_the_cut(cut) -> None:
    losses = [0.1 * (number + 1) for number in range(8)]
    batches, start = [], 0
    for size in cut:
        batches.append(batch_of(*losses[start : start + size], size=8))
        start += size
    built = make(batches)
    summary = step_of(built)
    assert summary.loss == pytest.approx(0.45, rel=1e-14)
    assert float(built.optimizer.gradients[0]["scale.weight"]) == pytest.approx(0.45, rel=1e-14)


def test_equal_micro_batches_give_their_mean_and_no_moving_average() -> None:
    built = make([batch_of(4.0) for _ in range(4)], [batch_of(8.0), batch_of(8.0), batch_of(0.0), batch_of(0.0)])
    step_of(built)
    step_of(built)
    assert [float(each["scale.weight"]) for each in built.optimizer.gradients] == [4.0, 4.0]


def test_a_micro_batch_without_counted_tokens_is_as_if_it_were_not_there() -> None:
    built = make([batch_of(), batch_of(3.0, 1.0)])
    summary = step_of(built)
    assert summary.loss == 2.0 and float(built.optimizer.gradients[0]["scale.weight"]) == 2.0


def test_an_empty_global_batch_is_reported_and_gives_no_nan() -> None:
    built, messages = make([batch_of(), batch_of()]), []
    built.warn = messages.append  # type: ignore[method-assign]
    summary = step_of(built)
    assert summary.loss == 0.0 and summary.counted_tokens == 0 and float(built.optimizer.gradients[0]["scale.weight"]) == 0.0
    assert len(messages) == 1 and "no token" in messages[0]


def test_evaluation_does_not_depend_on_accumulation() -> None:
    losses = (1.0, 2.0, 3.0, 6.0)
    results = []
    for cut in (4, 2, 1):
        built = make()
        built.evaluation = Batches([batch_of(*losses[start : start + cut]) for start in range(0, 4, cut)])  # type: ignore[assignment]
        results.append({name: value for name, value in evaluate(built).items() if name not in ("seconds_s", "rows")})
    assert results[0] == results[1] == results[2]
    assert results[0]["loss"] == 3.0 and results[0]["bits_per_byte"] == pytest.approx(3.0 / math.log(2))


def test_evaluation_without_a_counted_token_is_reported() -> None:
    built, messages = make(), []
    built.evaluation = Batches([batch_of()])  # type: ignore[assignment]
    built.warn = messages.append  # type: ignore[method-assign]
    assert evaluate(built) == {} and "no held-out token" in messages[0]


def test_what_an_evaluation_put_off_is_raised_at_its_end_and_by_nothing_else() -> None:
    """Also of the last one, behind which no step comes."""

    class Counting:
        """Adds its passes up when it is asked; one of two states has nothing to say."""

        def evaluated(self, all_reduce_sum: Any) -> None:
            raise NumericsError(f"{int(all_reduce_sum(torch.tensor(3)))} did not fit")

    built = make()
    built.evaluation = Batches([batch_of(1.0), batch_of(2.0)])  # type: ignore[assignment]
    built.step_states = [SimpleNamespace(), Counting()]  # type: ignore[list-item]
    with pytest.raises(NumericsError, match="3 did not fit"):
        evaluate(built)
    assert built.model.training


def test_the_end_of_the_data_is_none() -> None:
    assert train_step(make(), Flags) is None


class Other(SelfCommunicator):
    """A group of two in which the other rank's vector is known."""

    def __init__(self, vector: list[int], told: Any) -> None:
        super().__init__()
        self.size, self.vector, self.told = 2, vector, told

    def all_reduce(self, tensor: Tensor, op: Any = "sum", what: str = "") -> Tensor:
        return tensor.add_(torch.tensor(self.vector, dtype=tensor.dtype))

    def gather_json(self, value: Any, what: str = "") -> list[Any]:
        return [value, self.told]


@pytest.mark.parametrize(
    ("vector", "told", "text"), [([1, 0, 0, 0, 0], None, "rank 1: no data left"), ([0, 3, 5, 9, 0], 3, "rank 1: 3 micro-batches")]
)
def test_ranks_that_differ_in_their_data_are_told_apart(vector, told, text) -> None:
    built = make([batch_of(1.0)], world=Other(vector, told))
    with pytest.raises(DistributedError, match=f"rank 0: 1 micro-batches, {text}"):
        train_step(built, Flags)


def test_the_global_count_is_summed_over_ranks() -> None:
    assert agree_on_tokens(make(world=Other([0, 1, 3, 4, 0.0], None)), [batch_of(1.0, 1.0)]) == (5, 8, 0.0)


class Seeing(Line):
    """A model that looks at images: 10 FLOPs for each patch."""

    def media_flops(self, extra: dict[str, Any]) -> float:
        return 10.0 * sum(math.prod(grid) for grid in extra.get("grids", ()))


def test_what_media_cost_is_summed_over_micro_batches_and_ranks() -> None:
    batches = [batch_of(1.0), batch_of(2.0), batch_of(3.0)]
    batches[0].extra["grids"] = ((1, 2, 3), (2, 2, 2))
    batches[2].extra["grids"] = ((1, 1, 1),)
    built = make(batches, world=Other([0, 3, 3, 12, 1000.0], None))
    built.model = Seeing().double()
    assert agree_on_tokens(built, batches) == (6, 24, 1150.0)
    alone = make(batches)
    alone.model = built.model
    summary, _ = train_step(alone, Flags)
    assert summary.media_flops == 150.0


def test_utilisation_counts_media() -> None:
    """Of a peak of 1000 FLOP/s: 8 tokens of 50 and media of 200 FLOPs in two seconds, then half a second without media."""
    built, told = make(), []
    built.resolved.recipe.train.log_every, built.flops_per_token = 1, 50.0
    built.event = lambda name, **fields: told.append(fields)  # type: ignore[method-assign]
    trainer = SimpleNamespace(_built=built, _window=[], _recipe=built.resolved.recipe, _peak_flops=1000.0)
    summary = StepSummary(0, 1.0, 1.0, 0.1, 8, 8, 2.0, media_flops=200.0)
    Trainer._log(trainer, summary)
    Trainer._log(trainer, dataclasses.replace(summary, seconds_s=0.5, media_flops=0.0))
    assert [event["mfu"] for event in told] == [pytest.approx(0.3), pytest.approx(0.8)]
    assert [event["media_flops"] for event in told] == [200.0, 0.0]


def test_tensors_within_what_a_loader_adds_go_to_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    built, batch, grids = make(), batch_of(1.0), ((1, 2, 3), (1, 1, 1))
    built.device = torch.device("meta")
    made: list[int] = []
    batch.extra.update(grids=grids, patches_NC=torch.ones(2, 3), kept={"in": (torch.ones(1), "a", {"deep": torch.ones(2)})})
    batch.extra["later"] = lambda: made.append(1) or torch.ones(2)
    moved = built.on_device(batch)
    assert not made, "what is made where it is needed is not made to be moved"
    assert moved.extra["later"]().device.type == "meta" and made == [1]
    assert moved.extra["grids"] is grids and moved.extra["bytes"] == 1 and moved.samples == (7,)
    inner = moved.extra["kept"]["in"]
    assert {each.device.type for each in (moved.tokens_BS, moved.extra["patches_NC"], inner[0], inner[2]["deep"])} == {"meta"}
    assert inner[1] == "a" and batch.extra["patches_NC"].device.type == "cpu"


@pytest.mark.parametrize(("limit", "expected"), [(None, [3.0, 4.0]), (10.0, [3.0, 4.0]), (1.0, [0.6, 0.8])])
def test_clipping_scales_by_the_global_norm(limit, expected) -> None:
    gradients = [torch.tensor([3.0]), torch.tensor([4.0])]
    clip(gradients, 5.0, limit)
    assert torch.cat(gradients).tolist() == pytest.approx(expected, rel=1e-5)


def test_the_norm_is_reported_before_clipping() -> None:
    built = make([batch_of(6.0)], clip_norm=2.0)
    assert step_of(built).gradient_norm == 6.0
    assert float(built.optimizer.gradients[0]["scale.weight"]) == pytest.approx(2.0, rel=1e-5)


# ---------------------------------------------------------------- numbers that are not finite


def test_the_first_offending_module_is_named_and_nothing_is_applied() -> None:
    built = make([batch_of(1.0), batch_of(2.0, math.inf)])
    with pytest.raises(
        NumericsError, match=r"Step 0 is not finite.*module: scale \(Scale\), output of forward, on rank 0, in micro-batch 1 \(samples 7\)"
    ):
        train_step(built, Flags)
    assert built.optimizer.gradients == []


class Poison(torch.autograd.Function):
    """Identity whose gradient is not a number."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * math.nan


def test_a_gradient_that_is_not_finite_names_the_module_before_it() -> None:
    built = make([batch_of(1.0)])
    forward = built.model.forward
    built.model.forward = lambda tokens, context: Poison.apply(forward(tokens, context))  # type: ignore[method-assign]
    with pytest.raises(NumericsError, match=r"loss 1, gradient norm nan.*module: scale \(Scale\), gradient of its output in backward"):
        train_step(built, Flags)


def test_a_parameter_that_is_not_finite_is_named() -> None:
    built = make([batch_of(1.0)])
    with torch.no_grad():
        built.model.scale.weight.fill_(math.nan)
    with pytest.raises(NumericsError, match=r"Its own parameters are not finite: scale\.weight"):
        train_step(built, Flags)


def test_a_fault_that_does_not_repeat_names_the_gradient() -> None:
    built = make([batch_of(1.0)])
    real, calls = built.engine.micro_batch, []

    def once(batch: Batch, scale: float) -> LossSum:
        result = real(batch, scale)
        if not calls:
            built.model.scale.weight.grad.fill_(math.inf)
        calls.append(1)
        return result

    built.engine.micro_batch = once  # type: ignore[method-assign]
    with pytest.raises(NumericsError, match=r"module: scale, gradient of its parameter 'scale.weight', on rank 0"):
        train_step(built, Flags)
