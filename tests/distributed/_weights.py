"""Runs whose weights are published: built as the trainer builds them, as far as parameters."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from intarsia import logical, plugins
from intarsia.comm import Communicator
from intarsia.config import Resolved, resolve
from intarsia.contracts import Box, Run
from intarsia.layout import region_parts, slices
from intarsia.mesh import check_mesh
from intarsia.parameters import persistent_buffers
from intarsia.train.build import build_mesh, build_model, build_parameters
from intarsia.train.built import Built
from torch import Tensor


def recipe_of(name: str, *overrides: str) -> Resolved:
    """A recipe by name."""
    return resolve(name, list(overrides))


def build(resolved: Resolved, world: Communicator) -> Run:
    """A run of which mesh, model and parameters are built."""
    logical.reset()
    loaded = plugins.current()
    run = Run(resolved.recipe, Path("."), world.rank, world.size)
    built = Built(run, resolved, loaded, loaded.hooks, world, world.device)
    run.parts["mesh"] = build_mesh(built, check_mesh(resolved.recipe.mesh, world.size))
    run.parts["model"] = build_model(built)
    run.parts["parameters"] = build_parameters(built)
    return run


@torch.no_grad()
def change(run: Run, seed: int) -> None:
    """Change masters and persistent buffers as training might: the same values whatever the mesh."""
    sharded, table = run.parts["parameters"], run.parts["table"]
    masters = sharded.masters()
    for name, master in masters.items():
        info = table[name]
        whole = torch.empty(info.shape)
        whole.normal_(0.0, 0.1, generator=torch.Generator().manual_seed(seed + len(name)))
        flat = master.detach().view(-1)
        for box, view in region_parts(flat, info.layout.local(table.rank_in(info.layout)), Box.whole(info.shape)):
            view += whole[slices(box)].to(view.device)
    sharded.load_masters(masters)
    sharded.after_update()
    for name, buffer in persistent_buffers(run.parts["model"]).items():
        buffer.copy_(torch.randn(buffer.shape, generator=torch.Generator().manual_seed(seed + len(name))))


@torch.no_grad()
def gathered(run: Run) -> Mapping[str, Tensor]:
    """By canonical name what forward and backward compute with: the model's own parameters, gathered, where this rank has them whole."""
    sharded, table, found = run.parts["parameters"], run.parts["table"], {}
    names = {info.names[0]: name for name, info in table.items()}
    if hasattr(sharded, "drive"):
        sharded.drive("schedule")
    for bucket in getattr(sharded, "buckets", [None]):
        if bucket is not None:
            sharded.unshard(bucket.name)
        for name, parameter in run.parts["model"].named_parameters(remove_duplicate=False):
            mine = bucket is None or (name in names and names[name] in bucket.whole)
            if mine and name in names and tuple(parameter.shape) == table[names[name]].shape:
                found[names[name]] = parameter.detach().clone()
        if bucket is not None:
            sharded.reshard(bucket.name)
    return found
