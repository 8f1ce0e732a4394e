"""The kit says which promise is broken, for checkpoint backends, optimizers, kernels and model families that break one each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import intarsia_testing.optimizer as optimizer_kit
import pytest
import torch
from intarsia import plugins
from intarsia.contracts import FileRecord, Init, KernelEntry, MixerSpec, Piece, StateItem, Storage, WrittenPart
from intarsia_checkpoint_stream.config import StreamConfig
from intarsia_llama3.config import Llama3Config, llama3
from intarsia_llama3.model import Llama3
from intarsia_models_common.attention import Attention
from intarsia_optimizers.config import AdamWConfig
from intarsia_testing import CheckpointBackendConformance, KernelConformance, ModelConformance, OptimizerConformance
from torch import Tensor
from torch.nn import functional as F


def says(kit: Any, test: str, promise: str) -> None:
    """The test fails, and says that `promise` is broken."""
    with pytest.raises(pytest.fail.Exception, match=f"promise `{promise}` is broken: "):
        getattr(kit, test)()


# ---------------------------------------------------------------- checkpoint backends


class Backend:
    """The stream backend, spoilt on the way."""

    def __init__(self, spoil_part: Any = None, spoil_tensors: Any = None, spoil_read: Any = None) -> None:
        self.inner = plugins.current().build(StreamConfig())
        self.spoil_part, self.spoil_tensors, self.spoil_read = spoil_part, spoil_tensors, spoil_read

    def write(self, storage: Storage, folder: str, rank: int, tensors: Iterable[tuple[StateItem, Any]]) -> Any:
        part = self.inner.write(storage, folder, rank, self.spoil_tensors(tensors) if self.spoil_tensors else tensors)
        return self.spoil_part(part) if self.spoil_part else part

    def read(self, storage: Storage, folder: str, pieces: Sequence[Piece], deliver: Callable[[Piece, memoryview], None]) -> None:
        (self.spoil_read or self.inner.read)(storage, folder, pieces, deliver)


def zeros(storage: Storage, folder: str, pieces: Sequence[Piece], deliver: Callable[[Piece, memoryview], None]) -> None:
    for piece in pieces:
        deliver(piece, memoryview(bytes(piece.length)))


def every_file(storage: Storage, folder: str, pieces: Sequence[Piece], deliver: Callable[[Piece, memoryview], None]) -> None:
    files = {name: storage.read(name) for name in storage.list(folder)}
    for piece in pieces:
        deliver(piece, memoryview(files[f"{folder}/{piece.file}"])[piece.offset : piece.offset + piece.length])


def nothing(storage: Storage, folder: str, pieces: Sequence[Piece], deliver: Callable[[Piece, memoryview], None]) -> None:
    return None


def zeroing(tensors: Iterable[tuple[StateItem, Any]]) -> Iterable[tuple[StateItem, Any]]:
    for item, boxes in tensors:
        yield item, boxes
        for _, tensor in boxes:
            tensor.zero_()


def unhashed(part: WrittenPart) -> WrittenPart:
    return dataclasses.replace(part, files=tuple(FileRecord(file.name, file.size, "0" * 64) for file in part.files))


def fewer(part: WrittenPart) -> WrittenPart:
    return dataclasses.replace(part, pieces=part.pieces[1:])


def beyond(part: WrittenPart) -> WrittenPart:
    return dataclasses.replace(part, pieces=tuple(dataclasses.replace(piece, offset=1 << 40) for piece in part.pieces))


@pytest.mark.parametrize(
    ("backend", "test", "promise"),
    [
        (lambda: Backend(spoil_part=unhashed), "test_shapes_come_back", "lists its files"),
        (lambda: Backend(spoil_part=fewer), "test_shapes_come_back", "writes every box"),
        (lambda: Backend(spoil_part=beyond), "test_shapes_come_back", "pieces lie in its files"),
        (lambda: Backend(spoil_read=zeros), "test_every_dtype_comes_back", "bytes come back"),
        (lambda: Backend(spoil_read=nothing), "test_uneven_boxes_come_back", "delivers each piece once"),
        (lambda: Backend(spoil_read=every_file), "test_reads_little_more_than_asked", "reads what is asked"),
        (lambda: Backend(spoil_tensors=list), "test_boxes_are_made_when_their_turn_comes", "keeps no tensor"),
        (lambda: Backend(spoil_tensors=zeroing), "test_buffers_are_not_changed", "(buffers are not changed|bytes come back)"),
    ],
)
def test_broken_backends(backend: Callable[[], Backend], test: str, promise: str) -> None:
    class Kit(CheckpointBackendConformance):
        def backends(self) -> list[Any]:
            return [backend()]

    says(Kit(), test, promise)


# ---------------------------------------------------------------- optimizers


class Sign:
    """A small right optimizer with momentum, whose parts the broken ones replace."""

    def __init__(self, config: AdamWConfig, groups: Sequence[Any], table: Any, comm: Any) -> None:
        self.config = config
        self.groups = [(group, {"lr": config.lr, "weight_decay": config.weight_decay, **group.options}) for group in groups]
        self.momentum = {name: torch.zeros_like(p) for group in groups for name, p in group.parameters.items()}
        self.hidden = 0.0

    @torch.no_grad()
    def step(self, factor: float | Tensor, names: Collection[str] | None = None) -> None:
        for group, settings in self.groups:
            for name, parameter in group.parameters.items():
                if parameter.grad is not None and (names is None or name in names):
                    self.update(name, parameter, settings["lr"] * factor, settings["weight_decay"])

    def update(self, name: str, parameter: Tensor, lr: Any, decay: float) -> None:
        assert parameter.grad is not None
        momentum = self.momentum[name].lerp_(parameter.grad, 0.5)
        parameter.mul_(1 - lr * decay).sub_(lr * momentum)

    def learning_rates(self) -> Mapping[str, float]:
        return {group.name: settings["lr"] for group, settings in self.groups}

    def slots(self) -> Mapping[str, Mapping[str, Tensor]]:
        return {name: {"momentum": momentum} for name, momentum in self.momentum.items()}


class Ascending(Sign):
    def update(self, name: str, parameter: Tensor, lr: Any, decay: float) -> None:
        super().update(name, parameter, -lr, decay)


class Noisy(Sign):
    def update(self, name: str, parameter: Tensor, lr: Any, decay: float) -> None:
        super().update(name, parameter, lr, decay)
        parameter += 1e-3 * torch.randn_like(parameter)


class Hidden(Sign):
    def update(self, name: str, parameter: Tensor, lr: Any, decay: float) -> None:
        self.hidden += 1.0
        super().update(name, parameter, lr / self.hidden, decay)


class Lazy(Sign):
    def slots(self) -> Mapping[str, Mapping[str, Tensor]]:
        return {name: held for name, held in super().slots().items() if held["momentum"].any()}


class Replaced(Sign):
    def update(self, name: str, parameter: Tensor, lr: Any, decay: float) -> None:
        super().update(name, parameter, lr, decay)
        self.momentum[name] = self.momentum[name].clone()


class OddSlots(Sign):
    def slots(self) -> Mapping[str, Mapping[str, Tensor]]:
        return {name: {"momentum": torch.zeros(3)} for name in self.momentum}


class Deaf(Sign):
    def step(self, factor: float | Tensor, names: Collection[str] | None = None) -> None:
        super().step(1.0, names)


class Everything(Sign):
    def step(self, factor: float | Tensor, names: Collection[str] | None = None) -> None:
        super().step(factor)


class Twice(Sign):
    """Right where names choose, wrong where they are parts of one step."""

    def step(self, factor: float | Tensor, names: Collection[str] | None = None) -> None:
        self.hidden += 1.0
        super().step(factor * (1.0 if names is None else 1.0 / self.hidden), names)


class Numbers(Sign):
    def step(self, factor: float | Tensor, names: Collection[str] | None = None) -> None:
        super().step(1.0 if isinstance(factor, Tensor) else factor, names)


class Coupled(Sign):
    def update(self, name: str, parameter: Tensor, lr: Any, decay: float) -> None:
        assert parameter.grad is not None
        parameter.grad += 0.1 * decay * parameter
        super().update(name, parameter, lr, 0.0)


class Ungrouped(Sign):
    def __init__(self, config: AdamWConfig, groups: Sequence[Any], table: Any, comm: Any) -> None:
        super().__init__(config, groups, table, comm)
        self.groups = [(group, {"lr": config.lr, "weight_decay": config.weight_decay}) for group in groups]


class Touching(Sign):
    def step(self, factor: float | Tensor, names: Collection[str] | None = None) -> None:
        for momentum in self.momentum.values():
            momentum += 1.0
        super().step(factor, names)


@pytest.mark.parametrize(
    ("optimizer", "test", "promise"),
    [
        (Ascending, "test_minimises", "minimises"),
        (Noisy, "test_deterministic", "deterministic"),
        (Hidden, "test_resume_is_exact", "resume is exact"),
        (Lazy, "test_slots_exist_before_the_first_step", "slots are created eagerly"),
        (Replaced, "test_slots_exist_before_the_first_step", "slots are live"),
        (OddSlots, "test_slots_match_elements", "slots match elements"),
        (Deaf, "test_factor_scales_the_learning_rate", "factor scales the learning rate"),
        (Numbers, "test_factor_may_be_a_tensor", "factor may be a tensor"),
        (Everything, "test_names_choose_what_is_updated", "names choose what is updated"),
        (Twice, "test_names_choose_what_is_updated", "names choose what is updated"),
        (Touching, "test_parameters_without_gradient_are_left_alone", "no gradient, no change"),
        (Coupled, "test_weight_decay_is_decoupled", "weight decay is decoupled"),
        (Ungrouped, "test_groups_override_fields", "groups override fields"),
    ],
)
def test_broken_optimizers(optimizer: type[Sign], test: str, promise: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = plugins.current()
    monkeypatch.setattr(optimizer_kit, "current", lambda: SimpleNamespace(entry_of=real.entry_of, target=lambda entry: optimizer))

    class Kit(OptimizerConformance):
        entry = "intarsia-optimizers:adamw"

    says(Kit(), test, promise)


# ---------------------------------------------------------------- kernels


def right(gate_NF: Tensor, up_NF: Tensor) -> Tensor:
    return F.silu(gate_NF) * up_NF


def renamed(gate: Tensor, up: Tensor) -> Tensor:
    return right(gate, up)


def off(gate_NF: Tensor, up_NF: Tensor) -> Tensor:
    return right(gate_NF, up_NF) * 1.01


def wrong_gradient(gate_NF: Tensor, up_NF: Tensor) -> Tensor:
    return right(gate_NF, up_NF.detach() * 0.5) + right(gate_NF, up_NF) - right(gate_NF.detach(), up_NF.detach() * 0.5)


def unwritten(gate_NF: Tensor, up_NF: Tensor) -> Tensor:
    memory = torch.empty(gate_NF.shape, dtype=gate_NF.dtype)
    return right(gate_NF, up_NF) + 0.0 * memory.nan_to_num(0.0) if not memory.isnan().any() else right(gate_NF, up_NF) + memory


def writing(gate_NF: Tensor, up_NF: Tensor) -> Tensor:
    output = right(gate_NF, up_NF)
    with torch.no_grad():
        gate_NF.data.add_(1.0)
    return output


calls: list[int] = []


def drifting(gate_NF: Tensor, up_NF: Tensor) -> Tensor:
    calls.append(1)
    return right(gate_NF, up_NF) * (1 + 1e-6 * len(calls))


def batched(gate_NF: Tensor, up_NF: Tensor) -> Tensor:
    return right(gate_NF, up_NF) * (1 + 1e-6 * gate_NF.shape[0])


def breaking(gate_NF: Tensor, up_NF: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    return right(gate_NF, up_NF)


@pytest.mark.parametrize(
    ("function", "test", "promise", "facts"),
    [
        (renamed, "test_signature_is_the_references", "signature", {}),
        (off, "test_output_and_gradients_are_within_bounds", "bounds", {}),
        (wrong_gradient, "test_output_and_gradients_are_within_bounds", "bounds", {}),
        (right, "test_output_and_gradients_are_within_bounds", "bounds", {"bounds": {}}),
        (lambda gate_NF, up_NF: right(gate_NF, up_NF) * (1 + 1e-6), "test_output_and_gradients_are_within_bounds", "bitwise", {"numerics": "bitwise"}),
        (lambda gate_NF, up_NF: right(gate_NF, up_NF) / 0, "test_output_and_gradients_are_within_bounds", "finite", {}),
        (lambda gate_NF, up_NF: right(gate_NF, up_NF).unsqueeze(0), "test_output_and_gradients_are_within_bounds", "shape", {}),
        (unwritten, "test_writes_every_element", "poisoned outputs", {}),
        (writing, "test_leaves_its_inputs_unchanged", "unchanged inputs", {}),
        (drifting, "test_is_reproducible_where_declared", "reproducible", {"numerics": "reproducible"}),
        (batched, "test_is_invariant_where_declared", "invariant", {"invariant": True}),
        (breaking, "test_may_sit_in_a_compiled_region_where_declared", "in_compile", {"in_compile": True}),
    ],
)  # fmt: skip
def test_broken_kernels(function: Any, test: str, promise: str, facts: dict[str, Any]) -> None:
    class Kit(KernelConformance):
        op = "swiglu"

        def found_entry(self) -> KernelEntry:
            values = {"bounds": {"*@float32": 1e-5, "*@bfloat16": 2e-2}, "dtypes": ("float32",), **facts}
            return KernelEntry(name="broken", op="swiglu", target="", doc="", **values)

        def _function(self) -> Any:
            return function

    says(Kit(), test, promise)


# ---------------------------------------------------------------- model families


class Family(ModelConformance):
    entry = "llama3"

    def config(self) -> Llama3Config:
        return llama3(dim=16, layers=2, heads=2, kv_heads=1, head_dim=8, hidden=24, vocab_size=48, tied=True, max_positions=64)


forward, inits, regions = Llama3.forward, Llama3.inits, Llama3.regions


def peeking(self: Any, tokens_BS: Tensor, context: Any) -> Tensor:
    hidden = forward(self, tokens_BS, context)
    return hidden + 0.01 * hidden.flip(1)


def leaking(self: Any, tokens_BS: Tensor, context: Any) -> Tensor:
    hidden = forward(self, tokens_BS, context)
    return hidden + 0.01 * hidden.cumsum(1)


def batch_norm(self: Any, tokens_BS: Tensor, context: Any) -> Tensor:
    hidden = forward(self, tokens_BS, context)
    return hidden - hidden.mean(0, keepdim=True)


def without_grad(self: Any, tokens_BS: Tensor, context: Any) -> Tensor:
    hidden = forward(self, tokens_BS, context)
    return hidden.detach() + 0.0 * self.norm.weight


@pytest.mark.parametrize(
    ("attribute", "broken", "test", "promise"),
    [
        ("forward", peeking, "test_no_token_sees_the_future", "causal"),
        ("forward", leaking, "test_documents_do_not_see_each_other", "packing"),
        ("forward", batch_norm, "test_rows_are_independent", "rows"),
        ("forward", without_grad, "test_every_parameter_gets_a_gradient", "gradients"),
        ("inits", lambda self: dict(list(inits(self).items())[1:]), "test_every_parameter_has_an_init", "inits"),
        ("inits", lambda self: {**inits(self), "ghost": Init("zeros")}, "test_every_parameter_has_an_init", "inits"),
        ("regions", lambda self: dataclasses.replace(regions(self), blocks=()), "test_regions_are_real", "regions"),
        ("regions", lambda self: dataclasses.replace(regions(self), blocks=regions(self).blocks[::-1]), "test_regions_are_real", "regions"),
        ("regions", lambda self: dataclasses.replace(regions(self), ties=()), "test_regions_are_real", "parameters"),
        ("head_weight_VD", property(lambda self: self.head.weight * 2), "test_loss_of_hidden_is_loss_of_logits", "head"),
        ("flops_per_token", lambda self, tokens: 1.0, "test_flops_are_near_a_count", "flops"),
        ("fill_buffers", lambda self: None, "test_builds_on_the_meta_device", "buffers"),
    ],
)
def test_broken_families(attribute: str, broken: Any, test: str, promise: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Llama3, attribute, broken)
    says(Family(), test, promise)


def test_a_mixer_that_hides_its_cache_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Attention, "cache_spec", lambda self: MixerSpec("softmax", ()))
    says(Family(), "test_mixers_declare_their_caches", "mixers")
