"""Tensor parallelism whose communication runs beside its matrix products (`async_tensor`). B rows, S tokens, I inputs, O outputs; s: this rank's part of S.

A region's entry gathers x and multiplies it by the columns' weights, its end multiplies and sums: two pairs of operations of which each can work on one rank's part
while the next is on its way. torch's symmetric-memory operators do that on CUDA; `Decomposed` does the same, one after the other, by the
communicator: for parts that are not even, which those operators do not take, and wherever their results are tested.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from intarsia.comm import Communicator
from intarsia.errors import DistributedError, UsageError
from torch import Tensor, nn

from intarsia_parallel import tokens
from intarsia_parallel.collectives import even_counts, gathered, scattered
from intarsia_parallel.roles.common import OVERLAP, has_payload, is_plain, wrap
from intarsia_parallel.table import Placed, inside


class Products(Protocol):
    """The two operations. `counts` are the ranks' parts of S."""

    def gather_products(self, x_BsI: Tensor, weights: Sequence[Tensor], counts: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
        """x gathered along S, [B, S, I], and its products with the transposes of `weights`, [O, I] each."""

    def product_scatter(self, x_BSI: Tensor, weight_OI: Tensor, counts: Sequence[int]) -> Tensor:
        """x W^T summed over the ranks, own part along S."""


class Decomposed:
    """One after the other."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    def gather_products(self, x_BsI: Tensor, weights: Sequence[Tensor], counts: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
        """See `Products`."""
        x_BSI = gathered(x_BsI, 1, counts, self._comm, "overlapped gather")
        return x_BSI, [x_BSI @ weight.t() for weight in weights]

    def product_scatter(self, x_BSI: Tensor, weight_OI: Tensor, counts: Sequence[int]) -> Tensor:
        """See `Products`."""
        return scattered(x_BSI @ weight_OI.t(), 1, counts, self._comm, "overlapped sum")


class SymmetricMemory:
    """torch's fused operators."""

    def __init__(self, comm: Communicator) -> None:
        self._comm, self._decomposed = comm, Decomposed(comm)
        self._group: str = comm.group.group_name  # type: ignore[attr-defined]

    def gather_products(self, x_BsI: Tensor, weights: Sequence[Tensor], counts: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
        """See `Products`."""
        if not self._takes(x_BsI, counts):
            return self._decomposed.gather_products(x_BsI, weights, counts)
        operator = torch.ops.symm_mem.fused_all_gather_matmul
        x_BSI, products = operator(x_BsI.contiguous(), [weight.t() for weight in weights], 1, self._group)
        return x_BSI, list(products)

    def product_scatter(self, x_BSI: Tensor, weight_OI: Tensor, counts: Sequence[int]) -> Tensor:
        """See `Products`."""
        if not self._takes(x_BSI, counts):
            return self._decomposed.product_scatter(x_BSI, weight_OI, counts)
        summed: Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(x_BSI.contiguous(), weight_OI.t(), "sum", 1, self._group)
        return summed

    def _takes(self, x: Tensor, counts: Sequence[int]) -> bool:
        return x.ndim == 3 and len(set(counts)) == 1 and counts[0] > 0


def products_of(comm: Communicator, device: torch.device) -> Products:
    """The device's fused operators, tried out on something small. Raises UsageError, on all ranks alike, where there are none. A collective."""
    cause = ""
    made: Products | None = None
    if device.type != "cuda":
        cause = f"they are for CUDA, and this run is on {device.type}"
    elif not hasattr(torch.ops.symm_mem, "fused_all_gather_matmul") or not hasattr(comm, "group"):
        cause = f"torch {torch.__version__} has none for the group {comm.name!r}"
    else:
        try:
            made = SymmetricMemory(comm)
            _try_out(made, comm, device)
        except (RuntimeError, AttributeError, NotImplementedError) as error:
            cause = (str(error).splitlines() or [type(error).__name__])[0][:300]
    causes = [each for each in comm.gather_json(cause, what="async_tensor") if each]
    if causes or made is None:
        raise UsageError(
            f"parallel.async_tensor needs torch's symmetric-memory operators (fused_all_gather_matmul, fused_matmul_reduce_scatter): {causes[0]}. Set "
            "parallel.async_tensor=False."
        )
    return made


def _try_out(products: Products, comm: Communicator, device: torch.device) -> None:
    # Before memory is mapped: NVLink multicast is a resource of the whole host, which runs beside this one may not have.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    with warnings.catch_warnings(), contextlib.suppress(ImportError):
        warnings.simplefilter("ignore")
        from torch.distributed._symmetric_memory import enable_symm_mem_for_group

        enable_symm_mem_for_group(comm.group.group_name)  # type: ignore[attr-defined]
    counts = [16] * comm.size
    x_BsI = torch.ones(1, 16, 128, dtype=torch.bfloat16, device=device)
    weight_OI = torch.ones(128, 128, dtype=torch.bfloat16, device=device)
    x_BSI, (product_BSO,) = products.gather_products(x_BsI, [weight_OI], counts)
    summed_BsO = products.product_scatter(x_BSI, weight_OI, counts)
    # 128 ones times 1, and the same from every rank.
    if not (bool((product_BSO == 128).all()) and bool((summed_BsO == 128 * comm.size).all())):
        raise DistributedError("the operators gave wrong sums of ones")


# ---------------------------------------------------------------- autograd


class _GatherProducts(torch.autograd.Function):
    """(x gathered, x W_1^T, ...) of this rank's part of x; backward sums over the ranks."""

    @staticmethod
    def forward(ctx: Any, products: Products, counts: tuple[int, ...], comm: Communicator, x_BsI: Tensor, *weights: Tensor) -> Any:
        x_BSI, results = products.gather_products(x_BsI, weights, counts)
        ctx.save_for_backward(x_BSI, *weights)
        ctx.call = (products, counts, comm)
        ctx.set_materialize_grads(False)
        return (x_BSI, *results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        x_BSI, *weights = ctx.saved_tensors
        products, counts, comm = ctx.call
        of_x_BSI, *of_results = grads
        given = [(grad, weight) for grad, weight in zip(of_results, weights, strict=True) if grad is not None]
        grad_x = None
        if ctx.needs_input_grad[3]:
            if given:
                joined_BSO = torch.cat([grad for grad, _ in given], -1)
                # One product for all columns: [gradients] [W_1; W_2; ...].
                grad_x = products.product_scatter(joined_BSO, torch.cat([weight for _, weight in given]).t(), counts)
            if of_x_BSI is not None:
                own = scattered(of_x_BSI, 1, counts, comm, "gather, backward")
                grad_x = own if grad_x is None else grad_x + own
        x_NI = x_BSI.flatten(0, -2)
        of_weights = [
            None if grad is None or not needed else grad.flatten(0, -2).t() @ x_NI
            for grad, needed in zip(of_results, ctx.needs_input_grad[4:], strict=True)
        ]
        return (None, None, None, grad_x, *of_weights)


class _ProductScatter(torch.autograd.Function):
    """x W^T summed over the ranks, own part; backward gathers."""

    @staticmethod
    def forward(ctx: Any, products: Products, counts: tuple[int, ...], x_BSI: Tensor, weight_OI: Tensor) -> Tensor:
        ctx.save_for_backward(x_BSI, weight_OI)
        ctx.call = (products, counts)
        return products.product_scatter(x_BSI, weight_OI, counts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x_BSI, weight_OI = ctx.saved_tensors
        products, counts = ctx.call
        grad_BSO, (grad_x,) = products.gather_products(grads[0], [weight_OI.t()], counts)
        grad_weight = grad_BSO.flatten(0, -2).t() @ x_BSI.flatten(0, -2) if ctx.needs_input_grad[3] else None
        return None, None, grad_x, grad_weight


# ---------------------------------------------------------------- modules


@dataclasses.dataclass
class Entry:
    """An overlapped region's entry: the columns that are computed with the gather, and, while the region's forward runs, what they are."""

    products: Products
    comm: Communicator
    columns: Sequence[Any]
    x: Tensor | None = None
    ready: dict[int, Tensor] = dataclasses.field(default_factory=dict)

    def usable(self, args: tuple[Any, ...]) -> bool:
        """Whether this call can be overlapped: no weight came as float8, and what comes in is one tensor [B, s, I]."""
        return isinstance(args[0], Tensor) and args[0].ndim == 3 and not any(map(has_payload, self.columns))

    @torch.compiler.disable
    def compute(self, x_BsI: Tensor, name: str) -> tuple[Tensor, dict[int, Tensor]]:
        """x gathered, and the columns' products by their modules' identities."""
        counts = tuple(tokens.checked_counts(x_BsI, 1, self.comm, name))
        weights = [column.weight for column in self.columns]
        x_BSI, *products = _GatherProducts.apply(self.products, counts, self.comm, x_BsI, *weights)
        return x_BSI, {id(column): product for column, product in zip(self.columns, products, strict=True)}

    def enter(self, name: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The region's forward."""
        x_BSI, ready = self.compute(args[0], name)
        self.begin(x_BSI, ready)
        try:
            return forward(x_BSI, *args[1:], **kwargs)
        finally:
            self.begin(None, {})

    @torch.compiler.disable
    def begin(self, x_BSI: Tensor | None, ready: dict[int, Tensor]) -> None:
        """What `take` gives from now on."""
        self.x, self.ready = x_BSI, ready

    def alone(self, name: str, module: Any, x_BsI: Tensor) -> Tensor:
        """The forward of a column that gathers for itself."""
        product = self.compute(x_BsI, name)[1][id(module)]
        return product if module.bias is None else product + module.bias

    @torch.compiler.disable
    def take(self, column: Any, x: Tensor) -> Tensor | None:
        """A column's product, if `x` is what the region gathered."""
        return self.ready.pop(id(column), None) if x is self.x else None


def column_in_region(entry: Entry, module: Any, forward: Callable[[Tensor], Tensor], x_BSI: Tensor) -> Tensor:
    """A column's forward inside an overlapped region."""
    product = entry.take(module, x_BSI)
    if product is None:
        return forward(x_BSI)
    return product if module.bias is None else product + module.bias


@dataclasses.dataclass(frozen=True)
class End:
    """An overlapped region's end."""

    products: Products

    @torch.compiler.disable
    def product_summed(self, comm: Communicator, x_BSI: Tensor, weight_OI: Tensor) -> Tensor:
        """A row's product, summed over the ranks, own part, without bias."""
        result: Tensor = _ProductScatter.apply(self.products, tuple(even_counts(x_BSI.shape[1], comm.size)), x_BSI, weight_OI)
        return result


def overlap(placed: Sequence[Placed], comm: Communicator, products: Products) -> list[str]:
    """Let regions, columns that gather for themselves, and rows overlap, where they are plain projections; to be called after roles were applied. Returns their names."""
    columns = [each for each in placed if getattr(each.role, "is_column", False) and is_plain(each.module)]
    done: list[str] = []
    for each in placed:
        if getattr(each.role, "gathers_one", False):
            # A projection that is wrapped already (sliced, gathering for itself) computes something else than its product.
            mine: list[nn.Module] = [
                column.module for column in columns if inside(column.name, each.name) and "forward" not in column.module.__dict__
            ]
            if mine:
                entry = Entry(products, comm, mine)
                setattr(each.module, OVERLAP, entry)
                for module in mine:
                    wrap(module, column_in_region, entry, module)
                done.append(each.name)
    for each in columns:
        if getattr(each.role, "gather", False):
            setattr(each.module, OVERLAP, Entry(products, comm, [each.module]))
            done.append(each.name)
    for each in placed:
        if getattr(each.role, "ends_region", False) and is_plain(each.module):
            setattr(each.module, OVERLAP, End(products))
            done.append(each.name)
    return done
