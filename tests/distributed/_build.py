"""Build what a rank of a mesh has, as the trainer does, over groups that nobody else is in: what a mesh is refused for must be told before any collective waits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from intarsia import logical, plugins
from intarsia.comm import FakeCommunicator, SelfCommunicator
from intarsia.config import resolve
from intarsia.contracts import Run
from intarsia.mesh import check_mesh
from intarsia.train.build import build_engine, build_mesh, build_model, parallelise
from intarsia.train.built import Built

RECIPES = Path(__file__).parent / "parallel_recipes.py"


def build_rank(recipe: str, overrides: Sequence[str], ranks: int, rank: int = 0) -> Built:
    """Rank `rank` of `ranks`: mesh, model on the meta device, paralleliser, engine. Raises what the trainer would."""
    from intarsia.parameters import ParameterTable

    logical.reset()
    resolved = resolve(f"{RECIPES}:{recipe}" if "/" not in recipe else recipe, list(overrides))
    config = resolved.recipe
    sizes = check_mesh(config.mesh, ranks)
    world: Any = FakeCommunicator(rank, ranks) if ranks > 1 else SelfCommunicator()
    loaded = plugins.current()
    built = Built(Run(config, Path("."), rank, ranks), resolved, loaded, loaded.hooks, world, torch.device("cpu"))
    try:
        build_mesh(built, sizes)
        build_model(built)
        precision = config.precision
        built.table = ParameterTable.from_model(built.model, precision.master, precision.compute, precision.reduce, config.train.seed)
        parallelise(built)
        build_engine(built)
    finally:
        logical.reset()
    return built
