"""A model that is cut over the ranks of one generator, as the family's sharding table says: by heads, by vocabulary, by columns and rows.

Between its regions every rank has a part of the tokens of a call. What comes out is put together again: hidden states and logits are whole, and equal, on every rank. A partial product
that ranks sum is rounded otherwise than the whole one; all else is bit for bit what one process computes with the same kernels.

Shape suffixes: B rows of a call, S tokens of a row, N tokens, D model width, V vocabulary, L layers of experts, K experts of a token.
"""

from __future__ import annotations

from typing import Any

from intarsia import discovery
from intarsia.comm import Communicator
from intarsia.config import Recipe
from intarsia.contracts import Member
from intarsia.errors import UsageError
from intarsia.mesh import Mesh
from intarsia.parameters import ParameterTable
from intarsia.plugins import Plugins
from intarsia_rl.contracts import WeightVersion
from intarsia_rl.processes.failures import error_of, plain_error
from intarsia_rl.weights.fill import Part, fill, filled_version, forget, held_parts
from torch import Tensor, nn

try:
    from intarsia_parallel import tokens
    from intarsia_parallel.collectives import even_counts, gathered
    from intarsia_parallel.config import DeclaredConfig
    from intarsia_placements.layouts import build_layouts
except ImportError as error:
    raise UsageError("generator.tensor above 1 needs the distribution intarsia-parallel, which is not installed.") from error

OTHERS = "another rank of the generator could not take them"


class Parts:
    """This rank's part of a model. `cut` makes it; `holds` then says, as `intarsia_rl.weights.fill` has it, what the model's tensors are of the whole ones.

    `experts` is `whole` (every rank has all, for its part of the tokens) or `cut` (every rank has its share of them, and tokens go where theirs are). All methods but `cut` are collectives.
    """

    def __init__(self, world: Communicator, experts: str) -> None:
        self.world = world
        self._mesh = Mesh({"tp": world.size, "ep": world.size if experts == "cut" else 1}, world)
        self.holds: dict[str, tuple[Part, ...]] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}

    def cut(self, model: nn.Module, recipe: Recipe, plugins: Plugins) -> None:
        """Give a whole model on the meta device this rank's shapes, and wrap its modules. UsageError, with the roles' own reasons, where it cannot be cut."""
        precision = recipe.precision
        table = ParameterTable.from_model(model, precision.master, precision.compute, precision.reduce, recipe.train.seed)
        sharding = getattr(plugins.entry_of(recipe.model), "sharding", None)
        rows = None if sharding is None else discovery.import_reference(sharding)
        try:
            plugins.build(DeclaredConfig()).apply(model, table, self._mesh, recipe, rows)
        except UsageError as error:
            axes = "tensor (tp) and experts (ep)" if self._mesh.sizes["ep"] > 1 else "tensor (tp)"
            raise UsageError(f"generator.{axes} = {self.world.size}: {error}") from error
        for name, info in table.items():
            self._shapes[name] = info.shape
            if info.outer:
                layout = build_layouts([Member(name, info.shape)], info.outer)[name]
                rank = 0
                for axis, size in layout.axes:
                    rank = rank * size + self._mesh.coordinates[axis]
                self.holds |= held_parts({name: layout}, rank)

    # ------------------------------------------------------------ a step

    def whole(self, hidden_BSD: Tensor, length: int) -> Tensor:
        """All ranks' hidden states of rows of `length` tokens."""
        return gathered(hidden_BSD, 1, even_counts(length, self.world.size), self.world, "hidden states")

    def routes(self, choices_NLK: Tensor, rows: int, length: int) -> Tensor:
        """All ranks' choices of experts, of `rows` of `length` tokens: of one of them where there are several of the other."""
        counts = [rows * count for count in even_counts(length, self.world.size)]
        return gathered(choices_NLK, 0, counts, self.world, "routes")

    def logits(self, model: Any, hidden_ND: Tensor) -> Tensor:
        """[N, V] of whole hidden states."""
        counts = even_counts(hidden_ND.shape[0], self.world.size)
        # To the model this is a pass of its own: a row of N tokens, of which each rank has a part.
        tokens.note(hidden_ND.shape[0])
        logits_NV: Tensor = model.project(hidden_ND.split(counts)[self.world.rank][None])[0]
        return logits_NV

    # ------------------------------------------------------------ weights

    def fill(self, model: nn.Module, weights: WeightVersion, plugins: Plugins) -> Exception | None:
        """`intarsia_rl.weights.fill` of this rank's boxes, with digests over all ranks. Returns the error of the first rank that failed, on all of them; all have weights of one version then, or
        none. What it raises is that ranks do not reach each other."""
        joined = False

        def combine(sums: Tensor) -> Tensor:
            nonlocal joined
            joined = True
            self._stop_where_one_fails(False)
            return self.world.all_reduce(sums, "sum", "digests of weights")

        failure: dict[str, Any] | None = None
        try:
            self._check(weights)
            fill(model, weights, plugins, self.holds, combine)
        except Exception as error:
            failure = plain_error(error)
        if not joined:
            try:
                self._stop_where_one_fails(failure is not None)
            except _OtherFailed as error:
                failure = failure or plain_error(error)
        outcomes = self.world.gather_json([failure, filled_version(model)], what="taken weights")
        failures = [(rank, failed) for rank, (failed, _) in enumerate(outcomes) if failed is not None]
        if not failures:
            return None
        if len({version for _, version in outcomes}) > 1:
            forget(model)
        # The first that is not about another one.
        rank, failed = min(failures, key=lambda each: (each[1]["class"] == _OtherFailed.__name__, each[0]))
        same = len({each["text"] for _, each in failures}) == 1
        return error_of(failed if same else {**failed, "text": f"Rank {rank} of the {self.world.size} of this generator: {failed['text']}"})

    def _check(self, weights: WeightVersion) -> None:
        """UsageError where whole tensors have other shapes. A rank's own box may fit where another's does not."""
        found = {name: tuple(weights.shapes[name]) for name in self._shapes if name in weights.shapes}
        wrong = [
            f"{name} has shape {list(shape)}, the model's has {list(self._shapes[name])}"
            for name, shape in found.items()
            if shape != self._shapes[name]
        ]
        if wrong:
            more = f"\n  and {len(wrong) - 8} more" if len(wrong) > 8 else ""
            raise UsageError(f"Version {weights.version} of the weights does not fit the model:\n  " + "\n  ".join(wrong[:8]) + more)

    def _stop_where_one_fails(self, failed: bool) -> None:
        if sum(self.world.gather_json(failed, what="ranks that could not take the weights")):
            raise _OtherFailed(OTHERS)

    def least(self, number: int) -> int:
        """The least of all ranks' numbers."""
        return min(self.world.gather_json(number, what="sizes of caches"))


class _OtherFailed(Exception):
    """This rank did nothing wrong."""
