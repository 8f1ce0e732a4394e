"""The plan of buckets says what the runtime then does: its numbers are compared with the buffers, counts and collectives of a sharded model whose other ranks are not there."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from typing import Any

import pytest
import torch
from intarsia import plugins
from intarsia.comm import FakeCommunicator
from intarsia.config import Recipe, resolve
from intarsia.mesh import Mesh, check_mesh
from intarsia.parameters import ParameterTable
from intarsia.train.groups import freeze
from intarsia_eager.context import TrainContext
from intarsia_flexshard import runtime
from intarsia_flexshard.accounting import BucketBytes, Slots, count_gathers
from intarsia_flexshard.lanes import Lanes
from intarsia_flexshard.planning import Plan, make_plan, optimizer_slots
from intarsia_flexshard.report import as_json, count_text, lines, size_text

ROWS, TOKENS = 2, 8


def recipe_of(*overrides: str) -> Recipe:
    return resolve("llama3/debug", list(overrides)).recipe


def plan_of(recipe: Recipe, world: int) -> Plan:
    return make_plan(recipe, check_mesh(recipe.mesh, world), plugins.current())


def sharded(recipe: Recipe, rank: int, world: int) -> tuple[Any, Any]:
    """The model as rank `rank` of `world` has it."""
    with torch.device("meta"):
        model = plugins.current().build(recipe.model)
    freeze(recipe.parameter_groups, model)
    precision = recipe.precision
    table = ParameterTable.from_model(model, precision.master, precision.compute, precision.reduce)
    comm = FakeCommunicator(rank, world)
    return model, plugins.current().build(recipe.sharder).shard(model, table, Mesh(check_mesh(recipe.mesh, world), comm), comm)


CASES = {
    "row": (),
    "flat": ("sharder.placement=flat",),
    "owned": ("sharder.placement=owned", "sharder.owners=newton_schulz"),
    "half": ("sharder.placement=flat", "precision.compute=bfloat16"),
    "rows of half": ("precision.compute=bfloat16", "precision.reduce=bfloat16"),
    "replicate": ("sharder.placement=replicate",),
    "never": ("sharder.reshard=never", "sharder.placement=block"),
    "after": ("sharder.reshard=after 2", "sharder.prefetch=2", "sharder.placement=flat"),
    "split": ("sharder.master=split", "precision.compute=bfloat16", "sharder.placement=flat"),
    "frozen": ("sharder.placement=flat", "parameter_groups.0.name=f", "parameter_groups.0.match=*.wq.*", "parameter_groups.0.frozen=true"),
    # The last bucket is one large matrix, which is sent without being packed, and the others' gradients fit where it was.
    "lent": (
        *("sharder.placement=flat", "sharder.buckets.0.name=last", "sharder.buckets.0.match=layers.3.feed_forward.w2"),
        *("parameter_groups.0.name=f", "parameter_groups.0.frozen=true"),
        "parameter_groups.0.match=tok*,norm*,layers.[012].*,layers.3.att*,layers.3.feed_forward.w[13]*",
    ),
    "replicas": ("mesh.dp_replicate=2", "sharder.placement=flat"),
    "float8": ("sharder.payload=fp8", "precision.compute=bfloat16", "sharder.placement=flat"),
    "float8 in small tiles, by owners": (
        *("sharder.payload=fp8", "precision.compute=bfloat16", "sharder.placement=owned", "sharder.tile=(16,32)", "sharder.master=split"),
    ),
    "float8 in blocks, kept": ("sharder.payload=fp8", "sharder.placement=block", "sharder.reshard=never"),
    "the host's halves": ("sharder.master=split", "precision.compute=bfloat16", "sharder.placement=row", "sharder.offload=low"),
    "the host's shards": ("sharder.offload=cpu", "sharder.placement=flat", "sharder.reshard=after 3"),
    "mixed": ("sharder.placement=mixed", "sharder.payload=fp8", "precision.compute=bfloat16"),
    "a bucket that stays": (
        *("sharder.placement=flat", "sharder.buckets.0.name=kept", "sharder.buckets.0.match=layers.1.attention"),
        *("sharder.buckets.0.reshard=never", "sharder.buckets.0.payload=fp8", "precision.compute=bfloat16"),
    ),
}


class OnDevice(Lanes):
    """What memory is laid out for on a device, without one."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.on_device = True

    def event(self) -> None:
        """None."""


def sent_by(bucket: Any) -> torch.Tensor | None:
    """What a bucket's shard is brought into before it is gathered."""
    return bucket.payload._wire if bucket.spec.payload == "fp8" else bucket.payload._cast


def packs_of(found: Any) -> list[Any]:
    return [bucket.reduction.pack for bucket in found.buckets if bucket.reduction]


@pytest.mark.parametrize("overrides", CASES.values(), ids=CASES)
@pytest.mark.parametrize(("world", "on_device"), [(2, True), (4, False)])
def test_the_plan_is_what_the_runtime_allocates(
    overrides: tuple[str, ...], world: int, on_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if on_device:
        monkeypatch.setattr(runtime, "Lanes", OnDevice)
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
        with torch.device("meta"):  # What this context changes is looked up once in a process: not while `empty` is another one.
            empty = torch.empty
            empty(0)
        monkeypatch.setattr(torch, "empty", lambda *sizes, pin_memory=False, **how: empty(*sizes, **how))
    recipe = recipe_of(*overrides)
    plan = make_plan(recipe, check_mesh(recipe.mesh, world), plugins.current(), on_device)
    for rank in range(world):
        model, found = sharded(recipe, rank, world)
        masters = sum(bucket.shard.nbytes + (bucket.low.nbytes if bucket.low is not None else 0) for bucket in found.buckets)
        low = sum(bucket.low.nbytes for bucket in found.buckets if bucket.halves is not None)
        slots = {id(bucket.slot): bucket.slot for bucket in found.buckets if bucket.slot is not None}
        staged = {id(slot.staging): slot.staging.nbytes for slot in slots.values()}
        whole = sum(slot.buffer.nbytes for slot in slots.values()) + sum(staged.values())
        planned = plan.ranks[rank]
        assert planned.away == low and (low > 0) == ("sharder.offload=low" in overrides)
        assert (planned.host >= masters and planned.masters == 0) if "sharder.offload=cpu" in overrides else planned.masters == masters
        assert planned.whole == whole
        sent = sum(tensor.nbytes for bucket in found.buckets if (tensor := sent_by(bucket)) is not None)
        assert planned.cast == sent
        packs = {
            pack.buffer.untyped_storage()._cdata: pack.buffer.untyped_storage().nbytes() for pack in packs_of(found) if pack.slot is None
        }
        assert plan.ranks[rank].pack == sum(packs.values())
        assert (overrides == CASES["lent"]) == (not packs)
        for planned, bucket in zip(plan.buckets, found.buckets, strict=True):
            place = bucket.groups.gather.rank if bucket.is_cut else 0
            assert (planned.spec.name, planned.is_cut, planned.is_alias) == (bucket.name, bucket.is_cut, bucket.is_alias)
            assert planned.counts == bucket.geometry.counts
            assert planned.pack == (bucket.reduction.pack_bytes(bucket.compute_dtype)[0] if bucket.reduction else 0)
            if bucket.reduction:
                assert planned.received[place] == bucket.reduction.pack_bytes(bucket.compute_dtype)[1]
            if bucket.gather is not None:
                assert planned.gather[place] == bucket.gather.bytes
        del model


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize(
    "overrides", [*list(CASES.values())[:2], CASES["never"], CASES["after"], ("sharder.prefetch=0",), CASES["half"]], ids=str
)
def test_the_plan_counts_gathers_and_reductions_as_they_happen(overrides: tuple[str, ...], micro_batches: int) -> None:
    recipe = recipe_of(*overrides, "train.micro_batch=2", f"train.global_batch={4 * micro_batches}")
    plan = make_plan(recipe, check_mesh(recipe.mesh, 2), plugins.current(), on_device=False)
    assert plan.settings.micro_batches == micro_batches
    model, found = sharded(recipe, 0, 2)
    context = TrainContext(torch.arange(TOKENS).expand(ROWS, TOKENS), None, ((TOKENS,),) * ROWS)
    optimizer = Nothing()
    counts = []
    for _ in range(3):
        for number in range(micro_batches):
            found.set_last_micro_batch(number == micro_batches - 1)
            model(torch.zeros(ROWS, TOKENS, dtype=torch.int64), context).sum().backward()
        found.finish_gradients()
        found.update(optimizer, 1.0)
        found.zero_gradients()
        counts.append([calls(bucket.groups.gather, f"unshard {bucket.name}") for bucket in found.buckets])
    assert [last - before for last, before in zip(counts[2], counts[1], strict=True)] == list(plan.gathers)
    for planned, bucket in zip(plan.buckets, found.buckets, strict=True):
        statistic = bucket.groups.reduce.stats()[f"reduce {bucket.name}"]
        assert statistic.calls == 3 * plan.reductions
        assert statistic.bytes == 3 * planned.reduce[0]
    if plan.settings.is_accumulating:
        packs = {id(pack): pack.buffer.nbytes + pack.scratch.nbytes for pack in packs_of(found)}
        assert plan.ranks[0].pack == sum(packs.values())


class Nothing:
    """An optimizer that updates nothing."""

    updates_split_masters = True

    def step(self, factor: Any, names: Any = None) -> None:
        """Nothing."""


def calls(comm: Any, what: str) -> int:
    statistic = comm.stats().get(what)
    return statistic.calls if statistic else 0


# ---------------------------------------------------------------- numbers that are known by themselves


def test_sums_over_ranks_are_the_models() -> None:
    plan = plan_of(recipe_of("sharder.placement=flat", "precision.compute=bfloat16"), 8)
    assert sum(rank.masters for rank in plan.ranks) == pytest.approx(4 * plan.elements, rel=1e-3)
    assert sum(sum(bucket.held) for bucket in plan.buckets) == plan.elements == plan.trained
    assert all(sum(bucket.counts) >= bucket.elements for bucket in plan.buckets)
    received = sum(rank.reduce for rank in plan.ranks)
    assert received == pytest.approx(7 * 2 * plan.elements, rel=1e-3), "each rank receives seven others' bfloat16 parts of its shard"


def test_owned_buckets_even_out_over_each_other() -> None:
    plan = plan_of(recipe_of("sharder.placement=owned"), 8)
    layers = [bucket for bucket in plan.buckets if not bucket.spec.is_root]
    assert max(bucket.imbalance for bucket in layers) > 1.2, "a block has too few matrices to be even"
    loads = [sum(bucket.held[rank] for bucket in layers) for rank in range(8)]
    assert max(loads) / (sum(loads) / 8) < 1.2, "blocks make up for each other"


def test_offloaded_state_is_the_hosts() -> None:
    plan, plain = (plan_of(recipe_of(f"sharder.offload={where}"), 4) for where in ("cpu", "none"))
    for rank, other in zip(plan.ranks, plain.ranks, strict=True):
        assert (rank.masters, rank.gradients, rank.optimizer) == (0, 0, 0)
        assert rank.host == other.masters + other.gradients + (other.optimizer or 0) and rank.cast > 0 == other.cast
        assert rank.device < other.device


def test_accumulated_gradients_wait_whole_or_sharded() -> None:
    many = ("train.micro_batch=2", "train.global_batch=32", "precision.compute=bfloat16")
    whole, cut = (plan_of(recipe_of(*many, f"sharder.gradients={kind}"), 4) for kind in ("whole", "sharded"))
    assert whole.settings.micro_batches == cut.settings.micro_batches == 4
    assert (whole.ranks[0].accumulated, cut.ranks[0].accumulated) == (4 * whole.elements, 0)
    assert (whole.reductions, cut.reductions) == (1, 4)
    assert whole.ranks[0].reduce * 2 == cut.ranks[0].reduce, "once in float32, or four times in bfloat16"


def test_fp8_payloads_are_half_of_bfloat16_and_their_scales() -> None:
    plain, fp8 = (
        plan_of(recipe_of("precision.compute=bfloat16", "sharder.placement=flat", f"sharder.payload={payload}"), 2)
        for payload in ("plain", "fp8")
    )
    for before, after in zip(plain.buckets, fp8.buckets, strict=True):
        assert 0.5 <= sum(after.gather) / sum(before.gather) <= 0.51
        whole = "root" if after.spec.is_root else "read as float8"
        assert after.whole == pytest.approx({"root": 1.0, "read as float8": 0.51}[whole] * before.whole, rel=0.02), (
            "losses read the head as it is"
        )
        assert sum(after.reduce) == sum(before.reduce), "gradients travel as they are"


def test_gathers_by_hand() -> None:
    bucket: Any = BucketBytes
    three = [bucket] * 3
    assert count_gathers(three, [(0, 0), (0, 1), (0, 0)], 1, [False] * 3) == [2, 1, 1], "the last two are still there"
    assert count_gathers(three, [(0, 0), (0, 0), (0, 0)], 2, [False] * 3) == [3, 4, 2]
    assert count_gathers(three, [(0, 0), (0, 0), None], 1, [True, False, False]) == [1, 1, 0], "backward of an embedding reads nothing"


def test_optimizer_state_is_known_by_parameter_or_said_to_be_unknown() -> None:
    recipe = recipe_of("optimizer=adamw")
    with torch.device("meta"):
        model = plugins.current().build(recipe.model)
    table = ParameterTable.from_model(model)
    slots, words = optimizer_slots(recipe, model, table, plugins.current())
    assert slots is not None and words == "exp_avg float32, exp_avg_sq float32"
    assert {each.element for each in slots.values()} == {8}
    assert all(table[name].layout is None for name in table), "the probe leaves no trace"
    plan = plan_of(recipe, 2)
    assert plan.ranks[0].optimizer == pytest.approx(8 * plan.elements / 2, rel=0.01)
    assert Slots(8.0).parameter == 0

    class Refusing:
        def __getattr__(self, name: str) -> Any:
            return getattr(plugins.current(), name)

        def build(self, config: Any, *arguments: Any) -> Any:
            if config is recipe.optimizer:
                raise RuntimeError("needs the run\nand more")
            return plugins.current().build(config, *arguments)

    unknown = make_plan(recipe, check_mesh(recipe.mesh, 2), Refusing())  # type: ignore[arg-type]
    assert unknown.ranks[0].optimizer is None and unknown.settings.slots is None
    assert unknown.optimizer == "unknown, since the optimizer cannot be built without the run (RuntimeError: needs the run)"


# ---------------------------------------------------------------- in words and as JSON


def test_the_plan_in_words() -> None:
    plan = plan_of(recipe_of("sharder.placement=flat"), 2)
    text = "\n".join(lines(plan))
    assert text.startswith("llama3-debug on 2 processes (dp_shard 2): 1.84 M parameters, 5 buckets, 1 micro-batch a step")
    for words in ("masters", "optimizer state", "whole parameters", "together", "gathers", "flat(unit=64)", "root", "layers.2-3"):
        assert words in text
    assert "layers.3 " in "\n".join(lines(plan_of(recipe_of(), 2), True))


def test_the_json_has_every_rank_and_bucket() -> None:
    found = json.loads(json.dumps(as_json(plan_of(recipe_of(), 3))))
    assert len(found["ranks"]) == found["processes"] == 3 and len(found["buckets"]) == 5
    assert [bucket["name"] for bucket in found["buckets"]] == ["root", *(f"layers.{layer}" for layer in range(4))]
    for bucket in found["buckets"]:
        assert len(bucket["masters_bytes"]) == 3 and sum(bucket["held"]) == bucket["elements"]
    assert found["ranks"][0]["masters"] == sum(bucket["masters_bytes"][0] for bucket in found["buckets"])
    assert found["optimizer"]["known"] is True


def test_buckets_of_ones_own_are_planned() -> None:
    settings = ("sharder.buckets.0.name=attention", "sharder.buckets.0.match=*.attention", "sharder.buckets.0.placement=owned")
    found = {bucket["name"]: bucket for bucket in as_json(plan_of(recipe_of(*settings), 2))["buckets"]}
    assert found["attention"]["placement"] == "owned" and len(found["attention"]["modules"]) == 4
    assert found["layers.0"]["modules"] == ["layers.0"]


def test_numbers_have_units() -> None:
    assert [size_text(size) for size in (0, 1023, 1536, 3 << 30, 5 << 50)] == ["0 B", "1023 B", "1.50 KiB", "3.00 GiB", "5120.00 TiB"]
    assert [count_text(count) for count in (7, 1500, 8_030_000_000)] == ["7", "1.50 K", "8.03 B"]


@pytest.mark.timeout(240)  # a second or two: what builds the model, or plans each process apart, would take minutes
def test_eight_billion_parameters_on_sixty_four_processes_take_seconds() -> None:
    recipe = resolve("llama3/8b", []).recipe
    plan = plan_of(recipe, 64)
    assert len(plan.ranks) == 64
    assert math.isclose(sum(rank.masters for rank in plan.ranks), 4 * plan.elements, rel_tol=1e-3)


def test_assignment_and_arithmetic_import_no_torch() -> None:
    code = (
        "import sys, intarsia_flexshard.accounting, intarsia_flexshard.assign, intarsia_flexshard.report; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_heads_bucket_is_driven_by_the_model_since_losses_read_it() -> None:
    recipe = recipe_of("sharder.buckets.0.name=head", "sharder.buckets.0.match=head", "sharder.placement=flat")
    planned = {bucket.spec.name: bucket.spec for bucket in plan_of(recipe, 2).buckets}
    built = {bucket.name: bucket.spec for bucket in sharded(recipe, 0, 2)[1].buckets}
    assert planned["head"].modules == built["head"].modules == ("",) and built["head"].is_root
