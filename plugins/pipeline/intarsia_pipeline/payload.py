"""What one stage hands to the next: a tree of tuples, lists and dicts of tensors, and what both sides must know of it. Torch."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import torch
from intarsia.errors import PluginError
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One tensor of a payload. `differentiable`: the receiver sends a gradient back."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    differentiable: bool

    def empty(self, device: torch.device) -> Tensor:
        """Memory for it."""
        return torch.empty(self.shape, dtype=getattr(torch, self.dtype), device=device)

    def __str__(self) -> str:
        return f"{self.path or 'the payload'}: {list(self.shape)} {self.dtype}{', with gradient' if self.differentiable else ''}"


@dataclasses.dataclass(frozen=True)
class Form:
    """A payload without its values: the tree with numbers in the place of tensors, and the tensors' leaves by number. Equal on both sides of an edge."""

    tree: Any
    leaves: tuple[Leaf, ...]

    def text(self) -> bytes:
        """As JSON."""
        return json.dumps({"tree": self.tree, "leaves": [dataclasses.astuple(leaf) for leaf in self.leaves]}).encode()

    @classmethod
    def of_text(cls, text: bytes) -> Form:
        """The inverse."""
        found = json.loads(text)
        return cls(found["tree"], tuple(Leaf(path, tuple(shape), dtype, grad) for path, shape, dtype, grad in found["leaves"]))

    def build(self, tensors: list[Tensor]) -> Any:
        """The payload with these tensors."""
        return _build(self.tree, tensors)

    def difference(self, other: Form) -> str:
        """In words, what is different in `other`."""
        if self.tree != other.tree:
            return f"the tree was {json.dumps(self.tree)} and is {json.dumps(other.tree)}"
        changed = [f"{mine} became {theirs}" for mine, theirs in zip(self.leaves, other.leaves, strict=True) if mine != theirs]
        return "; ".join(changed[:4])


def form_of(payload: Any) -> tuple[Form, list[Tensor]]:
    """The form of a payload, and its tensors in order. PluginError for what is no tensor, tuple, list or dict with text keys."""
    tensors: list[Tensor] = []
    leaves: list[Leaf] = []
    tree = _read(payload, "", tensors, leaves)
    if not tensors:
        raise PluginError("A pipeline stage handed on a payload without a tensor: the next stage would not know when it is done.")
    return Form(tree, tuple(leaves)), tensors


def _read(value: Any, path: str, tensors: list[Tensor], leaves: list[Leaf]) -> Any:
    if isinstance(value, Tensor):
        tensors.append(value)
        differentiable = value.requires_grad and (value.is_floating_point() or value.is_complex())
        leaves.append(Leaf(path, tuple(value.shape), str(value.dtype).removeprefix("torch."), differentiable))
        return len(tensors) - 1
    if isinstance(value, tuple | list):
        name = "list" if isinstance(value, list) else "tuple"
        return [name, [_read(each, f"{path}[{index}]", tensors, leaves) for index, each in enumerate(value)]]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return ["dict", [[key, _read(each, f"{path}.{key}" if path else key, tensors, leaves)] for key, each in value.items()]]
    if value is None:
        return ["none", []]
    raise PluginError(
        f"A pipeline stage handed on {type(value).__name__} at {path or 'the top'}: a payload is a tensor, or tuples, lists and dicts (with text keys) of tensors and None."
    )


def _build(tree: Any, tensors: list[Tensor]) -> Any:
    if isinstance(tree, int):
        return tensors[tree]
    name, items = tree
    if name == "none":
        return None
    if name == "dict":
        return {key: _build(each, tensors) for key, each in items}
    made = [_build(each, tensors) for each in items]
    return made if name == "list" else tuple(made)
