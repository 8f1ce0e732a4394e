"""What each module and each operator of a model gave for each token, so that two passes can be laid side by side.

A pass is a call of the model on tokens of which the recorder is told beforehand whose they are (`tokens`). Results that have one row for each of these tokens are kept row by row; of others
only the call is kept. N tokens of a call.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from intarsia import ops
from torch import Tensor, nn

Token = tuple[str, int]
"""A sequence's name and a position in it."""


@dataclasses.dataclass(frozen=True)
class Place:
    """A module, or the n-th call of an operator within one call of a module."""

    module: str
    op: str = ""
    number: int = 0


class Recorder:
    """Rows by place and token. `calls` are the places in the order in which they were first reached, `unaligned` those that had other rows than the tokens."""

    def __init__(self) -> None:
        self.calls: dict[Place, None] = {}
        self.unaligned: set[Place] = set()
        self.rows: dict[Place, dict[Token, Tensor]] = {}
        self._tokens: list[Token | None] = []
        self._stack: list[tuple[str, dict[str, int]]] = []
        self._parts: dict[tuple[str, str], list[Tensor]] = {}

    def tokens(self, tokens: Sequence[Token | None]) -> None:
        """Whose the next call's tokens are, in a line; None is padding."""
        self._parts.clear()
        self._tokens = list(tokens)

    @contextlib.contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Record what modules of the model give within a `with` block."""
        handles = []
        for name, module in model.named_modules():
            handles.append(module.register_forward_pre_hook(functools.partial(self._enter, name)))
            handles.append(module.register_forward_hook(functools.partial(self._leave, name)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def choices(self, choices: Mapping[str, ops.Choice]) -> dict[str, ops.Choice]:
        """The same kernels, recorded."""
        known = ops.operators()
        return {
            op: dataclasses.replace(choice, function=self._recorded(op, choice.function or known[op].reference))
            for op, choice in choices.items()
        }

    def _enter(self, name: str, *_: Any) -> None:
        self._stack.append((name, {}))

    def _leave(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        self._stack.pop()
        self._note(Place(name), output)

    def _recorded(self, op: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def recorded(*arguments: Any, **named: Any) -> Any:
            output = function(*arguments, **named)
            if self._stack:
                module, counts = self._stack[-1]
                counts[op] = counts.get(op, -1) + 1
                self._note(Place(module, op, counts[op]), output)
            return output

        return recorded

    def _note(self, place: Place, output: Any) -> None:
        value = output[0] if isinstance(output, tuple) and output else output
        if not isinstance(value, Tensor) or not value.dim():
            self.calls.setdefault(place)
            return
        lines, count = value.detach(), len(self._tokens)
        if lines.shape[0] != count and lines.dim() > 2:
            lines = lines.flatten(0, 1)
        if place.op and self._stack and 0 < lines.shape[0] < count:
            # A runtime may call an operator several times for what another calls it once, with some of the tokens each time.
            parts = self._parts.setdefault((place.module, place.op), [])
            parts.append(lines)
            if sum(part.shape[0] for part in parts) < count:
                return
            lines = torch.cat(self._parts.pop((place.module, place.op)))
            place = dataclasses.replace(place, number=place.number - len(parts) + 1)
            self._stack[-1][1][place.op] = place.number
        self.calls.setdefault(place)
        if lines.shape[0] != count:
            self.unaligned.add(place)
            return
        kept = self.rows.setdefault(place, {})
        copied = lines.reshape(count, -1).to("cpu", copy=True)
        for token, row in zip(self._tokens, copied, strict=True):
            if token is not None:
                kept[token] = row


@dataclasses.dataclass(frozen=True)
class Difference:
    """Where two passes part for the first time."""

    module: str
    op: str
    token: Token
    largest: float

    def __str__(self) -> str:
        where = f"module {self.module or '(the model)'}" + (f", operator {self.op}" if self.op else "")
        return f"{where}: sequence {self.token[0]}, position {self.token[1]}, by up to {self.largest:.3g}"


def first_difference(one: Recorder, other: Recorder) -> Difference | None:
    """The first place, in the order of `one`, whose rows of a token differ between both; None where all that both have are equal.

    Places that hold others come after these, so that it is the innermost. Where calls right before it could not be compared row by row, it is the first of these.
    """
    doubtful: Place | None = None
    for place in one.calls:
        rows, others = one.rows.get(place, {}), other.rows.get(place, {})
        common = sorted((rows.keys() & others.keys()), key=lambda token: (token[1], token[0]))
        common = [token for token in common if rows[token].shape == others[token].shape]
        if not common:
            doubtful = doubtful or (place if place.op else None)
            continue
        for token in common:
            if not torch.equal(rows[token], others[token]):
                largest = float((rows[token].double() - others[token].double()).abs().max())
                place = doubtful or place
                return Difference(place.module, place.op, token, largest)
        doubtful = None
    return None
