"""The role `expert`: stacks of experts cut on their first dimension over `ep`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import chz
from intarsia import plugins
from intarsia.comm import Communicator
from intarsia.contracts import Placement
from intarsia.errors import UsageError
from intarsia_models_common.moe.config import DispatcherConfig, LocalConfig
from torch import Tensor, nn

from intarsia_parallel import tokens
from intarsia_parallel.cuts import EvenCut
from intarsia_parallel.experts.config import AllToAllConfig, ExpertConfig, FixedCapacityConfig
from intarsia_parallel.roles.common import divisors, nearest

if TYPE_CHECKING:
    from intarsia.config import Recipe

    from intarsia_parallel.config import DeclaredConfig
    from intarsia_parallel.roles.common import Groups

AXIS = "ep"


class Expert:
    """See `intarsia.contracts.Role`. The module is an `Experts`, or has one as `experts`; all of its stacks are cut alike."""

    def __init__(self, config: ExpertConfig) -> None:
        self._dispatcher: DispatcherConfig | None = config.dispatcher
        self._uneven = config.uneven
        self._tokens: int | None = None
        self._sizes: Mapping[str, int] = {}
        self._comms: dict[int, Communicator] = {}

    def prepare(self, config: DeclaredConfig, recipe: Recipe) -> None:
        """Take the paralleliser's dispatcher, and from the recipe how many tokens a rank has."""
        self._dispatcher = self._dispatcher or config.dispatcher
        train, sizes = recipe.train, self._sizes
        part = math.ceil(math.ceil(train.sequence_length / sizes.get("cp", 1)) / sizes.get("tp", 1))
        self._tokens = train.micro_batch * part

    def check(self, name: str, module: nn.Module, sizes: Mapping[str, int]) -> None:
        """UsageError where ranks would be left without experts, or tokens without a way to them."""
        self._sizes = sizes
        experts = count_of(name, module)
        if sizes.get(AXIS, 1) > experts:
            raise UsageError(
                f"{name} has {experts} experts, too few for mesh.ep = {sizes[AXIS]}: every rank needs one. The most is ep={experts}."
            )
        if experts % sizes.get(AXIS, 1) and not self._uneven:
            raise UsageError(
                f"{name} has {experts} experts, which mesh.ep = {sizes[AXIS]} does not divide: some ranks would have one more to compute. The nearest degrees that "
                f"do: {nearest(sizes[AXIS], divisors(experts))}. A row of the sharding table may allow it by the role's setting uneven=True."
            )
        if sizes.get(AXIS, 1) > 1 and isinstance(self._dispatcher, LocalConfig):
            raise UsageError(
                f"{name}: the dispatcher `local` keeps tokens on their rank, but mesh.ep = {sizes[AXIS]}. Choose all_to_all or fixed_capacity."
            )

    def cut(self, name: str, module: nn.Module, sizes: Mapping[str, int]) -> Mapping[str, tuple[str, Placement]]:
        """Dimension 0 of every stack over `ep`, as even as can be."""
        experts, prefix = stacks_of(name, module)
        return {f"{prefix}{local}": (AXIS, EvenCut(0)) for local, _ in experts.named_parameters(recurse=False)}

    def apply(self, name: str, module: nn.Module, groups: Groups) -> None:
        """Put the dispatcher in, and tell the module which part of a context's tokens it sees."""
        experts: Any = stacks_of(name, module)[0]
        comm, tensor = groups(AXIS), groups("tp")
        if comm.size > 1:
            experts.dispatcher = plugins.current().build(self._settled(), experts.experts, self._own(comm))
        if tensor.size > 1:
            experts.local_sequence = lambda x_BS: _part(x_BS, tensor)

    def _settled(self) -> DispatcherConfig:
        config = self._dispatcher or AllToAllConfig()
        if isinstance(config, FixedCapacityConfig) and config.tokens is None and self._tokens is not None:
            config = chz.replace(config, tokens=self._tokens)
        return config

    def _own(self, comm: Communicator) -> Communicator:
        """A group for dispatch alone, one for all layers: rows travel while others may use `comm`."""
        if id(comm) not in self._comms:
            self._comms[id(comm)] = comm.duplicate("dispatch")
        return self._comms[id(comm)]


def stacks_of(name: str, module: Any) -> tuple[nn.Module, str]:
    """The module whose parameters are stacks, and its name within `module` as a prefix. UsageError where there is none."""
    for found, prefix in ((module, ""), (getattr(module, "experts", None), "experts.")):
        if isinstance(found, nn.Module) and isinstance(getattr(found, "experts", None), int):
            return found, prefix
    raise UsageError(
        f"{name} has the role expert and is a {type(module).__name__}: it needs stacked parameters [experts, ...] and attributes `experts` (their number) and `dispatcher`."
    )


def count_of(name: str, module: nn.Module) -> int:
    """Experts in the stacks. UsageError for a parameter that is no stack of as many."""
    stacks = stacks_of(name, module)[0]
    experts: int = stacks.experts  # type: ignore[assignment]
    for local, parameter in stacks.named_parameters(recurse=False):
        if parameter.dim() < 2 or parameter.shape[0] != experts:
            raise UsageError(
                f"{name}.{local} has the shape {tuple(parameter.shape)}: expert parallelism cuts stacks of {experts} on their first dimension."
            )
    return experts


def _part(x_BS: Tensor, comm: Communicator) -> Tensor:
    return x_BS.split(tokens.counts(comm), 1)[comm.rank]


def build(config: ExpertConfig) -> Expert:
    """The entry's target."""
    return Expert(config)
