"""The ops of a rule: what happens to tensors of theirs until they are ours, step by step, and back again.

A chain of steps takes a list of tensors to a list of tensors; most do the same to each. H heads, K parts, d rows of a head's part.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Mapping, Sequence

import torch
from intarsia.contracts import HFRule
from intarsia.errors import CheckpointError, PluginError, did_you_mean
from torch import Tensor

NAMES = ("same", "transpose", "rope_half_to_pairs", "split:K", "split:K@1", "split_heads:K", "flatten:SIZES", "stack", "copy")
LAYER = re.compile(r"\{i(?:\+([\w.]+))?\}")
"""A layer's number in a name of theirs: `{i}`, or `{i+FIELD}`, which counts from what the config's FIELD says."""

_STEP = re.compile(
    r"(?P<kind>same|transpose|stack|copy|rope_half_to_pairs|(?P<split>split|split_heads):(?P<parts>[1-9]\d*)(?:@(?P<dim>[01]))?|flatten:(?P<sizes>[\w.,*]+))"
)

Shape = tuple[int, ...]
Sizes = Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class Step:
    """One op of a chain. `parts` and `dim` of the splits, `sizes` of flatten: the dims that are joined."""

    kind: str
    parts: int = 1
    dim: int = 0
    sizes: tuple[str, ...] = ()


@functools.cache
def steps_of(op: str) -> tuple[Step, ...]:
    """The steps of a rule's op, in the order of an import. ValueError, which names the one that is none, else."""
    steps = []
    for text in op.split("|"):
        found = _STEP.fullmatch(text)
        if found is None or (found["split"] == "split_heads" and found["dim"]):
            raise ValueError(text)
        kind = found["split"] or found["kind"].partition(":")[0]
        steps.append(
            Step(kind, int(found["parts"] or 1), int(found["dim"] or 0), tuple((found["sizes"] or "").split(",")) if found["sizes"] else ())
        )
    return tuple(steps)


def check(rule: HFRule) -> None:
    """PluginError where a rule is not well formed."""
    if wrong := _wrong(rule):
        raise PluginError(f"The Hugging Face rule {rule.theirs!r} -> {rule.ours!r} is not well formed: {wrong}.")


def _wrong(rule: HFRule) -> str | None:
    ours = (rule.ours,) if isinstance(rule.ours, str) else rule.ours
    try:
        steps = steps_of(rule.op)
    except ValueError as error:
        return f"its op {str(error)!r} is none of {', '.join(NAMES)}"
    kinds = [step.kind for step in steps]
    several = [place for place, kind in enumerate(kinds) if kind.startswith("split")]
    parts = steps[several[0]].parts if several else 1
    wrong = {
        "copy stands alone": "copy" in kinds and len(kinds) > 1,
        "only one side has {i}": "copy" not in kinds and any(("{i}" in name) != bool(LAYER.search(rule.theirs)) for name in ours),
        "{e} goes with op stack, and stack with {e}": ("{e}" in rule.theirs) != ("stack" in kinds),
        "it splits or stacks more than once": len(several) > 1 or kinds.count("stack") > 1,
        "it stacks after it splits": bool(several) and "stack" in kinds[several[0] :],
        f"it has {len(ours)} names of ours and op {rule.op!r}": len(ours) != parts,
        "`heads` goes with the ops rope_half_to_pairs, split_heads and copy": bool(
            {"rope_half_to_pairs", "split_heads", "copy"} & set(kinds)
        )
        != bool(rule.heads),
        "flatten has one * at most": any(step.sizes.count("*") > 1 for step in steps),
    }
    return next((text for text, is_wrong in wrong.items() if is_wrong), None)


@dataclasses.dataclass(frozen=True)
class Chain:
    """A rule's op with the numbers that it needs. `where` names the rule in messages.

    Tensors are numbered by stage: stage 0 are theirs, stage n those behind the n-th step, the last stage ours.
    """

    op: str
    where: str
    heads: str
    sizes: Sizes

    @property
    def steps(self) -> tuple[Step, ...]:
        """In the order of an import."""
        return steps_of(self.op)

    def number(self, name: str) -> int:
        """What a config's field says: the first of those joined by `|` that it has."""
        fields = [field for field in name.split("|") if field in self.sizes]
        if not fields:
            raise PluginError(
                f"The Hugging Face rule for {self.where} needs the config's {name!r}, a whole number. {did_you_mean(name, self.sizes)}"
            )
        return self.sizes[fields[0]]

    def inner(self, step: Step, columns: int) -> Shape:
        """The dims that flatten joins to `columns`."""
        sizes = [-1 if name == "*" else int(name) if name.isdigit() else self.number(name) for name in step.sizes]
        known = math.prod(size for size in sizes if size >= 0)
        shape = tuple(columns // max(1, known) if size < 0 else size for size in sizes)
        if math.prod(shape) != columns:
            raise CheckpointError(
                f"{self.where} has {columns} values in a row, which are not {' x '.join(map(str, sizes))} ({', '.join(step.sizes)})."
            )
        return shape

    def shapes(self, ours: Sequence[Shape], theirs: int) -> list[list[Shape]]:
        """Whole shapes of every stage's tensors, from those of ours; `theirs` is how many tensors a stack has."""
        found = [list(ours)]
        for step in reversed(self.steps):
            after = found[0]
            if step.kind == "stack":
                before = [after[0][1:]] * theirs
            elif step.kind in ("split", "split_heads"):
                joined = list(after[0])
                joined[step.dim] = sum(shape[step.dim] for shape in after)
                before = [tuple(joined)]
            else:
                before = [self._shape_before(step, shape) for shape in after]
            found.insert(0, before)
        return found

    def _shape_before(self, step: Step, shape: Shape) -> Shape:
        if step.kind == "transpose":
            return (*shape[:-2], shape[-1], shape[-2])
        return (*shape[:1], *self.inner(step, shape[1])) if step.kind == "flatten" else shape

    # ------------------------------------------------------------ whole tensors

    def forward(self, tensors: Sequence[Tensor], ours: Sequence[Shape] | None) -> list[Tensor]:
        """Ours from theirs, views where possible. `ours` are our shapes, for splits into unequal parts."""
        current = list(tensors)
        stages = None if ours is None else self.shapes(ours, len(tensors))
        for number, step in enumerate(self.steps):
            after = None if stages is None else stages[number + 1]
            if step.kind == "stack":
                current = [torch.stack(current)]
            elif step.kind == "split":
                current = self._split(current[0], step, after)
            elif step.kind == "split_heads":
                heads = self.number(self.heads)
                apart = self._rows(current[0], heads * step.parts).unflatten(0, (heads, step.parts, -1))
                current = [part.flatten(0, 1) for part in apart.unbind(1)]
            else:
                current = [self._forward_one(step, tensor) for tensor in current]
        return current

    def _forward_one(self, step: Step, tensor: Tensor) -> Tensor:
        if step.kind == "transpose":
            return tensor.transpose(-2, -1)
        if step.kind == "flatten":
            return tensor.flatten(1)
        if step.kind == "rope_half_to_pairs":
            heads = self.number(self.heads)
            return self._rows(tensor, 2 * heads).unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        return tensor

    def _split(self, tensor: Tensor, step: Step, after: Sequence[Shape] | None) -> list[Tensor]:
        size = tensor.shape[step.dim] if tensor.dim() > step.dim else 0
        parts = [size // step.parts] * step.parts if after is None else [shape[step.dim] for shape in after]
        if sum(parts) != size:
            what = "columns" if step.dim else "rows"
            raise CheckpointError(f"{self.where} has {size} {what}, which do not split into {' + '.join(map(str, parts))}.")
        return list(tensor.split(parts, step.dim))

    def _rows(self, tensor: Tensor, parts: int) -> Tensor:
        if tensor.shape[0] % parts:
            raise CheckpointError(
                f"{self.where} has {tensor.shape[0]} rows, no multiple of {parts} ({self.heads} is {self.number(self.heads)})."
            )
        return tensor

    def backward(self, tensors: Sequence[Tensor], theirs: int) -> list[Tensor]:
        """Theirs from ours: the inverse of `forward`."""
        current = list(tensors)
        for step in reversed(self.steps):
            if step.kind == "stack":
                current = list(current[0].unbind(0))
            elif step.kind == "split":
                current = [torch.cat(current, step.dim)]
            elif step.kind == "split_heads":
                heads = self.number(self.heads)
                current = [torch.stack([self._rows(part, heads).unflatten(0, (heads, -1)) for part in current], 1).flatten(0, 2)]
            else:
                current = [self._backward_one(step, tensor) for tensor in current]
        return current

    def _backward_one(self, step: Step, tensor: Tensor) -> Tensor:
        if step.kind == "transpose":
            return tensor.transpose(-2, -1)
        if step.kind == "flatten":
            return tensor.unflatten(1, self.inner(step, tensor.shape[1]))
        if step.kind == "rope_half_to_pairs":
            heads = self.number(self.heads)
            return self._rows(tensor, 2 * heads).unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
        return tensor
