"""Conformance of roles. Subclass, name your entry, give a module and its rows of a sharding table, run pytest.

    class TestMine(RoleConformance):
        entry = "my-distribution:mine"
        rows = (("projection", "mine"), ("norm", "sequence"))

        def module(self):
            return MyLayer(dim=24)

The promises are those of `intarsia.contracts.Role` for roles along `tp`. Ranks are threads. B rows, S tokens, s: this rank's part of them, D width.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from intarsia.comm import Communicator, SelfCommunicator
from intarsia.contracts import Init
from intarsia.errors import IntarsiaError, UsageError
from intarsia.layout import slices
from intarsia.mesh import Mesh
from intarsia.parameters import ParameterInfo, ParameterTable
from intarsia.plugins import current
from intarsia_parallel import tokens
from intarsia_parallel.apply import Groups, check, cuts_of
from intarsia_parallel.collectives import even_counts
from intarsia_parallel.cuts import cut_parameters, local_box
from intarsia_parallel.table import Placed, place, rows_of
from torch import Tensor, nn

from intarsia_testing.base import Conformance
from intarsia_testing.communicator import run_ranks
from intarsia_testing.promise import broken, keep

Row = tuple[str, str] | tuple[str, str, dict[str, Any]]


class RoleConformance(Conformance):
    """Every promise of a role, one test each. The module stands between regions: it is given the rank's own tokens [B, s, D], and gives [B, s, ...] back."""

    kind: ClassVar[str] = "role"
    rows: ClassVar[Sequence[Row]] = ()
    """The sharding table of `module`, in which the role stands at least once; every module with parameters has a row."""
    ranks: ClassVar[tuple[int, ...]] = (1, 2, 3, 4)
    lengths: ClassVar[tuple[int, ...]] = (12, 7, 2)
    """Tokens of a row: some that the ranks do not divide, and fewer than ranks."""
    width: ClassVar[int] = 24
    """D of the inputs."""
    tolerance: ClassVar[float] = 1e-5

    def module(self) -> nn.Module:
        """The module, whole; its parameters are filled by the kit."""
        raise NotImplementedError(f"write `{type(self).__name__}.module`: a small module in which `rows` give the role its place.")

    def call(self, module: nn.Module, x_BSD: Tensor, length: int) -> Tensor:
        """The module's output; `length` is the tokens of the whole row."""
        result: Tensor = module(x_BSD)
        return result

    # ------------------------------------------------------------ help

    def _whole(self) -> nn.Module:
        module = self.module()
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
        return module

    def _placed(self, module: nn.Module) -> list[Placed]:
        keep("rows", self.rows, f"{type(self).__name__} has no `rows`: give the sharding table of its module.")
        try:
            placed, problems = place(rows_of(self.rows, None, type(module).__name__), module)
        except IntarsiaError as error:
            broken("rows", str(error))
        keep("rows", not problems, "; ".join(problems))
        mine = self.found_entry().full_name
        find = current().registry("role").find
        keep(
            "rows", any(find(each.role_name).full_name == mine for each in placed), f"no row of {type(self).__name__} has the role {mine}."
        )
        return placed

    def _inputs(self, length: int) -> Tensor:
        return torch.randn(2, length, self.width, generator=torch.Generator().manual_seed(length))

    def _step(self, module: nn.Module, x_BSD: Tensor, length: int, own: Callable[[Tensor], Tensor], where: str) -> dict[str, Tensor]:
        """The output, and the gradients of a weighted sum of it: by the input and by every parameter."""
        x_BSD = own(x_BSD).clone().requires_grad_()
        y_BSD = self.call(module, x_BSD, length)
        keep("own tokens", y_BSD.shape[:2] == x_BSD.shape[:2], f"{where}: {tuple(x_BSD.shape)} came in, and {tuple(y_BSD.shape)} came out.")
        width = y_BSD[0, 0].numel() if y_BSD.shape[1] else torch.Size(y_BSD.shape[2:]).numel()
        wave = own(torch.cos(torch.arange(2 * length * width) * 0.7).view(2, length, *y_BSD.shape[2:]))
        (y_BSD * wave).sum().backward()
        grads = {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}
        return {"the output": y_BSD.detach(), "the input's gradient": x_BSD.grad, **grads}  # type: ignore[dict-item]

    def _rank(self, whole: nn.Module, comm: Communicator, length: int) -> tuple[dict[str, Tensor], dict[str, Any]] | str:
        """What a rank has, and the boxes of its parameters; a text where the roles refuse this many ranks."""
        module, mesh, table = copy.deepcopy(whole), Mesh({"tp": comm.size}, comm), table_of(whole)
        groups = Groups(mesh)
        placed = self._placed(module)
        try:
            for each in placed:
                each.role.check(each.name, each.module, mesh.sizes)
        except UsageError as error:
            return str(error)
        for each in placed:  # Asked once by the kit itself, so that what a role raises is told as it is.
            each.role.cut(each.name, each.module, mesh.sizes)
        problems = check(placed, module, mesh)
        cuts = {} if problems else cuts_of(placed, table, mesh, problems)
        if problems:
            return "; ".join(problems)
        cut_parameters(module, table, mesh, cuts)
        boxes = {name: slices(local_box(name, table[name].shape, cuts.get(name, ()), mesh)) for name in table}
        values = dict(whole.named_parameters())
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                parameter.copy_(values[name][boxes[name]])
        for each in placed:
            each.role.apply(each.name, each.module, groups)
        tokens.note(length)
        counts, where = even_counts(length, comm.size), f"rank {comm.rank} of {comm.size}, {length} tokens"
        found = self._step(module, self._inputs(length), length, lambda x: x.split(counts, 1)[comm.rank], where)
        return found, boxes

    # ------------------------------------------------------------ promises

    def test_checks_before_anything_is_cut(self) -> None:
        """`check` raises UsageError or nothing, whatever the degree, and leaves the module as it is; what it lets pass can be cut on every rank."""
        module = self._whole()
        table = table_of(module)
        before = state_of(module)
        for each in self._placed(module):
            for degree in (1, 2, 3, 4, 7, 64, 997):
                sizes, where = {**Mesh({}, SelfCommunicator()).sizes, "tp": degree}, f"{each.name} ({each.role_name}), tp {degree}"
                try:
                    each.role.check(each.name, each.module, sizes)
                except UsageError:
                    continue
                except Exception as error:
                    broken("check", f"{where}: `check` raised {type(error).__name__}, no UsageError: {error}")
                cuts = each.role.cut(each.name, each.module, sizes)
                for local, (axis, placement) in cuts.items():
                    name = f"{each.name}.{local}"
                    keep("cut", name in table, f"{where}: `cut` names {local!r}, which is no parameter of the module.")
                    for rank in range(degree):
                        mesh: Any = SimpleNamespace(sizes=sizes, coordinates={axis: rank}, world=SimpleNamespace(rank=rank))
                        try:
                            local_box(table[name].name, table[name].shape, ((axis, placement),), mesh)
                        except IntarsiaError as error:
                            broken("check", f"{where}: `check` let pass what cannot be cut: {error}")
            keep("check", state_of(module) == before, f"{each.name} ({each.role_name}): `check` or `cut` changed the module.")

    def test_one_rank_changes_nothing(self) -> None:
        """In a group of one the module computes bit for bit what it did."""
        whole, length = self._whole(), self.lengths[0]
        expected = self._step(copy.deepcopy(whole), self._inputs(length), length, lambda x: x, "as written")
        found = self._rank(whole, SelfCommunicator(), length)
        if isinstance(found, str):
            broken("one rank", f"tp 1 is refused: {found}")
        for name, right in expected.items():
            keep("one rank", name in found[0] and torch.equal(found[0][name], right), f"tp 1: {name} is not what it is without the role.")

    def test_equals_one_process(self) -> None:
        """The output, the input's gradient and every parameter's, summed over the ranks where it is not cut, with uneven and empty parts."""
        whole = self._whole()
        refused: list[str] = []
        for length in self.lengths:
            right = self._step(copy.deepcopy(whole), self._inputs(length), length, lambda x: x, "as written")
            for size in self.ranks:
                outcomes = run_ranks(size, lambda comm, length=length: self._rank(whole, comm, length))  # type: ignore[misc]
                if any(isinstance(each, str) for each in outcomes):
                    keep("check", len(set(outcomes)) == 1, f"tp {size}: ranks disagree whether it can be cut: {outcomes}")
                    refused.append(f"tp {size}: {outcomes[0]}")
                    continue
                for name, expected in right.items():
                    self._compare(f"{name} on {size} ranks, {length} tokens", name, expected, outcomes)  # type: ignore[arg-type]
        most = max(self.ranks)
        done = len(self.lengths) * sum(size > 1 for size in self.ranks) - len(refused)
        keep("check", done > 0, f"every degree from 2 to {most} is refused: {'; '.join(dict.fromkeys(refused))}")

    def _compare(self, what: str, name: str, expected: Tensor, ranks: Sequence[tuple[dict[str, Tensor], dict[str, Any]]]) -> None:
        if name in ranks[0][1]:
            found = torch.zeros_like(expected)
            for mine, boxes in ranks:
                if name in mine:
                    found[boxes[name]] += mine[name]
        else:
            found = torch.cat([mine[name] for mine, _ in ranks], 1)
        error = float((found - expected).abs().max()) / max(float(expected.abs().max()), 1e-12)
        factor = float((found * expected).sum() / expected.square().sum().clamp_min(1e-30))
        hint = f" It is {factor:.3g} times that: summed too often, or not at all." if abs(factor - 1) > 1e-2 else ""
        keep("equals one process", error <= self.tolerance, f"{what} is off by {error:.1e} from one process.{hint}")


def table_of(module: nn.Module) -> ParameterTable:
    """The module's parameters, ties included."""
    table = ParameterTable()
    names: dict[int, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if id(parameter) in names:
            table.tie(names[id(parameter)], name)
        else:
            names[id(parameter)] = name
            table.add(ParameterInfo(name, tuple(parameter.shape), "float32", Init("zeros"), parameter.requires_grad))
    return table


def state_of(module: nn.Module) -> list[Any]:
    """What `check` and `cut` must leave alone: parameters, and which modules have a forward of their own."""
    parameters = [(name, id(parameter), tuple(parameter.shape)) for name, parameter in module.named_parameters(remove_duplicate=False)]
    return [parameters, [name for name, each in module.named_modules() if "forward" in each.__dict__]]
