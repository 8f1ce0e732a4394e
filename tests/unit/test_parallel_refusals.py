"""What a mesh cannot do is refused when it is built, with the numbers and the nearest that would do: no process is started, and no collective is waited for."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from intarsia.errors import UsageError

sys.path.append(str(Path(__file__).parents[1] / "distributed"))
from _build import build_rank

STAGES = ("mesh.pp=2", "engine=pipeline")
ULYSSES = ("parallel=declared", "parallel.context=ulysses")

REFUSED = {
    "tp divides no heads": ("llama", 3, ("mesh.tp=3",), [r"4 query heads, which tp=3 does not divide", "nearest degrees that do: 2 or 4"]),
    "tp above the heads": ("llama", 8, ("mesh.tp=8",), ["4 query heads, which tp=8 does not divide", "nearest degrees that do: 4"]),
    "tp of latent attention": ("deepseek", 3, ("mesh.tp=3",), ["4 query heads, which tp=3 does not divide", "2 or 4"]),
    "ep divides no experts": (
        "deepseek",
        3,
        ("mesh.ep=3",),
        ["8 experts, which mesh.ep = 3 does not divide", "nearest degrees that do: 2 or 4"],
    ),
    "ep above the experts": ("deepseek", 16, ("mesh.ep=16",), ["8 experts, too few for mesh.ep = 16", "The most is ep=8"]),
    "ep without experts": ("llama", 2, ("mesh.ep=2",), ["ep is 2, and no row cuts anything over ep", "mesh.ep=1"]),
    "ep does not fold": ("deepseek", 4, ("mesh.ep=3",), ["ep 3 does not divide dp_shard 4", "divisors of 4"]),
    "micro-batches fewer than stages": (
        "llama",
        2,
        (*STAGES, "train.micro_batch=8"),
        ["on 2 pipeline ranks needs at least 2 micro-batches", "there is 1", "Take 2", "mesh.pp of at most 1"],
    ),
    "more stages than blocks": (
        "llama",
        4,
        ("mesh.pp=4", "engine=pipeline", "engine.schedule=zbv", "train.micro_batch=1"),
        ["needs 8 pipeline stages", "has 4 blocks", "at most 4 stages"],
    ),
    "virtual stages above the blocks": (
        "deepseek",
        2,
        (*STAGES, "engine.schedule=interleaved", "engine.schedule.virtual_stages=3"),
        ["needs 6 pipeline stages", "cut before 3 of its 5 blocks", "at most 4 stages"],
    ),
    "a stage that is no block": (
        "llama",
        2,
        (*STAGES, "parallel=declared", "parallel.stages=[layer.2]"),
        ["names 'layer.2', which is no block", "Did you mean 'layers.2'"],
    ),
    "pp by an engine of whole models": ("llama", 2, ("mesh.pp=2",), ["mesh.pp is 2", "engine=pipeline"]),
    "stages without pp": ("llama", 2, ("engine=pipeline",), ["mesh.pp is 1", "engine=eager"]),
    "cp by heads": (
        "llama",
        8,
        ("mesh.cp=8", *ULYSSES),
        ["4 query heads cannot be shared out over cp 8", "nearest: cp 4", "ring or gather"],
    ),
    "cp by the heads that tp leaves": (
        "llama",
        8,
        ("mesh.cp=4", "mesh.tp=2", *ULYSSES),
        ["2 query heads cannot be shared out over cp 4", "nearest: cp 2", "tp 2 leaves 2 heads"],
    ),
    "no such method": ("llama", 2, ("mesh.cp=2", "parallel=declared", "parallel.context=rings"), ["'rings'", "Did you mean 'ring'"]),
    "degrees that do not multiply": ("llama", 4, ("mesh.tp=2", "mesh.dp_shard=1"), ["tp 2 needs 2 processes, but there are 4"]),
    "degrees that leave nothing whole": ("llama", 4, ("mesh.tp=3",), ["tp 3 does not divide 4"]),
    "a degree of 0": ("llama", 4, ("mesh.cp=0",), ["`mesh.cp`", "at least 1", "is 0"]),
    "local experts": (
        "deepseek",
        2,
        ("mesh.ep=2", "parallel=declared", "parallel.dispatcher=local"),
        ["`local` keeps tokens on their rank", "8 experts", "2 ranks"],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_with_the_numbers(name: str) -> None:
    recipe, ranks, overrides, texts = REFUSED[name]
    messages = []
    for rank in (0, ranks - 1):
        with pytest.raises(UsageError) as caught:
            build_rank(recipe, overrides, ranks, rank)
        messages.append(str(caught.value))
    # Every rank says the same, so that none of them waits for another.
    assert messages[0] == messages[1]
    for text in texts:
        assert text in messages[0], messages[0]


def test_rows_that_name_no_module(monkeypatch: pytest.MonkeyPatch) -> None:
    from intarsia_llama3 import sharding

    monkeypatch.setattr(sharding, "TABLE", (*sharding.TABLE, ("layers.*.atention.wq", "column")))
    with pytest.raises(
        UsageError,
        match=r"'layers.\*.atention.wq' \(column\) names a module that Llama3 does not have. Did you mean 'layers.\*.attention.wq'",
    ):
        build_rank("llama", ("mesh.tp=2",), 2)


def test_roles_that_do_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    from intarsia_llama3 import sharding

    monkeypatch.setattr(sharding, "TABLE", (*sharding.TABLE[:-1], ("head", "vocabulary")))
    with pytest.raises(UsageError, match=r"'vocabulary'.*vocab"):
        build_rank("llama", ("mesh.tp=2",), 2)


@pytest.mark.parametrize("axis", ["tp", "cp", "ep"])
def test_a_family_without_a_table(axis: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import dataclasses

    from intarsia import plugins

    loaded = plugins.current()
    real = loaded.entry_of

    def without(config: object) -> object:
        entry = real(config)
        return dataclasses.replace(entry, sharding=None) if hasattr(entry, "sharding") else entry

    monkeypatch.setattr(loaded, "entry_of", without)
    with pytest.raises(UsageError, match=rf"mesh: {axis} 2 needs a sharding table, and the family of Llama3 has none"):
        build_rank("llama", (f"mesh.{axis}=2",), 2)
    # A pipeline cuts between blocks, which any model allows.
    assert build_rank("llama", STAGES, 2).parallel is not None
