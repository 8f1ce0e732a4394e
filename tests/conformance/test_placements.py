"""The first-party placements keep every promise of the contract."""

from __future__ import annotations

from intarsia_placements.config import Block, Column, Flat, Mixed, MixedRule, Owned, Row
from intarsia_testing.placement import PlacementConformance


class TestRow(PlacementConformance):
    entry = "intarsia-placements:row"
    configs = (Row(), Row(dim=-1))


class TestColumn(PlacementConformance):
    entry = "intarsia-placements:column"
    configs = (Column(), Column(dim=-2))


class TestFlat(PlacementConformance):
    entry = "intarsia-placements:flat"
    configs = (Flat(), Flat(unit=1), Flat(unit=5))


class TestOwned(PlacementConformance):
    entry = "intarsia-placements:owned"


class TestBlock(PlacementConformance):
    entry = "intarsia-placements:block"
    configs = (Block(tile=(2, 3)), Block(tile=(4,)), Block(tile=(2, 1, 3)), Block(tile=(2, -1)), Block(tile=(-1, -1)))


class TestReplicate(PlacementConformance):
    entry = "intarsia-placements:replicate"


class TestMixed(PlacementConformance):
    entry = "intarsia-placements:mixed"
    configs = (
        Mixed(),
        Mixed(rules=(MixedRule(match="*", placement=Owned()),), default=Flat()),
        Mixed(rules=(MixedRule(match="[a-m]*", placement=Owned()), MixedRule(match="*t*", placement=Flat(unit=4)))),
    )
