"""What a plugin hands to a registry: a name, a sentence, and where the code is. Torch-free."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

Numerics = Literal["bitwise", "reproducible", "tolerance"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """One named choice of one kind. Stability: stable.

    `target` and `config` are `"module:attribute"` strings, so that listing plugins imports nothing heavy. `config` names a
    chz class (a subclass of the kind's base class in `intarsia.config`) that belongs to this entry alone: the class says
    which entry was chosen. Without a `config` the entry has no settings. How `target` is called is part of the kind: see
    the kind's hook in `intarsia.hookspecs`.

    `kind`, `owner` (the distribution's name) and `plugin` (`distribution/entry-point`) are filled in by the loader.
    """

    name: str
    target: str
    doc: str
    config: str | None = None
    kind: str = ""
    owner: str = ""
    plugin: str = ""

    @property
    def full_name(self) -> str:
        """`owner:name`, the name that never clashes."""
        return f"{self.owner}:{self.name}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelEntry(Entry):
    """A model family. Stability: provisional.

    `hf` names an `intarsia.contracts.HFTable`; `sharding` names the family's sharding table; `architectures` are the values
    of `architectures` in a Hugging Face `config.json` that this family reads.
    """

    hf: str | None = None
    sharding: str | None = None
    architectures: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelEntry(Entry):
    """An implementation of one operator of `intarsia.ops`. Stability: provisional.

    `target` names a callable with the signature of the operator's reference. `needs` lists capabilities as
    `intarsia.device.capabilities()` names them ("cpu", "cuda", "sm90", "triton", ...), all of which must be present;
    `dtypes` the dtypes of the operator's first tensor it accepts (empty: all). `numerics` says how it compares with the reference: `bitwise` equal,
    `reproducible` (equal to itself, run to run), or `tolerance` with `bounds` (relative error against float64, for each
    output and gradient by name, `"*"` for all; `"NAME@DTYPE"` for one dtype). `invariant` promises that a row's result does not depend on the batch
    around it; `in_compile` that it may sit inside a compiled region. Under `auto` the highest `priority` that
    fits is chosen; the reference has priority 0.
    """

    op: str
    needs: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    numerics: Numerics = "tolerance"
    bounds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    invariant: bool = False
    in_compile: bool = False
    priority: int = 0
