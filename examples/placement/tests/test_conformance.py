"""The placement keeps the promises of placements."""

from __future__ import annotations

from acme_zigzag.config import ZigzagConfig
from intarsia_testing import PlacementConformance


class TestZigzag(PlacementConformance):
    entry = "acme-zigzag:zigzag"
    configs = (ZigzagConfig(), ZigzagConfig(blocks=3))
    max_examples = 15
