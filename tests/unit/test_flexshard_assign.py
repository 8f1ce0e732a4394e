"""Which bucket each parameter is in: what claims what, what drives what, in which order, and every refusal in words.

Numbers in brackets are those of the scenarios that are held in these terms.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from intarsia.contracts import Member, Partition
from intarsia.errors import PluginError, UsageError
from intarsia.layout import Box, Layout, region_numel, whole_region
from intarsia_flexshard.assign import BucketSpec, assign, check_settings, is_match, member_of, newton_schulz_cost, parse_reshard
from intarsia_flexshard.config import BucketConfig, FlexShardConfig
from intarsia_flexshard.plan import make_geometry
from intarsia_placements import block, mixed, owned, row
from intarsia_placements.config import Block, Mixed, MixedRule, Owned, Row
from intarsia_placements.layouts import build_layouts


@dataclasses.dataclass
class Info:
    name: str
    shape: tuple[int, ...] = (4, 4)
    dtype: str = "float32"
    trainable: bool = True
    aliases: tuple[str, ...] = ()
    block: str = ""


def transformer(layers: int = 2) -> list[Info]:
    names = ("attn.weight", "attn.bias", "ffn.experts.0.weight", "ffn.experts.1.weight")
    found = [Info("embedding.weight", (10, 4))]
    found += [Info(f"layers.{layer}.{name}", block=f"layers.{layer}") for layer in range(layers) for name in names]
    return [*found, Info("norm.weight", (4,)), Info("head.weight", (10, 4))]


BLOCKS = ("layers.0", "layers.1")


def config(*buckets: tuple[str, tuple[str, ...]] | BucketConfig, **settings: Any) -> FlexShardConfig:
    made = [bucket if isinstance(bucket, BucketConfig) else BucketConfig(name=bucket[0], match=bucket[1]) for bucket in buckets]
    return FlexShardConfig(buckets=tuple(made), **settings)


def members(specs: list[BucketSpec]) -> dict[str, list[str]]:
    return {spec.name: [info.name for info in spec.infos] for spec in specs}


def drivers(specs: list[BucketSpec]) -> dict[str, tuple[str, ...]]:
    return {spec.name: spec.modules for spec in specs}


# ---------------------------------------------------------------- what claims what


def test_two_buckets_get_their_parameters_in_model_order() -> None:
    """[1]"""
    infos = [Info(name) for name in ("attn.weight", "attn.bias", "ffn.weight", "ffn.bias")]
    specs = assign(config(("second", ("ffn.*",)), ("first", ("attn.*",))), infos, ())
    assert members(specs) == {"first": ["attn.weight", "attn.bias"], "second": ["ffn.weight", "ffn.bias"]}


def test_what_no_bucket_claims_is_in_a_default_bucket() -> None:
    """[2] Nothing is left out: there it is an error, here the default buckets have it."""
    specs = assign(config(("attention", ("*.attn.*",))), transformer(), BLOCKS)
    assert list(members(specs)) == ["root", "attention", "layers.0", "layers.1"]
    claimed = [name for names in members(specs).values() for name in names]
    assert sorted(claimed) == sorted(info.name for info in transformer())
    assert members(specs)["root"] == ["embedding.weight", "norm.weight", "head.weight"]
    assert assign(FlexShardConfig(), [], ()) == []


def test_a_parameter_that_two_buckets_claim_names_both_and_their_globs() -> None:
    """[3]"""
    with pytest.raises(UsageError) as caught:
        assign(config(("attention", ("layers.0.attn", "nor*")), ("all", ("*",))), transformer(), BLOCKS)
    text = str(caught.value)
    assert "'layers.0.attn.weight' by 'attention' ('layers.0.attn') and by 'all' ('*')" in text
    assert "'norm.weight' by 'attention' ('nor*') and by 'all' ('*')" in text and "narrow one of the globs" in text
    with pytest.raises(UsageError, match=r"and \d+ more\. Every parameter"):
        assign(config(("all", ("*",)), ("again", ("*",))), transformer(), BLOCKS)
    # Two globs of one bucket may meet.
    assert members(assign(config(("all", ("*", "layers.0"))), transformer(), BLOCKS))["all"]


def test_globs_that_match_nothing_and_names_that_clash() -> None:
    """[4] A name that is missing, and one too many."""
    with pytest.raises(UsageError, match=r"Bucket 'a': 'layers.0.atn' matches no parameter of the model. Did you mean 'layers.0.attn'"):
        assign(config(("a", ("layers.0.atn",))), transformer(), BLOCKS)
    with pytest.raises(UsageError, match=r"Bucket 'a' is empty: its `match` names no glob"):
        assign(config(("a", ())), transformer(), BLOCKS)
    with pytest.raises(UsageError, match="the name 'a' is taken: there are two of it"):
        assign(config(("a", ("norm",)), ("a", ("head",))), transformer(), BLOCKS)
    with pytest.raises(UsageError, match="the name 'root' is taken: what no bucket claims there"):
        assign(config(("root", ("norm",))), transformer(), BLOCKS)
    with pytest.raises(UsageError, match="empty name"):
        assign(config(("", ("norm",))), transformer(), BLOCKS)
    assert "root" in members(assign(config(("root", ("norm", "head", "embedding"))), transformer(), BLOCKS))


def test_a_modules_name_takes_its_subtree_and_no_neighbour() -> None:
    assert is_match("layers.1", "layers.1.attn.weight") and is_match("layers.*", "layers.1.attn.weight")
    assert not is_match("layers.1", "layers.10.attn.weight") and not is_match("layers.1", "layers.1x")
    assert is_match("*.attn", "layers.1.attn.weight") and is_match("norm.weight", "norm.weight")


def test_ties_stay_together() -> None:
    tied = [Info("embedding.weight", aliases=("head.weight",)), Info("layers.0.w", block="layers.0"), Info("norm.weight")]
    specs = assign(config(("vocabulary", ("head",))), tied, ("layers.0",))
    assert members(specs)["vocabulary"] == ["embedding.weight"], "whoever claims one of the names has it"
    assert drivers(specs)["vocabulary"] == ("embedding", "head"), "and both modules need it"
    with pytest.raises(UsageError, match=r"'embedding.weight' \(tied to 'head.weight'\) by 'a' \('embedding'\) and by 'b' \('head'\)"):
        assign(config(("a", ("embedding",)), ("b", ("head",))), tied, ("layers.0",))


def test_a_bucket_has_one_dtype() -> None:
    """[6] Both dtypes are named, with a parameter of each."""
    infos = [Info("a"), Info("b", dtype="bfloat16")]
    with pytest.raises(UsageError, match=r"Bucket 'root' mixes dtypes: 'a' is float32 and 'b' is bfloat16"):
        assign(FlexShardConfig(), infos, ())
    specs = assign(config(("half", ("b",))), infos, (), compute="bfloat16")
    assert {spec.name: (spec.compute, spec.reduce) for spec in specs} == {"root": ("bfloat16", "float32"), "half": ("bfloat16", "bfloat16")}


# ---------------------------------------------------------------- what drives what, and when


def test_default_buckets_are_driven_by_their_block_and_the_root_by_the_model() -> None:
    specs = assign(FlexShardConfig(reshard="after 3"), transformer(), BLOCKS)
    assert drivers(specs) == {"root": ("",), "layers.0": ("layers.0",), "layers.1": ("layers.1",)}
    assert [(spec.reshard, spec.keep, spec.is_root) for spec in specs] == [("never", 0, True), ("after", 3, False), ("after", 3, False)]


def test_a_bucket_is_driven_by_the_deepest_module_in_each_block() -> None:
    specs = assign(
        config(("experts", ("*.experts.*",)), ("one", ("layers.0.attn.bias",)), ("ends", ("embedding", "head"))), transformer(), BLOCKS
    )
    assert drivers(specs)["experts"] == ("layers.0.ffn.experts", "layers.1.ffn.experts")
    assert drivers(specs)["one"] == ("layers.0.attn",)
    assert drivers(specs)["ends"] == ("embedding", "head")
    both = assign(config(("both", ("layers.0",))), transformer(), BLOCKS)
    assert drivers(both)["both"] == ("layers.0",)


def test_containers_drive_nothing() -> None:
    # Neither the model nor a block has to be named.
    running = ["layers.0", "layers.0.ffn", "layers.0.ffn.experts.0", "embedding"]
    specs = assign(config(("experts", ("*.experts.*",)), ("ends", ("embedding", "head"))), transformer(), BLOCKS, running)
    assert drivers(specs)["experts"] == ("layers.0.ffn", "layers.1")
    assert drivers(specs)["ends"] == ("",), "the head has no forward of its own, so that the model has to"
    first = assign(config(("first", ("layers.0.ffn.experts.0",))), transformer(), BLOCKS, running)
    assert drivers(first)["first"] == ("layers.0.ffn.experts.0",)


def test_what_is_read_outside_of_its_module_is_driven_by_the_model() -> None:
    specs = assign(config(("head", ("head",)), ("start", ("embedding",))), transformer(), BLOCKS, outside=("head.weight",))
    assert [spec.name for spec in specs] == ["root", "head", "start", "layers.0", "layers.1"], "what the model drives comes first"
    found = {spec.name: spec for spec in specs}
    assert found["head"].modules == ("",) and found["head"].reshard == "never" and found["start"].modules == ("embedding",)
    tied = [Info("embedding.weight", aliases=("head.weight",))]
    assert assign(config(("v", ("*",))), tied, (), outside=("head.weight",))[0].modules == ("",)


def test_a_module_inside_another_driver_adds_nothing() -> None:
    infos = [Info("vision.scale"), Info("vision.tower.weight"), Info("norm.weight")]
    assert drivers(assign(config(("vision", ("vision",))), infos, ()))["vision"] == ("vision",)


def test_buckets_are_in_execution_order() -> None:
    shuffled = config(
        ("norm", ("norm",)), ("second", ("layers.1.attn",)), ("start", ("embedding",)), ("first", ("layers.0.ffn",)), ("head", ("head",))
    )
    # Blocks run as they are declared, wherever the model lists them.
    infos = transformer()
    backwards = [infos[0], *infos[5:9], *infos[1:5], *infos[9:]]
    for given in (infos, backwards):
        names = [spec.name for spec in assign(shuffled, given, BLOCKS)]
        assert [name for name in names if name != "layers.0"] == ["start", "first", "second", "layers.1", "norm", "head"]
        assert names.index("layers.0") in (1, 2)


# ---------------------------------------------------------------- settings


def test_a_buckets_settings_stand_in_for_the_sharders() -> None:
    own = BucketConfig(
        name="own",
        match=("layers.0.attn",),
        placement=Owned(),
        axes=("dp_shard", "cp"),
        compute="float16",
        reduce="bfloat16",
        reshard="never",
        offload="cpu",
        reduce_op="average",
        divisor=3.0,
        prefetch=4,
        payload="fp8",
    )
    specs = {spec.name: spec for spec in assign(config(own, offload="none", prefetch=2), transformer(), BLOCKS)}
    found, other = specs["own"], specs["layers.0"]
    assert (found.placement, found.axes, found.replicas) == (Owned(), ("dp_shard", "cp"), ("dp_replicate",))
    assert (found.compute, found.reduce, found.reshard, found.keep) == ("float16", "bfloat16", "never", 0)
    assert (found.offload, found.reduce_op, found.divisor, found.prefetch, found.payload) == ("cpu", "average", 3.0, 4, "fp8")
    assert (other.placement, other.offload, other.reduce_op, other.divisor, other.prefetch) == (Row(), "none", "sum", None, 2)
    assert (other.reshard, other.keep, other.compute) == ("always", 1, "float32")


def test_an_averages_divisor_is_not_a_sums() -> None:
    summed = BucketConfig(name="summed", match=("norm",), reduce_op="sum")
    specs = {spec.name: spec for spec in assign(config(summed, reduce_op="average", divisor=8.0), transformer(), BLOCKS)}
    assert specs["summed"].divisor is None and specs["layers.0"].divisor == 8.0
    with pytest.raises(UsageError, match=r"Bucket 'root': divisor is 2.0, but reduce_op is 'sum', which never divides"):
        assign(config(divisor=2.0), transformer(), BLOCKS)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"reshard": "alway"}, r"sharder.reshard is 'alway'. Did you mean 'always'"),
        ({"reshard": "after 0"}, r"write `after N` with N of at least 1"),
        ({"reshard": "after two"}, r"write `after N`"),
        ({"offload": "cpus"}, r"sharder.offload is 'cpus'. Did you mean 'cpu'"),
        ({"reduce_op": "avg"}, r"sharder.reduce_op is 'avg'. "),
        ({"payload": "fp9"}, r"sharder.payload is 'fp9'. Did you mean 'fp8'"),
        ({"gradients": "shard"}, r"sharder.gradients is 'shard'. Did you mean 'sharded'"),
        ({"master": "splits"}, r"sharder.master is 'splits'. Did you mean 'split'"),
        ({"owners": "element"}, r"sharder.owners is 'element'. Did you mean 'elements'"),
        ({"prefetch": -1}, r"sharder.prefetch is -1"),
        ({"divisor": 0.0, "reduce_op": "average"}, r"sharder.divisor is 0.0"),
        ({"divisor": float("inf"), "reduce_op": "average"}, r"sharder.divisor is inf"),
    ],
)
def test_words_and_numbers_that_mean_nothing(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        check_settings(FlexShardConfig(**settings))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"axes": ("dp_shards",)}, r"Bucket 'b': axes or replicas is 'dp_shards'. Did you mean 'dp_shard'"),
        ({"replicas": ("pp",)}, r"Bucket 'b': axes or replicas is 'pp'"),
        (
            {"axes": ("dp_replicate",), "replicas": ("dp_replicate",)},
            r"Bucket 'b': axis 'dp_replicate' is named twice in axes and replicas",
        ),
        ({"axes": ()}, r"Bucket 'b': `axes` is empty. .* placement=replicate"),
        ({"compute": "bf16"}, r"Bucket 'b': compute is 'bf16'. Did you mean 'bfloat16'"),
        ({"reshard": "sometimes"}, r"Bucket 'b': reshard is 'sometimes'"),
        ({"payload": "fp4"}, r"Bucket 'b': payload is 'fp4'"),
        ({"prefetch": -3}, r"Bucket 'b': prefetch is -3"),
    ],
)
def test_a_buckets_words_and_numbers(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        check_settings(config(BucketConfig(name="b", match=("*",), **settings)))


def test_reshard_words() -> None:
    assert [parse_reshard(text) for text in ("always", "never", "after 1", "after 12")] == [
        ("always", 1),
        ("never", 0),
        ("after", 1),
        ("after", 12),
    ]


# ---------------------------------------------------------------- what placements are told


def test_newton_schulz_cost_grows_with_the_short_side() -> None:
    wide, square, stack = newton_schulz_cost((64, 4096)), newton_schulz_cost((512, 512)), newton_schulz_cost((8, 64, 4096))
    assert wide == newton_schulz_cost((4096, 64)) and square > 3 * wide, "of equally many elements the square costs most"
    assert stack == pytest.approx(8 * wide)
    # Llama-8B's: what a product of 3.5 times the depth costs more is met once, not in every step.
    assert 1.3 < newton_schulz_cost((14336, 4096)) / newton_schulz_cost((4096, 4096)) < 1.6
    assert newton_schulz_cost((4096,)) == 4096**2 and newton_schulz_cost(()) == 4096
    info = Info("w", (4, 6), "bfloat16")
    assert member_of(info) == Member("w", (4, 6), "bfloat16")
    assert member_of(info, (2, 6), "newton_schulz") == Member("w", (2, 6), "bfloat16", cost=newton_schulz_cost((2, 6)))


# ---------------------------------------------------------------- placements in a bucket: the numbered scenarios


def regions_of(placement: Any, ranks: int, *shapes: tuple[int, ...]) -> list[list[Any]]:
    """By rank and member."""
    named = [Member(str(index), shape) for index, shape in enumerate(shapes)]
    layouts = build_layouts(named, [("dp_shard", ranks, placement)])
    return [[layouts[member.name].local(rank) for member in named] for rank in range(ranks)]


def test_rows_and_whole_blocks_over_uneven_ranks() -> None:
    """[8] Rank 1 of 2 has the last rows of five; of one row over three ranks the last has nothing. [13], [14] Later members of a bucket begin where ranks do."""
    assert regions_of(row.build(Row()), 2, (5, 4))[1] == [(Box((3, 0), (2, 4)),)]
    assert regions_of(row.build(Row()), 3, (1, 4))[2] == [()]
    rows = block.build(Block(tile=(1, -1)))
    assert regions_of(rows, 2, (2, 3), (4, 3)) == [
        [(Box((0, 0), (2, 3)),), (Box((0, 0), (1, 3)),)],
        [(), (Box((1, 0), (3, 3)),)],
    ]
    # Stacks of matrices, each whole.
    experts = regions_of(block.build(Block(tile=(-1, -1))), 2, (3, 2, 4), (5, 2, 4))
    assert [sum(map(region_numel, held)) for held in experts] == [32, 32]
    assert experts[1] == [(), (Box((1, 0, 0), (4, 2, 4)),)]


def test_a_bucket_of_ranges_is_a_view_of_what_is_gathered() -> None:
    """[10] Contiguous ranges of rows: sizes per rank are true, and both members lie whole in the gathered buffer."""
    regions = regions_of(block.build(Block(tile=(2, -1))), 2, (4, 2), (4,))
    geometry = make_geometry([(4, 2), (4,)], regions, alignment=1)
    assert geometry.starts == (0, 8) and geometry.copied == 0 and sum(geometry.counts) == geometry.elements == 12


def test_a_rank_may_have_nothing() -> None:
    """[11] One row over two ranks: the second has no box and no bytes. [15] So has the third of three blocks over four ranks."""
    regions = regions_of(block.build(Block(tile=(1, -1))), 2, (1, 4))
    assert sorted(region_numel(region) for (region,) in regions) == [0, 4]
    assert make_geometry([(1, 4)], regions, alignment=1).elements == 4
    tiles = regions_of(block.build(Block(tile=(4, -1))), 4, (12, 4))
    assert [[box.start[0] for box in region] for (region,) in tiles if region] == [[0], [4], [8]]
    first = next(region[0] for (region,) in tiles if region)
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.start = (1, 0)


def test_impossible_tiles_and_dimensions_are_refused() -> None:
    """[12] Wrong lengths and counts, and dimensions that are not there, by member and placement."""
    for wrong in ((), (0,), (-3, 2), (1, 1, 1, 1)):
        with pytest.raises(UsageError, match="Placement block: tile must have"):
            block.build(Block(tile=wrong))
    with pytest.raises(
        UsageError, match=r"Placement 'row\(dim=2\)' cannot cut member 'layers.0.w' of shape \(4, 2\): it has no dimension 2"
    ):
        row.build(Row(dim=2)).partition([Member("layers.0.w", (4, 2))], 2)


class Custom:
    """Owner 1 has `owned`, and of four blocks of `shared` rank 0 has one and rank 1 three."""

    name, accepts = "custom", "box"

    def __init__(self, wrong: str = "") -> None:
        self.wrong = wrong

    def partition(self, given: Any, ranks: int) -> Partition:
        regions = {"owned": ((), whole_region((4, 4))), "shared": ((Box((0, 0), (1, 2)),), (Box((1, 0), (3, 2)),))}
        rows = tuple(regions[member.name] for member in given)
        if self.wrong == "count":
            rows = tuple(region[:1] for region in rows)
        if self.wrong == "member":
            rows = rows[:1]
        if self.wrong == "outside":
            rows = (((), (Box((0, 0), (5, 4)),)), rows[1])
        return Partition(tuple(given), ranks, rows)


def test_an_assignment_of_ones_own_is_honoured_and_checked() -> None:
    """[20]"""
    given = [Member("owned", (4, 4)), Member("shared", (4, 2))]
    layouts = build_layouts(given, [("dp_shard", 2, Custom())])
    assert [layouts["owned"].numel(rank) for rank in range(2)] == [0, 16]
    assert [layouts["shared"].numel(rank) for rank in range(2)] == [2, 6]
    for wrong, words in (
        ("count", "1 regions for 2 ranks"),
        ("member", "1 rows of regions for 2 members"),
        ("outside", "outside the shape"),
    ):
        with pytest.raises(PluginError, match=words):
            build_layouts(given, [("dp_shard", 2, Custom(wrong))])
    with pytest.raises(UsageError, match="several members of the name 'owned'"):
        build_layouts([given[0], given[0]], [("dp_shard", 2, Custom())])
    with pytest.raises(UsageError, match="Rank 2 is not in a mesh of 2"):
        layouts["owned"].local(2)


def test_members_of_a_mixed_bucket_share_one_buffer() -> None:
    """Rows, whole matrices and vectors side by side: whole members stay views, sizes stay true."""
    placement = mixed.build(Mixed(rules=(MixedRule(match="[01]", placement=Owned()),), default=Row()))
    regions = regions_of(placement, 2, (8, 8), (4, 8), (6,))
    geometry = make_geometry([(8, 8), (4, 8), (6,)], regions, alignment=1)
    assert geometry.starts[:2] == (0, 67) and sum(geometry.counts) == geometry.elements == 102
    assert owned.build(Owned()).partition([Member("a", (2, 2))], 1).regions == ((whole_region((2, 2)),),)
    assert isinstance(build_layouts([Member("a", (2, 2))], [("dp_shard", 2, placement)])["a"], Layout)
