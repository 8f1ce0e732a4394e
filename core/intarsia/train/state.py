"""The parts of a run's state that are neither the loader's nor a plugin's own: weights, optimizer slots, progress, random generators."""

from __future__ import annotations

import dataclasses
import random
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from intarsia.checkpoint.weights import check_fit
from intarsia.contracts import Optimizer, Run, ShardedModel, StateItem, WeightReader
from intarsia.layout import whole_region
from intarsia.parameters import ParameterTable, persistent_buffers


def _tensor_item(owner: str, name: str, table: ParameterTable, parameter: str, tensor: torch.Tensor) -> StateItem:
    """What is laid out as a parameter is, in a dtype of its own."""
    info = table[parameter]
    layout: Any = dataclasses.replace(info.layout, dtype=str(tensor.dtype).removeprefix("torch."))  # type: ignore[type-var]
    return StateItem(owner, name, "tensor", tensor, layout, is_copy=info.is_copy)


class ModelState:
    """Parameters by canonical name with their layouts, and persistent buffers, which are equal on all ranks."""

    def __init__(self, model: nn.Module, sharded: ShardedModel, table: ParameterTable):
        self._model, self._sharded, self._table = model, sharded, table

    def state(self) -> list[StateItem]:
        """See `intarsia.contracts.Stateful`."""
        masters = self._sharded.masters().items()
        items = [_tensor_item("model", name, self._table, name, value.detach()) for name, value in masters]
        return items + [StateItem("model", name, "replicated", buffer) for name, buffer in persistent_buffers(self._model).items()]

    def fill(self, weights: WeightReader) -> None:
        """Take weights of the same names and shapes; each rank reads only the boxes that it stores. CheckpointError lists what does not fit."""
        items = {item.name: item for item in self.state()}
        wanted, mesh = {name: tuple((item.layout or item.value).shape) for name, item in items.items()}, self._table.mesh
        if mesh is not None and mesh.sizes["pp"] > 1:  # The other stages' parts belong to the model as well.
            everywhere = mesh.world.gather_json(wanted, what="names of the model")
            wanted = {name: tuple(shape) for each in everywhere for name, shape in each.items()}
        check_fit(weights, wanted)
        for name, item in items.items():
            region = whole_region(item.value.shape) if item.layout is None else item.layout.local(self._table.rank_in(item.layout))
            offset, flat = 0, item.value.view(-1)
            for box in region:
                flat[offset : offset + box.numel].copy_(weights.read(name, box).reshape(-1))
                offset += box.numel
        self.load_state({name: item.value for name, item in items.items()})

    def load_state(self, values: Mapping[str, Any], missing_rank_state: bool = False) -> None:
        """Masters are in the tensors that `state` gave; whatever was gathered from them is stale."""
        for name, buffer in persistent_buffers(self._model).items():
            if name in values:
                buffer.copy_(values[name])
        self._sharded.load_masters({name: values[name] for name in self._sharded.parameters() if name in values})
        self._sharded.after_update()


class OptimizerState:
    """Optimizer slots as `PARAMETER/SLOT`: laid out like their parameter, or scalars that are equal on all ranks."""

    def __init__(self, optimizer: Optimizer, table: ParameterTable):
        self._optimizer, self._table = optimizer, table

    def state(self) -> list[StateItem]:
        """See `intarsia.contracts.Stateful`."""
        items = []
        for parameter, slots in self._optimizer.slots().items():
            for slot, tensor in slots.items():
                name = f"{parameter}/{slot}"
                scalar = StateItem("optimizer", name, "replicated", tensor)
                items.append(_tensor_item("optimizer", name, self._table, parameter, tensor) if tensor.ndim else scalar)
        return items

    def load_state(self, values: Mapping[str, Any], missing_rank_state: bool = False) -> None:
        """Scalars are taken here; the others are in place already."""
        for parameter, slots in self._optimizer.slots().items():
            for slot, tensor in slots.items():
                if not tensor.ndim:
                    tensor.copy_(values[f"{parameter}/{slot}"])


class Progress:
    """How many steps are done, and what has been trained on."""

    def __init__(self, run: Run):
        self._run = run
        self.tokens = 0

    def state(self) -> list[StateItem]:
        """See `intarsia.contracts.Stateful`."""
        return [StateItem("train", "progress", "replicated", {"step": self._run.step, "tokens": self.tokens})]

    def load_state(self, values: Mapping[str, Any], missing_rank_state: bool = False) -> None:
        """See `intarsia.contracts.Stateful`."""
        self._run.step, self.tokens = values["progress"]["step"], values["progress"]["tokens"]


class RandomState:
    """The process-wide generators of Python, NumPy, torch and the device. Loading keeps them aside until `restore`, which comes last of all."""

    def __init__(self, seed: int, rank: int, device: torch.device):
        self._seed, self._rank, self._device = seed, rank, device
        self._loaded: Mapping[str, Any] = {}
        self.rederived = False

    def state(self) -> list[StateItem]:
        """See `intarsia.contracts.Stateful`. Names are the generators'."""
        version, words, gauss = random.getstate()
        values: dict[str, Any] = {"python": [version, list(words), gauss], "torch": torch.get_rng_state()}
        if (numpy := sys.modules.get("numpy")) is not None:
            name, keys, position, has_gauss, cached = numpy.random.get_state()
            values["numpy"] = [name, keys.tolist(), position, has_gauss, cached]
        if self._device.type == "cuda":
            values["device"] = torch.cuda.get_rng_state(self._device)
        return [StateItem("random", name, "rank", value) for name, value in values.items()]

    def load_state(self, values: Mapping[str, Any], missing_rank_state: bool = False) -> None:
        """See `intarsia.contracts.Stateful`."""
        self._loaded, self.rederived = ({}, True) if missing_rank_state else (dict(values), False)

    def restore(self, step: int) -> None:
        """Set every generator: as loaded, else as a function of seed, rank and step, whatever set-up has drawn."""
        seed = (self._seed * 1_000_003 + self._rank * 8_191 + step) % 2**32
        random.seed(seed)
        torch.manual_seed(seed)
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.seed(seed)
        if "python" in self._loaded:
            version, words, gauss = self._loaded["python"]
            random.setstate((version, tuple(words), gauss))
            torch.set_rng_state(self._loaded["torch"].cpu())
        if numpy is not None and "numpy" in self._loaded:
            name, keys, position, has_gauss, cached = self._loaded["numpy"]
            numpy.random.set_state((name, numpy.array(keys, dtype="uint32"), position, has_gauss, cached))
        if self._device.type == "cuda" and "device" in self._loaded:
            torch.cuda.set_rng_state(self._loaded["device"].cpu(), self._device)
