"""Which axes cut a parameter and which have replicas of it, what gets a bucket beside its own, and every refusal in words."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from intarsia.config import MeshConfig
from intarsia.errors import UsageError
from intarsia.mesh import check_mesh, full_sizes
from intarsia_flexshard.assign import assign, unmatched
from intarsia_flexshard.axes import default_divisor, span_of
from intarsia_flexshard.config import BucketConfig, FlexShardConfig


@dataclasses.dataclass
class Info:
    name: str
    outer: tuple[Any, ...] = ()
    block: str = ""
    shape: tuple[int, ...] = (4, 4)
    dtype: str = "float32"
    trainable: bool = True
    aliases: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()


def sizes(world: int, **degrees: int) -> dict[str, int]:
    return full_sizes(check_mesh(MeshConfig(**degrees), world))


def layer(tp: int = 1, ep: int = 1) -> list[Info]:
    columns, experts = ((("tp", tp, "a placement"),) if tp > 1 else ()), ((("ep", ep, "a placement"),) if ep > 1 else ())
    made = [Info("experts.w1", experts), Info("norm.weight"), Info("wq.weight", columns), Info("wo.weight", columns)]
    return [dataclasses.replace(info, name=f"layers.0.{info.name}", block="layers.0") for info in made]


def spans(infos: list[Info], mesh: dict[str, int], *buckets: BucketConfig, **settings: Any) -> dict[str, Any]:
    specs = assign(FlexShardConfig(buckets=buckets, **settings), infos, ("layers.0",), sizes=mesh)
    return {spec.name: ([info.name.split(".")[2] for info in spec.infos], spec.axes, spec.replicas) for spec in specs}


@pytest.mark.parametrize(
    ("mesh", "wanted"),
    [
        (sizes(4), {"layers.0": (["experts", "norm", "wq", "wo"], ("dp_shard",), ("dp_replicate",))}),
        (sizes(8, cp=2, dp_replicate=2), {"layers.0": (["experts", "norm", "wq", "wo"], ("dp_shard", "cp"), ("dp_replicate",))}),
        (
            sizes(8, tp=2, cp=2),
            {
                "layers.0": (["experts", "norm"], ("dp_shard", "cp", "tp"), ("dp_replicate",)),
                "layers.0:dp_shard+cp": (["wq", "wo"], ("dp_shard", "cp"), ("dp_replicate",)),
            },
        ),
        (
            sizes(2, tp=2),
            {
                "layers.0": (["experts", "norm"], ("dp_shard", "tp"), ("dp_replicate",)),
                "layers.0:dp_shard": (["wq", "wo"], ("dp_shard",), ("dp_replicate",)),
            },
        ),
        (
            sizes(4, ep=4),
            {
                "layers.0:ep_shard": (["experts"], ("ep_shard",), ("dp_replicate",)),
                "layers.0": (["norm", "wq", "wo"], ("dp_shard",), ("dp_replicate",)),
            },
        ),
        (
            sizes(8, tp=2, ep=4),
            {
                "layers.0:ep_shard": (["experts"], ("ep_shard",), ("dp_replicate",)),
                "layers.0": (["norm"], ("dp_shard", "tp"), ("dp_replicate",)),
                "layers.0:dp_shard": (["wq", "wo"], ("dp_shard",), ("dp_replicate",)),
            },
        ),
    ],
)
def test_buckets_have_what_is_summed_over_the_same_ranks(mesh: dict[str, int], wanted: dict[str, Any]) -> None:
    assert spans(layer(mesh["tp"], mesh["ep"]), mesh) == wanted


def test_what_a_bucket_leaves_open_is_decided_for_it() -> None:
    mesh = sizes(8, tp=2, ep=2, dp_replicate=2)
    infos = layer(2, 2)
    experts = BucketConfig(name="experts", match=("*.experts",), axes=("ep_shard",))
    assert spans(infos, mesh, experts)["experts"] == (["experts"], ("ep_shard",), ("dp_replicate",))
    whole = BucketConfig(name="norms", match=("*.norm",), replicas=("tp", "dp_replicate"))
    assert spans(infos, mesh, whole)["norms"] == (["norm"], ("dp_shard",), ("tp", "dp_replicate"))
    # With ep 1 the same setting cuts over all ranks that are no replicas.
    assert spans(layer(2), sizes(8, tp=2, dp_replicate=2), experts)["experts"] == (["experts"], ("ep_shard",), ("dp_replicate",))


def test_cuts_that_say_replicate_keep_a_parameter_whole_there_and_sum_its_gradient() -> None:
    mesh = sizes(4, tp=2)
    assert span_of("b", None, None, Info("gate", (("tp", 2, "replicate"),)), mesh) == (("dp_shard",), ("dp_replicate", "tp"))
    with pytest.raises(UsageError, match="cuts 'gate' over tp, along which it is to stay whole"):
        span_of("b", ("dp_shard", "tp"), None, Info("gate", (("tp", 2, "replicate"),)), mesh)


@pytest.mark.parametrize(
    ("bucket", "words"),
    [
        (
            {"axes": ("dp_shard",), "replicas": ("dp_replicate",)},
            r"gradient of 'layers.0.norm.weight' is a partial sum over tp \(2 ranks\)",
        ),
        (
            {"axes": ("dp_shard", "tp")},
            r"names the axis tp \(2 ranks\) for 'layers.0.wq.weight', which is cut over tp before. Leave `axes`",
        ),
        ({"axes": ("ep_shard",)}, r"names the axis ep_shard \(4 ranks\) for 'layers.0.norm.weight', which no expert parallelism cuts"),
    ],
)
def test_axes_over_which_nobody_would_sum_are_refused(bucket: dict[str, Any], words: str) -> None:
    infos = [info for info in layer(2, 2) if "experts" not in info.name]
    with pytest.raises(UsageError, match=words):
        spans(infos, sizes(8, tp=2, ep=2), BucketConfig(name="b", match=("layers.0",), **bucket))


def test_experts_are_cut_over_ep_alone() -> None:
    with pytest.raises(UsageError, match=r"'w1' is cut over ep and tp\. Expert parallelism is folded out of"):
        span_of("b", None, None, Info("w1", (("ep", 2, "a placement"), ("tp", 2, "a placement"))), sizes(4, tp=2, ep=2))


def test_an_average_is_over_ranks_with_other_tokens() -> None:
    """Contributions of tp ranks, and of ranks that sent an expert its tokens, are parts of one sum."""
    assert default_divisor(sizes(8, cp=2)) is None and default_divisor(sizes(8, tp=2, cp=2)) == 4 and default_divisor(sizes(8, ep=4)) == 8
    specs = assign(FlexShardConfig(reduce_op="average"), layer(2, 2), ("layers.0",), sizes=sizes(8, tp=2, ep=2))
    assert {spec.divisor for spec in specs} == {4.0}


def test_what_another_stage_has_too_is_a_bucket_of_its_own() -> None:
    infos = [Info("table.weight", aliases=("head.weight",), absent=("head.weight",)), Info("norm.weight")]
    specs = {spec.name: spec for spec in assign(FlexShardConfig(), infos, (), sizes=sizes(4, pp=2))}
    assert list(specs) == ["root:table.weight", "root"] and specs["root:table.weight"].is_shared and not specs["root"].is_shared


def test_a_glob_may_match_in_another_stage() -> None:
    config = FlexShardConfig(buckets=(BucketConfig(name="late", match=("layers.7", "layers.0")),))
    assert unmatched(config, layer()) == ["layers.7"]
    (spec,) = assign(config, layer(), ("layers.0",), elsewhere=["layers.7"])
    assert spec.name == "late"
    assert [spec.name for spec in assign(config, [Info("norm.weight")], (), elsewhere=["layers.7", "layers.0"])] == ["root"]
