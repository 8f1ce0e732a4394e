"""`intarsia plan` says what a run then takes: bytes and messages are compared with those of tiny real models on the CPU."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from intarsia import logical, plugins
from intarsia.cli import main
from intarsia.comm import FakeCommunicator
from intarsia.config import Recipe, resolve
from intarsia.discovery import import_reference
from intarsia.errors import UsageError
from intarsia.mesh import Mesh, check_mesh
from intarsia.parameters import ParameterTable
from intarsia.train.groups import freeze, optimizer_groups
from intarsia_eager.context import windows_of
from intarsia_eager.engine import prepare, prepare_regions
from intarsia_planner import rates, stand_ins
from intarsia_planner.devices import DEVICES, find
from intarsia_planner.fake import Message, world
from intarsia_planner.memory import Held
from intarsia_planner.plan import RunPlan, make_plan, spans_of
from intarsia_planner.plan_command import processes
from intarsia_planner.trace import Watch, Work
from torch import Tensor

CPU = find("cpu")


def recipe_of(name: str, *overrides: str) -> Recipe:
    defaults = [
        each
        for each in ("train.sequence_length=64", "train.micro_batch=2")
        if not any(own.startswith(each.split("=")[0]) for own in overrides)
    ]
    return resolve(name, [*defaults, *overrides]).recipe


def planned(recipe: Recipe, ranks: int, device: str = "cpu") -> RunPlan:
    return make_plan(recipe, check_mesh(recipe.mesh, ranks), find(device), plugins.current())


class Real:
    """The first rank of a mesh, or another one, on the CPU, with tensors of its own: other ranks' parts are zero."""

    def __init__(self, recipe: Recipe, ranks: int, rank: int = 0) -> None:
        self.recipe = recipe
        self.comm = FakeCommunicator(rank, ranks)
        mesh = Mesh(check_mesh(recipe.mesh, ranks), self.comm)
        with torch.device("meta"):
            self.model: Any = plugins.current().build(recipe.model)
        freeze(recipe.parameter_groups, self.model)
        precision = recipe.precision
        self.table = ParameterTable.from_model(self.model, precision.master, precision.compute, precision.reduce)
        self.parallel: Any = None
        if ranks > 1 and any(mesh.sizes[axis] > 1 for axis in ("cp", "tp", "ep")):
            entry = next(entry for entry in plugins.current().registry("paralleliser").entries() if entry.name == "declared")
            sharding = import_reference(plugins.current().entry_of(recipe.model).sharding)  # type: ignore[attr-defined]
            paralleliser = plugins.current().build(recipe.parallel or plugins.current().config_class(entry)())
            self.parallel = paralleliser.apply(self.model, self.table, mesh, recipe, sharding)
        self.groups = mesh
        self.sharded = plugins.current().build(recipe.sharder).shard(self.model, self.table, mesh, self.comm)
        self.loss = plugins.current().build(recipe.loss)
        prepare_regions(self.model, recipe.compile, recipe.recompute)
        self.model.train()

    def forward(self) -> Tensor:
        train = self.recipe.train
        tokens = torch.randint(0, 200, (train.micro_batch, train.sequence_length))
        numbers = torch.arange(train.sequence_length).expand_as(tokens).contiguous()
        from intarsia.contracts import Batch

        batch = Batch(
            tokens,
            tokens.roll(-1, 1),
            numbers,
            torch.zeros_like(tokens, dtype=torch.int32),
            ((train.sequence_length,),) * train.micro_batch,
        )
        batch, context = prepare(batch, getattr(self.model, "predicts_ahead", 0), self.parallel, windows_of(self.model))
        return self.loss(self.model, self.model(batch.tokens_BS, context), batch).total

    def saved(self) -> int:
        """Bytes that forward and loss keep for backward, parameters apart."""
        # Gathered parameters lie in buffers of the sharder's.
        there = {each.untyped_storage()._cdata for each in [*self.model.parameters(), *self.model.buffers()]}
        kept: dict[int, Any] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in there and not isinstance(tensor, torch.nn.Parameter):
                kept[storage._cdata] = storage
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), logical.micro_batch(1.0):
            self.forward()
        whole = {each.untyped_storage()._cdata for each in self.model.parameters()}
        return sum(storage.nbytes() for key, storage in kept.items() if key not in whole)


@pytest.fixture(autouse=True)
def fresh() -> Any:
    """No ranks of a run that this process had before."""
    yield
    logical.reset()


# ---------------------------------------------------------------- bytes


@pytest.mark.parametrize(
    ("name", "ranks", "overrides"),
    [("llama3/debug", 1, ()), ("llama3/debug", 2, ()), ("llama3/debug", 2, ("mesh.tp=2",)), ("deepseek_v3/debug", 1, ())],
)
def test_parameters_gradients_and_optimizer_are_a_real_runs(name: str, ranks: int, overrides: tuple[str, ...]) -> None:
    recipe = recipe_of(name, "train.global_batch=2", *overrides)
    real = Real(recipe, ranks)
    held = planned(recipe, ranks).stages[0].flexshard.ranks[0]
    masters = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in real.sharded.parameters().values()}
    assert held.masters == sum(masters.values())
    with logical.micro_batch(1.0):
        real.forward().backward()
    real.sharded.finish_gradients()
    gradients = {each.grad.untyped_storage()._cdata: each.grad.untyped_storage().nbytes() for each in real.sharded.parameters().values()}
    assert held.gradients == sum(gradients.values())
    names = [name for name in real.table.names() if real.table[name].trainable]
    optimizer = plugins.current().build(
        recipe.optimizer, optimizer_groups(recipe.parameter_groups, real.sharded.parameters(), names), real.table, real.comm
    )
    state = sum(each.numel() * each.element_size() for slots in optimizer.slots().values() for each in slots.values())
    assert held.optimizer == state


@pytest.mark.parametrize(
    ("name", "ranks", "overrides"),
    [
        ("llama3/debug", 1, ()),
        ("llama3/debug", 1, ("precision.compute=bfloat16",)),
        ("llama3/debug", 2, ("mesh.tp=2",)),
        ("llama3/debug", 2, ("mesh.cp=2", "parallel=declared", "parallel.context=ring")),
        ("deepseek_v3/debug", 1, ()),
    ],
)
def test_activations_are_near_a_real_runs(name: str, ranks: int, overrides: tuple[str, ...]) -> None:
    recipe = recipe_of(name, "train.global_batch=2", "kernels.*=reference", *overrides)
    stage = planned(recipe, ranks).stages[0]
    pieces = [piece for traced in stage.traced for piece in traced.pieces]
    expected = sum(piece.traced.memory.kept * piece.count for piece in pieces)
    assert expected == pytest.approx(Real(recipe, ranks).saved(), rel=0.05)


def test_recomputed_blocks_keep_their_results_only() -> None:
    plain, again = (planned(recipe_of("llama3/debug", f"recompute.mode={mode}"), 1) for mode in ("none", "blocks"))
    first, second = (each.stages[0].traced[0].pieces[1].traced for each in (plain, again))
    assert second.memory.kept == 2 * 64 * 192 * 4, "the residual stream behind the block"
    assert second.backward.flops == pytest.approx(first.backward.flops + first.forward.flops)
    assert again.stages[0].held.peak < plain.stages[0].held.peak and again.step > plain.step
    assert again.flops == plain.flops, "MFU does not count recomputation"


def test_compiled_blocks_keep_less() -> None:
    plain, compiled = (planned(recipe_of("llama3/debug", f"compile.mode={mode}"), 1, "h200").stages[0] for mode in ("none", "local"))
    assert compiled.held.activations < 0.9 * plain.held.activations
    kept = compiled.traced[0].pieces[1].traced.memory.kept
    dim, hidden = 192, 512
    assert kept > 2 * 64 * (3 * hidden + 4 * dim) * 4, "what matrix products read is never computed again"


def test_the_peak_adds_up() -> None:
    held = planned(recipe_of("llama3/debug", "train.global_batch=8", "train.micro_batch=2"), 2).stages[0].held
    assert held.accumulated > 0 and held.optimizer is not None
    assert held.peak == held.parameters + held.optimizer + held.accumulated + held.buffers + held.activations + held.transient
    assert isinstance(held, Held) and held.moment


def test_stand_ins_keep_what_kernels_keep() -> None:
    q, k, v = (torch.randn(2, 32, heads, 16, requires_grad=True) for heads in (4, 4, 4))

    def kept(function: Any) -> int:
        found: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            found[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes() * (tensor.numel() > 1)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            function()
        return sum(found.values())

    def real() -> Tensor:
        return F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)

    meta = [each.detach().to("meta").requires_grad_() for each in (q, k, v)]
    assert kept(lambda: stand_ins.attention(*meta, scale=0.25)) == kept(real)


# ---------------------------------------------------------------- messages and work


@pytest.mark.parametrize(
    "overrides",
    [
        ("mesh.tp=2",),
        ("mesh.cp=2", "parallel=declared", "parallel.context=gather"),
        ("mesh.cp=2", "parallel=declared", "parallel.context=ring"),
    ],
)
def test_messages_are_a_real_runs(overrides: tuple[str, ...]) -> None:
    recipe = recipe_of("llama3/debug", "train.global_batch=2", "kernels.*=reference", *overrides)
    stage = planned(recipe, 2).stages[0]
    found = sum(size for (_, what), size in stage.wire.items() if not what.startswith(("FlexShard", "optimizer")))
    real = Real(recipe, 2)
    comm = real.groups.comm(overrides[0][5:7])
    before = {what: each.bytes for what, each in comm.stats().items()}
    with logical.micro_batch(1.0):
        real.forward().backward()
    moved = sum(each.bytes - before.get(what, 0) for what, each in comm.stats().items() if not what.startswith(("unshard", "reduce ")))
    assert found == pytest.approx(moved, rel=0.01) and found > 0


@pytest.mark.parametrize(
    ("name", "ranks", "overrides"),
    [
        ("llama3/debug", 2, ("mesh.tp=2", "optimizer.split.0.match=*.wq.weight", "optimizer.split.0.head_dim=32")),
        ("llama3/debug", 3, ("sharder.placement=flat", "precision.compute=bfloat16", "sharder.master=split")),
        ("llama3/debug", 4, ("mesh.tp=2", "sharder.placement=row", "parameter_groups.0.name=f", "parameter_groups.0.match=layers.1.*", "parameter_groups.0.frozen=true")),
        ("llama3/debug", 2, ("sharder.placement=owned",)),
        ("deepseek_v3/debug", 4, ("mesh.ep=2", "sharder.placement=row")),
    ],
)  # fmt: skip
def test_what_an_optimizer_exchanges_is_a_real_runs(name: str, ranks: int, overrides: tuple[str, ...]) -> None:
    recipe = recipe_of(name, "optimizer=muon", "train.global_batch=4", "kernels.*=reference", *overrides)
    wire = planned(recipe, ranks).stages[0].wire
    found = {axes: size for (axes, what), size in wire.items() if what == "optimizer exchange"}
    for rank, place in ((0, 0), (ranks - 1, -1)):
        real = Real(recipe, ranks, rank)
        parameters = {name: each for name, each in real.sharded.parameters().items() if real.table[name].trainable}
        groups = optimizer_groups(recipe.parameter_groups, parameters, parameters)
        optimizer = plugins.current().build(recipe.optimizer, groups, real.table, real.comm)
        for parameter in parameters.values():
            parameter.grad = torch.zeros_like(parameter, dtype=torch.float32)
        optimizer.step(1.0)
        facts = optimizer.facts()
        moved = sum(each.bytes for comm in real.groups._groups.values() for what, each in comm.stats().items() if what.startswith("Muon"))
        assert moved == facts["transfer_bytes"] == sum(sizes[place] for sizes in facts["transfers"].values())
        assert found == {axes: max(sizes) for axes, sizes in facts["transfers"].items() if max(sizes)}
    assert bool(found) == ("sharder.placement=owned" not in overrides)


def test_products_of_matrices_take_their_time() -> None:
    """Those of the rank that has most of them, by what the optimizer counts."""

    def update(ranks: int, *overrides: str) -> float:
        recipe = recipe_of("llama3/1b", "sharder.placement=owned", *overrides)
        return planned(recipe, ranks, "h200").stages[0].spent.update

    # A layer has matrices of 2048 x 2048 (two), 512 x 2048 (two) and 8192 x 2048 (three). A step of Newton-Schulz makes two symmetric products of the short side.
    five = 5 * 4 * 16 * (5 * 2048**3 + 2 * 512**3) / (0.95 * 760e12)
    for ranks in (1, 2):
        muon, more = (update(ranks, "optimizer=muon", f"optimizer.newton_schulz_steps={steps}") for steps in (5, 10))
        if ranks == 1:
            assert more - muon == pytest.approx(five, rel=0.01)
            assert muon - update(1, "optimizer=adamw") > 0.9 * five
        else:  # One rank has the embedding, and the other more of the matrices for it.
            assert 0.5 * five < more - muon < 0.7 * five


def test_an_exchange_is_waited_for() -> None:
    row, owned, none = (
        planned(recipe_of("llama3/debug", *overrides), 2, "h200").stages[0].spent.exposed
        for overrides in (("optimizer=muon",), ("optimizer=muon", "sharder.placement=owned"), ("optimizer=adamw",))
    )
    assert row > owned == pytest.approx(none, rel=0.05)


def test_a_kernel_that_this_machine_cannot_run_is_planned_with() -> None:
    named, chosen = (
        planned(recipe_of("llama3/debug", "optimizer=muon", f"optimizer.newton_schulz_kernel={kernel}"), 2, "h200").stages[0].held
        for kernel in ("symmetric_newton_schulz", "auto")
    )
    assert named.optimizer == chosen.optimizer and named.optimizer


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_fused_update_is_planned_with(optimizer: str) -> None:
    plan = planned(recipe_of("llama3/debug", f"optimizer={optimizer}", "optimizer.implementation=fused"), 2, "h200")
    assert plan.stages[0].held.optimizer


def test_flops_of_traced_work_are_the_models() -> None:
    plan = planned(recipe_of("llama3/debug", "train.global_batch=2", "train.sequence_length=256"), 1, "h200")
    # Attention's backward computes its scores again, which counts do not have.
    assert plan.stages[0].flops == pytest.approx(plan.flops, rel=0.06)


def test_rates() -> None:
    h200 = find("h200")
    large = 2 * 8192 * 14336 * 4096 / rates.product(h200, 8192, 14336, 4096, "bfloat16")
    assert 0.65e15 < large < 0.78e15 and large > 1.5 * (2 * 300**3 / rates.product(h200, 300, 300, 300, "bfloat16"))
    near, far = (Message("gather_v", axes, 8, 1 << 30, "") for axes in ("tp", "dp_shard"))
    spans = spans_of({"pp": 1, "dp_replicate": 1, "dp_shard": 8, "cp": 1, "tp": 8, "ep": 1, "ep_shard": 64})
    assert spans["tp"] == 8 and spans["dp_shard"] == 64 and spans["dp_shard+tp"] == 64
    assert rates.messages(h200, [near], spans, False) < rates.messages(h200, [far], spans, False)
    work = Work(moved=41 * 10**9, launches=1)
    assert rates.compute(h200, work, "bfloat16", False) == pytest.approx(0.01)
    assert rates.compute(h200, work, "bfloat16", True) == pytest.approx(0.01 * rates.FUSED)
    assert find("b200").product > 2 * h200.product and all(
        "nothing is measured" in DEVICES[name].measured for name in ("h100", "b200", "gb300")
    )


def test_memory_that_is_given_back_is_seen() -> None:
    _, log = world(0, {"pp": 1, "dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1, "ep": 1})
    x = torch.empty(1024, device="meta")
    with Watch(log, [x]) as watch:
        y = x + x
        z = y * y
        del y
        assert watch.live == 4096 and watch.peak == 8192
        del z
        assert watch.live == 0
    assert watch.work.moved == 4 * 4096 and watch.work.launches == 2


# ---------------------------------------------------------------- pipelines


def test_a_pipelines_stages_add_up_and_wait() -> None:
    overrides = ("mesh.pp=2", "engine=pipeline", "train.global_batch=8", "train.micro_batch=1")
    plan = planned(recipe_of("llama3/debug", *overrides), 2)
    assert sum(each.elements for each in plan.stages) == plan.elements and len(plan.stages) == 2
    assert plan.schedule == "1f1b" and 0 < plan.bubble < 0.3
    first, last = plan.stages
    assert first.held.activations > 1.7 * last.held.activations, "1F1B keeps two micro-batches on the first rank"
    assert first.wire["pp", "receive"] == 8 * 64 * 192 * 4
    # Both end when the schedule does.
    assert first.spent.compute + first.spent.bubble == pytest.approx(last.spent.compute + last.spent.bubble, rel=0.01)


@pytest.mark.timeout(900)  # some ten seconds: what plans each of the ranks apart, or allocates what it plans, would take hours
def test_deepseek_v3_on_2048_ranks() -> None:
    plan = planned(resolve("deepseek_v3/671b", ["mesh.pp=16", "engine=pipeline", "mesh.ep=64"]).recipe, 2048, "h200")
    assert abs((plan.elements - plan.ahead) / 671e9 - 1) < 0.01 and plan.devices == 2048 and len(plan.stages) == 16
    assert plan.fits == (plan.fullest.held.peak <= find("h200").usable)
    assert any(axes == "ep" for stage in plan.stages for axes, _ in stage.wire)


# ---------------------------------------------------------------- the command


def test_the_command_prints_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "llama3/debug", "--gpus", "2", "--device", "h200", "mesh.tp=2"]) == 0
    text = capsys.readouterr().out
    for words in (
        "2 ranks, NVIDIA H200 (tp 2): 1.84 M parameters",
        "fits: ",
        "predicted step: ",
        "MFU",
        "gather_v over tp",
        "activations that wait",
        "FlexShard",
        "layers.0 ",
    ):
        assert words in text, words


def test_the_commands_json_has_every_stage(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            [
                "plan",
                "llama3/debug",
                "--gpus",
                "4",
                "--device",
                "cpu",
                "--json",
                "mesh.pp=2",
                "engine=pipeline",
                "train.global_batch=32",
                "train.micro_batch=2",
            ]
        )
        == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert found["processes"] == 4 and len(found["stages"]) == 2 and found["fits"] is True
    assert found["peak_memory_bytes"] == max(stage["bytes"]["peak"] for stage in found["stages"])
    assert all(len(stage["flexshard"]["ranks"]) == 2 and stage["pieces"] for stage in found["stages"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device", "h20"], "Did you mean 'h200'"),
        (["--gpus", "0"], "--gpus is 0"),
        (["mesh.dp_replicate=3", "--gpus", "4"], "cannot be shared out"),
        (["mesh.tp=5", "--gpus", "5"], "tp=5 does not divide"),
        (["mesh.pp=2", "--gpus", "2"], "the engine is `eager`, which runs whole models. Choose engine=pipeline"),
        (["sharder=whole"], "counts the buckets of FlexShard"),
        (["sharder.reshard=alwys"], "Did you mean 'always'"),
        (["optimizer=muon", "optimizer.adjust=spectra"], "Did you mean 'spectral'"),
        (["optimizer=muon", "optimizer.split.0.match=layer.0.*", "optimizer.split.0.blocks=2"], "no matrix that Muon updates is called so"),
        (["optimizer=adamw", "optimizer.implementation=fast"], "optimizer.implementation 'fast' is unknown"),
    ],
)
def test_what_cannot_be_planned_is_said_in_words(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "llama3/debug", *arguments]) == UsageError.exit_code
    assert words in capsys.readouterr().err


def test_a_loss_that_learns_from_no_documents_is_refused_with_what_can_be_planned(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["arithmetic/debug"], ["llama3/debug", "loss=dpo"]):
        assert main(["plan", *arguments]) == UsageError.exit_code
        assert "give them loss=cross_entropy" in capsys.readouterr().err
    assert main(["plan", "arithmetic/debug", "loss=cross_entropy"]) == 0


def test_the_number_of_processes_follows_from_the_mesh() -> None:
    recipe = resolve("llama3/debug", []).recipe
    assert processes(recipe, None) == 8 and processes(recipe, 5) == 5
    assert processes(resolve("llama3/debug", ["mesh.dp_replicate=2", "mesh.tp=2"]).recipe, None) == 32


def test_predictions_are_held_against_what_was_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(__file__).parents[2] / "benchmarks" / "plan_predictions.py"
    spec = importlib.util.spec_from_file_location("plan_predictions", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path[:] = before
    wanted = {"peak_memory_bytes": 0.05, "step_s": 0.15}
    predictions, measured = tmp_path / "p.json", tmp_path / "m.json"
    predictions.write_text(json.dumps({"wanted": wanted, "runs": {"dp2": {"predicted": {"step_s": 1.0, "peak_memory_bytes": 100}}}}))
    run = {"step_s": 1.1, "peak_memory_bytes": 104, "tokens_per_s": 1.0, "mfu": 0.5, "steps_s": [1.1, 1.1]}
    measured.write_text(json.dumps({"variants": {"dp2": run}}))
    assert module.compare(predictions, measured) == 0
    assert json.loads(predictions.read_text())["runs"]["dp2"]["ratio"] == pytest.approx({"peak_memory_bytes": 100 / 104, "step_s": 1 / 1.1})
    measured.write_text(json.dumps({"variants": {"dp2": run | {"peak_memory_bytes": 106}}}))
    assert module.compare(predictions, measured) == 1 and "too far" in capsys.readouterr().out
    measured.write_text(json.dumps({"variants": {"dp2": {"error": "did not end"}}}))
    assert module.compare(predictions, measured) == 1 and "not measured (did not end)" in capsys.readouterr().out
