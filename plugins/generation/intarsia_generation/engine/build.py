"""From a recipe to the generator `local`."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from intarsia import device as devices
from intarsia import ops
from intarsia.errors import UsageError, did_you_mean
from intarsia.layout import DTYPE_BYTES
from intarsia_rl.contracts import GeneratorContext, GeneratorFacts
from intarsia_rl.invariant.check import cut_text, kernel_problems
from intarsia_rl.invariant.transform import batch_invariant
from intarsia_rl.media import processor_of
from intarsia_rl.weights.build import build_model, fill_initial
from intarsia_rl.weights.fill import fill, filled_version
from torch import nn

from intarsia_generation.engine.config import LocalConfig
from intarsia_generation.engine.context import block_bytes, specs_of, state_bytes
from intarsia_generation.engine.engine import Engine
from intarsia_generation.engine.generator import LocalGenerator
from intarsia_generation.engine.routes import has_routers
from intarsia_generation.engine.sizes import Sizes
from intarsia_generation.engine.static import Graphs

if TYPE_CHECKING:
    from intarsia_generation.engine.tensor import Parts

CPU_CACHE_BYTES = 512 << 20
GPU_CACHE_SHARE = 0.6


def build(config: LocalConfig, context: GeneratorContext) -> LocalGenerator:
    """The generator of a run. Its weights are unfilled unless `context.initial`. With `tensor` above 1 this process is the first of its ranks, and starts the others."""
    recipe, plugins = context.recipe, context.plugins
    processor = processor_of(recipe.data, recipe.model, plugins)
    team = None
    if config.tensor > 1:
        if context.invariant:
            raise UsageError(f"The generator cannot be batch-invariant: {cut_text(config.tensor)}")
        from intarsia_generation.engine.ranks import Team

        team = Team.start(config, context, device_of(config, context.index, 0))
    try:
        made = assembled(config, context, None if team is None else team.parts)
        model = made.model
        engine = Engine(
            model,
            made.device,
            made.sizes,
            functools.partial(fill, model, plugins=plugins) if team is None else functools.partial(team.fill, model, plugins=plugins),
            filled=lambda: filled_version(model),
            choices=made.choices,
            invariant=context.invariant,
            team=team,
            graphs=cast(Graphs, config.graphs),
        )
        if context.initial:
            engine.begin(0)
        has = {"routes": has_routers(model), "media": processor is not None, "invariant": context.invariant}
        has["graphs"] = not engine.runner.static.reason
        capabilities = ["forced", *(name for name, is_there in has.items() if is_there)]
        facts = GeneratorFacts("local", recipe.model.vocab_size, made.sizes.max_tokens, made.sizes.max_sequences, tuple(capabilities))
        return LocalGenerator(engine, facts, functools.partial(plugins.build, recipe.data.tokenizer), processor)
    except BaseException:
        if team is not None:
            team.kill()
        raise


@dataclasses.dataclass(frozen=True)
class Assembled:
    """What a rank of a generator computes with."""

    model: nn.Module
    device: torch.device
    choices: Mapping[str, ops.Choice]
    sizes: Sizes


def assembled(config: LocalConfig, context: GeneratorContext, parts: Parts | None = None) -> Assembled:
    """The model of a recipe, whole or this rank's `parts` of it, with initial weights where the context wants them; kernels and sizes. Every rank calls it."""
    recipe, plugins = context.recipe, context.plugins
    device = device_of(config, context.index, 0 if parts is None else parts.world.rank)
    dtype = recipe.precision.compute if config.dtype == "auto" else config.dtype
    if dtype not in DTYPE_BYTES or not getattr(torch, dtype).is_floating_point:
        floating = [name for name in DTYPE_BYTES if getattr(torch, name).is_floating_point]
        raise UsageError(f"generator.dtype is {dtype!r}. {did_you_mean(dtype, floating)}")
    selection = kernels_of(config, context, device, dtype)
    cut = None if parts is None else functools.partial(parts.cut, recipe=recipe, plugins=plugins)
    model = build_model(recipe, plugins, device, getattr(torch, dtype), cut)
    if context.invariant:
        refuse_states(model)
        make_plain(model)
    sizes = sizes_of(config, model, recipe.model.max_positions, device, int if parts is None else parts.least)
    if context.initial:
        fill_initial(model, recipe, plugins, None if parts is None else parts.holds)
    return Assembled(model, device, selection.choices, sizes)


def device_of(config: LocalConfig, index: int, rank: int) -> torch.device:
    """Where rank `rank` of generator `index` computes. Of several GPUs the last for the first rank of generator 0, the one before for the next: the trainer's ranks begin at the first.
    UsageError where ranks of one generator would share one."""
    device = devices.select(config.device)
    if device.type != "cuda":
        return device
    count = torch.cuda.device_count()
    if config.tensor > count:
        raise UsageError(
            f"generator.tensor is {config.tensor}, and this machine has {count} GPU{'s' * (count > 1)}: every rank needs one of its own."
        )
    return torch.device("cuda", (count - 1 - (index * config.tensor + rank)) % count)


def kernels_of(config: LocalConfig, context: GeneratorContext, device: torch.device, dtype: str) -> ops.Selection:
    """The kernels: those of the recipe and the settings; in the batch-invariant mode of its table, and UsageError for any other."""
    recipe, plugins = context.recipe, context.plugins
    if not context.invariant:
        return ops.select({**recipe.kernels, **config.kernels}, plugins, devices.capabilities(), dtype)
    kernels = {**batch_invariant(recipe).kernels, **config.kernels}
    selection = ops.select(kernels, plugins, devices.capabilities(), dtype, invariant=True)
    chosen = {op: choice.kernel for op, choice in selection.choices.items()}
    if found := kernel_problems(chosen, device.type, dtype, os.environ):
        raise UsageError(f"The generator cannot be batch-invariant: {' '.join(found)}")
    return selection


def make_plain(model: nn.Module) -> None:
    """Latent attention in the form that training takes: another order of products gives other bits."""
    for module in model.modules():
        if getattr(module, "form", None) in ("auto", "absorbed"):
            cast(Any, module).form = "plain"


def refuse_states(model: nn.Module) -> None:
    """UsageError for a model with a recurrence: its sums depend on where chunks begin."""
    for mixer, spec in specs_of(model).items():
        if spec.kind == "recurrent":
            raise UsageError(
                f"The generator cannot be batch-invariant: mixer {mixer!r} is a recurrence, which a trainer computes in other chunks than a generator does, and so with other "
                "roundings. Turn the mode off, or use a model without it."
            )


def sizes_of(config: LocalConfig, model: nn.Module, positions: int, device: torch.device, least: Callable[[int], int] = int) -> Sizes:
    """Numbers for what the settings leave open. `least` is the least of all ranks' numbers. UsageError where the caches could not hold a request."""
    wanted = min(config.max_tokens or positions, positions)
    specs = specs_of(model)
    one, states = block_bytes(specs, config.block), state_bytes(specs) * config.max_sequences
    all_full = config.max_sequences * -(-wanted // config.block)
    if config.blocks is not None:
        blocks = config.blocks
    else:
        room = config.cache_bytes or (
            CPU_CACHE_BYTES if device.type == "cpu" else int(torch.cuda.mem_get_info(device)[0] * GPU_CACHE_SHARE)
        )
        blocks = least(min(all_full, max(0, room - states) // max(1, one)))
    if blocks * config.block < 2:
        raise UsageError(
            f"The generator's caches hold {blocks} blocks of {config.block} tokens ({one} bytes each)"
            + (f" beside {states} bytes of states" if states else "")
            + ": no request fits. Raise generator.cache_bytes"
            + (", or lower generator.max_sequences." if states else ".")
        )
    return Sizes(
        block=config.block,
        blocks=blocks,
        max_sequences=config.max_sequences,
        max_batch_tokens=config.max_batch_tokens,
        max_tokens=min(wanted, blocks * config.block),
        prefix_cache=config.prefix_cache,
    )
