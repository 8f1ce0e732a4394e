"""The placement kit says which promise is broken, for placements that break one each; and the documented example keeps them all."""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
from intarsia.contracts import Box, Member, Partition
from intarsia.layout import whole_region
from intarsia_placements import column, flat, row
from intarsia_placements.config import Column, Flat, Row
from intarsia_testing.placement import PlacementConformance

DOCS = Path(__file__).parents[2] / "docs"
ROW = row.build(Row())


def python_blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


class Broken:
    """`row`, with `spoil(partition)` for an answer."""

    name = "broken"
    accepts: Literal["box", "region"] = "box"

    def __init__(self, spoil: Callable[[Partition], Any]) -> None:
        self.spoil = spoil

    def partition(self, members: Sequence[Member], ranks: int) -> Any:
        return self.spoil(ROW.partition(members, ranks))


def each_region(change: Callable[[Member, int, tuple[Box, ...]], Any]) -> Callable[[Partition], Partition]:
    def spoil(partition: Partition) -> Partition:
        regions = tuple(
            tuple(change(member, rank, region) for rank, region in enumerate(row))
            for member, row in zip(partition.members, partition.regions, strict=True)
        )
        return dataclasses.replace(partition, regions=regions)

    return spoil


def untiled(partition: Partition) -> Partition:
    members = [dataclasses.replace(member, tile=None) for member in partition.members]
    return dataclasses.replace(ROW.partition(members, partition.ranks), members=partition.members)


def forgetful(partition: Partition) -> Partition:
    return dataclasses.replace(
        partition, regions=tuple((region[-1], *region[:-1]) for region in partition.regions) if random.random() < 0.5 else partition.regions
    )


def out_of_range(partition: Partition) -> Partition:
    raise IndexError("tuple index out of range")


def wide(member: Member, rank: int, region: tuple[Box, ...]) -> tuple[Box, ...]:
    return tuple(Box(box.start, (box.size[0] + 1, *box.size[1:])) if box.size else box for box in region)


@pytest.mark.parametrize(
    ("spoil", "test", "words"),
    [
        (each_region(lambda m, rank, region: region if rank else ()), "test_regions_cover", "promise `covering` is broken: broken cuts member"),
        (each_region(lambda m, rank, region: whole_region(m.shape)), "test_regions_are_disjoint", "promise `disjoint` is broken: .* stored more than once"),
        (untiled, "test_tiles_are_whole", "promise `tiles stay whole` is broken: .* has elements on several ranks"),
        (each_region(wide), "test_boxes_are_inside_and_not_empty", "promise `boxes lie inside the shape` is broken"),
        (each_region(lambda m, rank, region: region or (Box.whole((0,) * len(m.shape)),) if m.shape else region), "test_boxes_are_inside_and_not_empty", "promise `no box is empty` is broken: .*an empty region is an empty tuple"),
        (each_region(lambda m, rank, region: tuple(Box(box.start[1:], box.size[1:]) for box in region)), "test_boxes_are_inside_and_not_empty", "promise `boxes have the member's rank` is broken"),
        (forgetful, "test_it_is_deterministic_and_pure", "promise `(pure|deterministic)` is broken"),
        (out_of_range, "test_regions_cover", "promise `any bucket is cut, or refused by UsageError` is broken: broken raises IndexError"),
        (lambda partition: None, "test_regions_cover", "promise `answers what was asked` is broken: broken returns None"),
        (lambda partition: dataclasses.replace(partition, members=()), "test_regions_cover", "promise `answers what was asked` is broken: .*other members"),
        (lambda partition: dataclasses.replace(partition, regions=()), "test_regions_cover", "promise `answers what was asked` is broken: .*a row for each member"),
    ],
)  # fmt: skip
def test_a_broken_promise_is_said_in_words(spoil: Callable[[Partition], Any], test: str, words: str) -> None:
    class Kit(PlacementConformance):
        placement = Broken(spoil)

    with pytest.raises(pytest.fail.Exception, match=words):
        getattr(Kit(), test)()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda whole, loads: dataclasses.replace(whole, regions=()), "promise `balanced without loads is `partition`` is broken"),
        (lambda whole, loads: loads.append(1.0) or whole, "promise `pure` is broken: .* changes the loads"),
        (lambda whole, loads: whole if not any(loads) else each_region(lambda m, rank, region: region if rank else ())(whole), "promise `balanced cuts are sound` is broken: .*stored once"),
        (lambda whole, loads: whole if not any(loads) else untiled(whole), "promise `balanced cuts are sound` is broken: .*a tile of it is cut"),
        (lambda whole, loads: whole if not any(loads) else dataclasses.replace(whole, ranks=0), "promise `deterministic` is broken: .*about something else"),
    ],
)  # fmt: skip
def test_a_broken_balance_is_said_in_words(answer: Callable[..., Any], words: str) -> None:
    class Unbalanced(Broken):
        def partition_balanced(self, members: Sequence[Member], ranks: int, loads: list[float]) -> Any:
            return answer(self.partition(members, ranks), loads)

    class Kit(PlacementConformance):
        placement = Unbalanced(lambda partition: partition)

    with pytest.raises(pytest.fail.Exception, match=words):
        Kit().test_it_balances_without_breaking_a_promise()


def test_a_refusal_without_the_member_is_found() -> None:
    class Anonymous(Broken):
        def partition(self, members: Sequence[Member], ranks: int) -> Any:
            return column.build(Column(dim=3)).partition([dataclasses.replace(member, name="?") for member in members], ranks)

    class Kit(PlacementConformance):
        placement = Anonymous(lambda partition: partition)

    with pytest.raises(pytest.fail.Exception, match="promise `refusals name the member` is broken"):
        Kit().test_regions_cover()


def test_a_placement_that_claims_too_much_is_found() -> None:
    """It says that it accepts regions, and fails where it sees one: as a vector in storage order."""

    class Boastful(Broken):
        accepts: Literal["box", "region"] = "region"

        def partition(self, members: Sequence[Member], ranks: int) -> Any:
            columns = [member.shape[1] for member in members if member.name == "matrix"]
            return super().partition(members, ranks) if columns != [0] else None

    class Kit(PlacementConformance):
        placement = Boastful(lambda partition: partition)

    words = "promise `compositions are cut, or refused by UsageError` is broken: broken inside (ranges|block.*) raises IndexError"
    with pytest.raises(pytest.fail.Exception, match=words):
        Kit().test_composes_with_every_installed_placement()


def test_wrong_attributes_are_found() -> None:
    class Nameless(Broken):
        name = ""

    class Odd(Broken):
        accepts = "boxes"  # type: ignore[assignment]

    for kind, words in ((Nameless, "must be text"), (Odd, "must be 'box' or 'region'")):

        class Kit(PlacementConformance):
            placement = kind(lambda partition: partition)

        with pytest.raises(pytest.fail.Exception, match=words):
            Kit().test_it_says_what_it_is()


def test_the_kit_itself_notices_lost_elements_and_wrong_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reconstruction and conversion do not pass by construction: with a wrong box arithmetic they fail."""
    import intarsia_testing.placement as kit

    class Kit(PlacementConformance):
        placement = flat.build(Flat(unit=1))
        max_examples = 2

    whole = kit.unpack
    with monkeypatch.context() as patch:
        patch.setattr(kit, "unpack", lambda local, region, full: whole(local[::-1], region, full))
        with pytest.raises(pytest.fail.Exception, match=r"promise `reconstruct\(partition\(x\)\) = x` is broken"):
            Kit().test_reconstruct_is_identity()
    with monkeypatch.context() as patch:
        patch.setattr("intarsia_transfer.plan.slices", lambda box, origin: tuple(slice(0, n) for n in box.size) or (Ellipsis,))
        with pytest.raises(pytest.fail.Exception, match="promise `converts to any other placement` is broken"):
            Kit().test_converts_to_every_installed_placement()


class TestDocumentedExample(PlacementConformance):
    """The placement that the how-to page writes."""

    max_examples = 10

    def placements(self) -> list[Any]:
        code = next(block for block in python_blocks("how-to/write-a-placement.md") if "class InterleavedPlacement" in block)
        names: dict[str, Any] = {}
        exec(code, names)
        return [names["build"](None)]


def test_the_reference_pages_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    for code in python_blocks("reference/layout.md"):
        exec(code, {})
    assert "(Box(start=(2, 0), size=(1, 2)),)\n()\n0 copy" in capsys.readouterr().out
