"""Muon (Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024) for matrices, AdamW for the rest.

    momentum   M <- mu M + (1 - mu) G
    direction  D = (1 - mu) G + mu M (Nesterov), else M
    update     W <- (1 - lr wd) W - lr s(W) NS(D)

NS is the quintic Newton-Schulz iteration towards the nearest orthogonal matrix (`intarsia_optimizers.updates.newton_schulz`) and needs the whole matrix. Matrices that are
whole on this rank are worked on here, and no rank is spoken to; what is cut travels to an owner and back (`intarsia_optimizers.ownership`). Momentum lies with
the parameter's own part in either case.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from intarsia.contracts import Box, OptimizerGroup
from intarsia.layout import Layout
from torch import Tensor

from intarsia_optimizers.adamw import AdamRule, choose_implementation
from intarsia_optimizers.config import MuonConfig
from intarsia_optimizers.elementwise import Elementwise
from intarsia_optimizers.kernels import choose_kernel
from intarsia_optimizers.matrices import check_splits, find_split, is_matrix, matrices_of, unmatched
from intarsia_optimizers.muon_update import Cut, Kernels, Update, Whole, plan, wire_of
from intarsia_optimizers.ownership import Axes, cut_text, find_ownership, group_of
from intarsia_optimizers.runs import Member, Order, allocate, local_member, master_dtype
from intarsia_optimizers.settings import BOUNDS, check_choice, check_state_dtype, group_settings
from intarsia_optimizers.updates import Scalar, muon_apply, muon_directions, newton_schulz

if TYPE_CHECKING:
    from intarsia.comm import Communicator
    from intarsia.parameters import ParameterTable

log = logging.getLogger("intarsia.optimizers")

MUON_BOUNDS = {
    **BOUNDS,
    "newton_schulz_steps": (1, 100),
    "coefficients": (-math.inf, math.inf),
    "batch_elements": (1, math.inf),
    "adamw_lr": (0.0, math.inf),
    "adamw_weight_decay": (0.0, math.inf),
    "adamw_betas": (0.0, 1.0),
    "adamw_eps": (0.0, math.inf),
}

# Fields that say how the step as a whole is carried out.
WHOLE = (
    "state_dtype",
    "batch_elements",
    "split",
    "newton_schulz_kernel",
    "newton_schulz_dtype",
    "newton_schulz_steps",
    "coefficients",
    "eps",
    "adamw_implementation",
)


class Muon:
    """The `muon` entry: an `intarsia.contracts.Optimizer`. Slots: momentum of matrices; exp_avg, exp_avg_sq, step of the rest."""

    updates_split_masters = True

    def __init__(self, config: MuonConfig, groups: Sequence[OptimizerGroup], table: ParameterTable, comm: Communicator):
        self._config = config
        policy = check_state_dtype(config)
        check_choice("adjust", config.adjust, ("original", "match_rms_adamw", "spectral", "none"))
        check_choice("newton_schulz_dtype", config.newton_schulz_dtype, ("bfloat16", "float16", "float32", "float64"))
        implementation = choose_implementation(config.adamw_implementation, [p for group in groups for p in group.parameters.values()])
        self._rates: dict[str, float] = {}
        self._members: dict[str, Member] = {}
        self._updates: dict[str, Update] = {}
        parts: list[tuple[AdamRule, dict[str, Any]]] = []
        for group in groups:
            settings = group_settings(config, group, MUON_BOUNDS, fixed=WHOLE)
            check_choice("adjust", settings.adjust, ("original", "match_rms_adamw", "spectral", "none"))
            update = Update(settings.lr, settings.weight_decay, settings.momentum, settings.nesterov, settings.adjust)
            rest = {}
            for name, parameter in group.parameters.items():
                if is_matrix(name, table[name].shape, settings.not_matrices):
                    self._members[name], self._updates[name] = local_member(name, parameter, table), update
                else:
                    rest[name] = parameter
            rule = AdamRule(settings.adamw_lr, settings.adamw_weight_decay, settings.adamw_betas, settings.adamw_eps, 0.0, implementation)
            parts.append((rule, rest))
            self._rates[group.name] = settings.lr
            if rest:
                self._rates[f"{group.name}.adamw"] = settings.adamw_lr
        order = Order({name: parameter for group in groups for name, parameter in group.parameters.items()}, table)
        self._rest = Elementwise(parts, table, policy, order)
        allocate(list(self._members.values()), ("momentum",), policy, order)
        self._dtype: torch.dtype = getattr(torch, config.newton_schulz_dtype)
        device = next((member.value.device for member in self._members.values()), comm.device)
        self._newton_schulz = choose_kernel(
            "newton_schulz", "newton_schulz_kernel", config.newton_schulz_kernel, newton_schulz, device, self._dtype
        )
        # A name is that of a kernel for Newton-Schulz.
        wanted = "reference" if config.newton_schulz_kernel == "reference" else "auto"
        master = next((member.value.dtype for member in self._members.values()), torch.float32)
        directions, apply = (
            choose_kernel(rule.__name__, "newton_schulz_kernel", wanted, rule, device, master) for rule in (muon_directions, muon_apply)
        )
        self._kernels = Kernels(self._orthogonal, directions, apply)
        self._place(table, comm)
        self._plans: dict[tuple[str, ...], tuple[list[Whole], list[Cut]]] = {}

    def _place(self, table: ParameterTable, comm: Communicator) -> None:
        """Find the matrices, and where each is worked on."""
        is_plan = comm.device.type == "meta"
        check_splits(self._config.split, list(self._members), self._elsewhere(table, is_plan))
        self._matrices: dict[str, list[Box]] = {}
        self._layouts: dict[str, Layout] = {}
        for name in self._members:
            info = table[name]
            self._matrices[name] = matrices_of(name, info.shape, find_split(name, self._config.split))
            self._layouts[name] = info.layout or Layout.whole(info.shape, info.dtype)
        found = find_ownership(self._layouts, self._matrices, self._config.newton_schulz_steps)
        self._journeys, self._loads = found.journeys, found.loads
        self._local = {name: layout.local(table.rank_in(layout)) for name, layout in self._layouts.items()}
        self._groups: dict[Axes, Communicator] = {}
        for axes in dict.fromkeys(journey.axes for journey in self._journeys.values()):
            self._groups[axes] = group_of(axes, table.mesh, comm)
        if self._journeys and comm.rank == 0 and not is_plan:
            facts = self.facts()
            first = next(iter(self._journeys))
            log.warning(
                "Muon: %d of %d parameters have matrices that no rank holds whole, %s first: in each step they travel to an owner and back, %d bytes "
                "received by rank 0. A placement that cuts no matrix (owned) needs no transfer unless tensor or expert parallelism cuts it.",
                facts["cut"],
                facts["matrices"],
                cut_text(first, self._layouts[first]),
                facts["transfer_bytes"],
            )

    def _elsewhere(self, table: ParameterTable, is_plan: bool) -> list[str]:
        """The globs of `split` that match in another pipeline stage, though not in this one; in a plan, whose other stages nobody can ask, all that do not match here."""
        mesh, missing = table.mesh, unmatched(self._config.split, list(self._members))
        if mesh is None or mesh.sizes.get("pp", 1) == 1 or not self._config.split:
            return []
        everywhere = [] if is_plan else mesh.comm("pp").gather_json(missing, "optimizer.split of other stages")
        return [glob for glob in missing if is_plan or not all(glob in stage for stage in everywhere)]

    def facts(self) -> dict[str, Any]:
        """How matrices are worked on: `matrices` and `cut` count parameters; `cut_parameters` names those that travel; `transfer_bytes` is what this rank receives for it in
        one step, `transfers` what each rank does, under the axes that cut; `loads` are FLOPs of Newton-Schulz by rank, likewise ("replicated" where none does), in products of `load_dtype`."""
        received: dict[Axes, list[int]] = {axes: [0] * group.size for axes, group in self._groups.items()}
        for name, journey in self._journeys.items():
            there, back = wire_of(self._dtype, master_dtype(self._members[name]))
            for rank in range(len(received[journey.axes])):
                received[journey.axes][rank] += journey.wire_bytes(rank, (there.itemsize, back.itemsize))
        loads = {"+".join(name for name, _ in axes) or "replicated": list(load) for axes, load in self._loads.items()}
        return {
            "matrices": len(self._members),
            "cut": len(self._journeys),
            "cut_parameters": list(self._journeys),
            "transfer_bytes": sum(received[axes][group.rank] for axes, group in self._groups.items()),
            "transfers": {"+".join(name for name, _ in axes): each for axes, each in received.items()},
            "loads": loads,
            "load_dtype": self._config.newton_schulz_dtype,
        }

    @torch.no_grad()
    def step(self, factor: Scalar, names: Collection[str] | None = None) -> None:
        """One update; see `intarsia.contracts.Optimizer`. Every rank gives the same `names`, and has gradients of the same cut parameters."""
        chosen = None if names is None else frozenset(names)
        active = tuple(
            [name for name, member in self._members.items() if (chosen is None or name in chosen) and member.parameter.grad is not None]
        )
        if active not in self._plans:
            self._plans[active] = self._plan(active)
        whole, cut = self._plans[active]
        for batch in whole:
            batch.run(factor, self._kernels)
        for journeys in cut:
            journeys.run(factor, self._kernels)
        self._rest.step(factor, chosen)

    def _plan(self, names: Sequence[str]) -> tuple[list[Whole], list[Cut]]:
        local = [
            (self._members[name], self._updates[name], self._local[name], self._matrices[name])
            for name in names
            if name not in self._journeys
        ]
        journeys = [
            (self._members[name], self._updates[name], self._journeys[name], self._matrices[name])
            for name in names
            if name in self._journeys
        ]
        return plan(local, journeys, self._groups, self._dtype, self._config.batch_elements)

    def _orthogonal(self, batch_BMN: Tensor, squares_B: Tensor | None) -> Tensor:
        config = self._config
        return self._newton_schulz(batch_BMN, config.newton_schulz_steps, config.coefficients, config.eps, self._dtype, squares_B)

    def learning_rates(self) -> Mapping[str, float]:
        """Base learning rate of each group: of its matrices under the group's name, of the rest under `NAME.adamw`."""
        return self._rates

    def slots(self) -> Mapping[str, Mapping[str, Tensor]]:
        """State by parameter name and slot name."""
        return {**{name: member.slots() for name, member in self._members.items()}, **self._rest.slots()}


def build(config: MuonConfig, groups: Sequence[OptimizerGroup], table: ParameterTable, comm: Communicator) -> Muon:
    """The entry's target."""
    return Muon(config, groups, table, comm)
