"""vLLM's weight transfer engine for what a trainer of ours publishes: read, copied in place, read back and compared by digest (`intarsia_rl.weights`)."""

from __future__ import annotations

import dataclasses
from typing import Any

from intarsia.errors import IntarsiaError
from intarsia_rl.contracts import WeightVersion
from intarsia_rl.weights.fill import fill
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo


@dataclasses.dataclass
class Nothing(WeightTransferInitInfo):
    """There is nothing to set up: each version says where it is."""


@dataclasses.dataclass
class Published(WeightTransferUpdateInfo):
    """`weights` are the fields of a `WeightVersion`."""

    weights: dict[str, Any]


class PublishedWeightsEngine(WeightTransferEngine[Nothing, Published]):
    """The engine `intarsia`. The model's parameters are the canonical ones, so nothing is fused, renamed or processed.

    What fails is kept with the model as its `failure` and does not end vLLM's process: the model has no version then, and the generator serves nothing until an update succeeds.
    """

    init_info_cls = Nothing
    update_info_cls = Published
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: Nothing) -> None:
        """Nothing to do."""

    def start_weight_update(self) -> None:
        """Nothing to do: tensors are copied in place."""

    def receive_weights(self, update_info: Published) -> None:
        """Take a version."""
        ours: Any = self.model
        weights = WeightVersion(**update_info.weights)
        ours.version, ours.failure = -1, None
        try:
            fill(ours.model, weights, ours.plugins)
        except IntarsiaError as error:
            ours.failure = [type(error).__name__, str(error)]
        else:
            ours.version = weights.version

    def finish_weight_update(self) -> None:
        """Nothing to do."""

    def shutdown(self) -> None:
        """Nothing is held between updates."""
