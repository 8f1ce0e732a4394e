"""The meshes that must compute what one process does: name, processes, recipe of `parallel_recipes`, overrides."""

from __future__ import annotations

from typing import Any

PIPELINE = ("engine=pipeline",)
# Two micro-batches in a step of 8 rows on one data rank: accumulation, with no more passes than it takes.
HALVES = ("train.micro_batch=4",)
RECOMPUTE = ("recompute.mode=blocks",)
# Schedules with several stages on each rank.
SEVERAL = ("interleaved", "zbv", "dualpipev")
SCHEDULES = ("gpipe", "1f1b", "zb_h1", *SEVERAL)
FIXED = ("parallel=declared", "parallel.dispatcher=fixed_capacity", "parallel.dispatcher.factor=4.0")


def scenario(name: str, ranks: int, recipe: str, *overrides: str) -> dict[str, Any]:
    """One job of `_meshes`."""
    return {"name": name, "ranks": ranks, "recipe": recipe, "compare": recipe, "overrides": list(overrides)}


def context(method: str) -> tuple[str, ...]:
    """How softmax attention sees other ranks' tokens."""
    return ("parallel=declared", f"parallel.context={method}")


def pipeline(schedule: str) -> tuple[str, ...]:
    """The engine with a schedule."""
    return (*PIPELINE, f"engine.schedule={schedule}")


def micro_batch(schedule: str, ranks: int) -> int:
    """Rows of a micro-batch, of 8 in a step, so that every rank is busy: no fewer passes than the schedule needs."""
    return 1 if ranks == 4 and schedule in ("zbv", "dualpipev") else 2


def tensor() -> list[dict[str, Any]]:
    """tp, with more ranks than key/value heads; sequences that tp does not divide."""
    return [
        scenario("llama-tp2", 2, "llama", "mesh.tp=2", *HALVES),
        scenario("llama-tp2-tied-recompute", 2, "llama_tied", "mesh.tp=2", *HALVES, *RECOMPUTE),
        scenario("llama-tp4", 4, "llama", "mesh.tp=4", *HALVES),
        scenario("llama-tp2-dp2-muon", 4, "llama_muon", "mesh.tp=2", "train.micro_batch=3"),
        scenario("deepseek-tp2", 2, "deepseek", "mesh.tp=2", *HALVES),
        scenario("deepseek-tp4-recompute", 4, "deepseek", "mesh.tp=4", *HALVES, *RECOMPUTE),
        scenario("deepseek-tp2-tied", 2, "deepseek_tied", "mesh.tp=2", "train.micro_batch=8"),
    ]


def sequences() -> list[dict[str, Any]]:
    """cp by every method, packed documents."""
    made = []
    for ranks in (2, 4):
        for method in ("ring", "gather", "ulysses"):
            made.append(scenario(f"llama-cp{ranks}-{method}", ranks, "llama", f"mesh.cp={ranks}", *HALVES, *context(method)))
            further = RECOMPUTE if method == "ring" else ()
            made.append(
                scenario(f"deepseek-cp{ranks}-{method}", ranks, "deepseek", f"mesh.cp={ranks}", *HALVES, *context(method), *further)
            )
    return made


def experts() -> list[dict[str, Any]]:
    """ep, folded out of data, tensor and context parallelism, by both dispatchers."""
    return [
        scenario("deepseek-ep2", 2, "deepseek", "mesh.ep=2"),
        scenario("deepseek-ep2-fixed-recompute", 2, "deepseek", "mesh.ep=2", *FIXED, *RECOMPUTE),
        scenario("deepseek-ep2-muon", 2, "deepseek_muon", "mesh.ep=2", "train.micro_batch=3"),
        scenario("deepseek-ep4", 4, "deepseek", "mesh.ep=4", "train.micro_batch=1"),
        scenario("deepseek-ep4-fixed", 4, "deepseek", "mesh.ep=4", *FIXED),
        scenario("deepseek-ep2-dp4-replicas", 4, "deepseek", "mesh.ep=2", "mesh.dp_replicate=2", "mesh.dp_shard=2"),
        scenario("deepseek-ep4-tp2-cp2", 4, "deepseek", "mesh.ep=4", "mesh.tp=2", "mesh.cp=2", *HALVES),
        scenario("deepseek-ep2-tp2-fixed", 2, "deepseek", "mesh.ep=2", "mesh.tp=2", *HALVES, *FIXED),
    ]


def stages() -> list[dict[str, Any]]:
    """pp by every schedule."""
    made = []
    for ranks in (2, 4):
        for number, schedule in enumerate(SCHEDULES):
            depth = "_deep" if ranks == 4 and schedule in SEVERAL else ""
            further = RECOMPUTE if number % 2 else ()
            for family in ("llama", "deepseek"):
                mesh = (f"mesh.pp={ranks}", f"train.micro_batch={micro_batch(schedule, ranks)}", *pipeline(schedule), *further)
                made.append(scenario(f"{family}-pp{ranks}-{schedule}", ranks, f"{family}{depth}", *mesh))
    return [
        *made,
        scenario("llama-pp2-tied", 2, "llama_tied", "mesh.pp=2", *PIPELINE),
        scenario("deepseek-pp2-tied-zbv", 2, "deepseek_tied", "mesh.pp=2", *pipeline("zbv")),
        scenario("deepseek-pp2-tied-1f1b", 2, "deepseek_tied", "mesh.pp=2", *PIPELINE),
        scenario("llama-pp2-muon", 2, "llama_muon", "mesh.pp=2", *pipeline("interleaved")),
        scenario("deepseek-pp2-muon", 2, "deepseek_muon", "mesh.pp=2", *pipeline("zb_h1"), "engine.unshard=action", "engine.reduce=each"),
    ]


def mixed() -> list[dict[str, Any]]:
    """Several axes at once."""
    pp2 = ("mesh.pp=2", "train.micro_batch=2")
    made = []
    for family in ("llama", "deepseek"):
        made += [
            scenario(f"{family}-pp2-tp2-dp2", 8, family, *pp2, "mesh.tp=2", "mesh.dp_shard=2", *PIPELINE),
            scenario(f"{family}-cp2-tp2-dp2", 8, family, "mesh.cp=2", "mesh.tp=2", "mesh.dp_shard=2"),
            scenario(f"{family}-pp2-cp2-tp2", 8, family, "mesh.pp=2", "mesh.cp=2", "mesh.tp=2", *pipeline("zbv")),
        ]
    return [
        *made,
        scenario("deepseek-pp2-ep2-dp2", 4, "deepseek", *pp2, "mesh.ep=2", "mesh.dp_shard=2", *PIPELINE),
        scenario(
            "deepseek-pp2-ep4-tp2-dp2",
            8,
            "deepseek",
            "mesh.pp=2",
            "train.micro_batch=1",
            "mesh.ep=4",
            "mesh.tp=2",
            "mesh.dp_shard=2",
            *pipeline("dualpipev"),
            *FIXED,
        ),
        scenario("deepseek-muon-pp2-ep2-dp2", 4, "deepseek_muon", *pp2, "mesh.ep=2", "mesh.dp_shard=2", *pipeline("interleaved")),
        scenario("llama-tied-pp2-tp2", 4, "llama_tied", "mesh.pp=2", "mesh.tp=2", *HALVES, *PIPELINE, *RECOMPUTE),
        scenario("deepseek-tied-pp2-tp2", 4, "deepseek_tied", "mesh.pp=2", "mesh.tp=2", *HALVES, *pipeline("zb_h1")),
        scenario("deepseek-tied-pp2-replicas", 4, "deepseek_tied", *pp2, "mesh.dp_replicate=2", *pipeline("gpipe")),
    ]


SETS = {"tensor": tensor, "sequences": sequences, "experts": experts, "stages": stages, "mixed": mixed}
