"""Our dispatchers keep the promises of dispatchers, and the kit finds those that do not."""

from __future__ import annotations

from typing import Any

import pytest
from intarsia_models_common.moe.dispatch import Arrived, Capabilities
from intarsia_parallel.experts.config import AllToAllConfig, FixedCapacityConfig
from intarsia_testing.dispatcher import DispatcherConformance


class TestLocal(DispatcherConformance):
    entry = "intarsia-models-common:local"
    ranks = (1,)


class TestAllToAll(DispatcherConformance):
    entry = "intarsia-parallel:all_to_all"
    configs = (AllToAllConfig(), AllToAllConfig(overlap=False))


class TestFixedCapacity(DispatcherConformance):
    entry = "intarsia-parallel:fixed_capacity"
    configs = (FixedCapacityConfig(factor=4.0, tokens=9), FixedCapacityConfig(factor=100.0, tokens=20, overflow="drop", overlap=False))


class Wrong(TestAllToAll):
    """The kit's own double: one promise broken at a time."""

    __test__ = False
    configs = (AllToAllConfig(),)
    ranks = (2,)
    fault = ""

    def _dispatcher(self, config: Any, experts: int, comm: Any) -> Any:
        made = super()._dispatcher(config, experts, comm)
        start, fault = made.start, self.fault

        def broken_start(x_ND: Any, experts_NK: Any, weights_NK: Any) -> Any:
            flight = start(x_ND, experts_NK, weights_NK.detach() if fault == "weights" else weights_NK)
            arrive = flight.arrive

            def broken_arrive() -> Arrived:
                arrived = arrive()
                return Arrived(arrived.x_MD.flip(0) if fault == "order" else arrived.x_MD, arrived.counts_e)

            flight.arrive = broken_arrive
            if fault == "counts":
                flight.counts_E = flight.counts_E + 1
            return flight

        made.start = broken_start
        if fault == "static":
            made.capabilities = Capabilities(needs_host_sync=False, static_shapes=True, drops_tokens=False)
        return made


@pytest.mark.parametrize(
    ("fault", "test", "text"),
    [
        ("order", "equals_one_process", "equals one process"),
        ("weights", "equals_one_process", "weights' gradient"),
        ("counts", "passes_follow_each_other", "counts_E"),
        ("static", "capabilities_are_kept", "static_shapes"),
    ],
)
def test_the_kit_finds_what_is_wrong(fault: str, test: str, text: str) -> None:
    kit = type("Kit", (Wrong,), {"fault": fault})()
    with pytest.raises(pytest.fail.Exception, match=text):
        getattr(kit, f"test_{test}")()
