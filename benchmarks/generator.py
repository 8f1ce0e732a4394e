"""Tokens per second of the embedded generator's engine, and of the plain loop of `intarsia generate` in the same process.

    python benchmarks/generator.py llama3/debug
    python benchmarks/generator.py llama3/1b --device cuda --prompt 512 --tokens 256 --batch 1 8 64 --graphs --json OUT.json
    python benchmarks/generator.py llama3/debug --invariant

Weights are what the recipe's seed draws. Every request has a prompt of its own; tokens are drawn at temperature 1 and nothing ends early. Prefill counts as time, its tokens do not count as tokens. Each
figure is the best of `--rounds` after one that warms up, in which graphs are recorded. `ms` is the median step of the engine in which every request goes on by one token; `gather`, with `--reference`, is the engine whose
entries are gathered (the reference of `paged_attention`). The JSON has all seconds and steps. On a CPU `--graphs` computes the same fixed shapes without a graph.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import chz
import torch
from intarsia import device as devices
from intarsia import ops
from intarsia.config import Recipe
from intarsia.plugins import current
from intarsia_generation import Generator, SamplingConfig
from intarsia_generation.engine.build import kernels_of, make_plain
from intarsia_generation.engine.config import LocalConfig
from intarsia_generation.engine.engine import Engine, Sizes
from intarsia_generation.engine.request import Job
from intarsia_generation.engine.static import Graphs
from intarsia_rl.contracts import GeneratorContext, Request, Sampling
from intarsia_rl.weights.build import build_model, fill_initial


def main() -> None:
    """Measure, print one line for each batch, write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--layers", type=int, help="only so many of the model's layers")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--invariant", action="store_true")
    parser.add_argument("--graphs", action="store_true", help="measure the engine with CUDA graphs as well")
    parser.add_argument("--reference", action="store_true", help="measure the engine with the reference of paged_attention as well")
    parser.add_argument("--no-plain", action="store_true", help="leave the plain loop out")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    plugins = current()
    recipe: Recipe = plugins.target(plugins.registry("recipe").find(arguments.recipe))()
    if arguments.layers:
        recipe = chz.replace(recipe, model=chz.replace(recipe.model, layers=recipe.model.layers[: arguments.layers]))  # type: ignore[attr-defined]
    device = devices.select(arguments.device)
    dtype = recipe.precision.compute if arguments.dtype == "auto" else arguments.dtype
    context = GeneratorContext(recipe, plugins, invariant=arguments.invariant)
    selection = kernels_of(LocalConfig(), context, device, dtype)
    model = build_model(recipe, plugins, device, dtype)
    if arguments.invariant:
        make_plain(model)
    fill_initial(model, recipe, plugins)
    print(f"{recipe.name} on {devices.describe(device)}, {dtype}, prompts of {arguments.prompt}, {arguments.tokens} tokens each")
    rows = []
    for batch in arguments.batch:
        drawn = random.Random(batch)
        prompts = [tuple(drawn.randrange(recipe.model.vocab_size) for _ in range(arguments.prompt)) for _ in range(batch)]
        row: dict[str, Any] = {"batch": batch, "engine": by_engine(model, device, prompts, arguments, selection.choices)}
        if arguments.graphs:
            setting: Graphs = "on" if device.type == "cuda" else "eager"
            row["graphs"] = by_engine(model, device, prompts, arguments, selection.choices, setting)
        if arguments.reference:
            gathers = {**selection.choices, "paged_attention": ops.Choice("reference", "asked for")}
            row["gather"] = by_engine(model, device, prompts, arguments, gathers)
        if not arguments.no_plain:
            plain = Generator(
                model, plugins.build(recipe.data.tokenizer), recipe.model.max_positions, device, choices=selection.choices, batch=batch
            )
            work = functools.partial(by_loop, plain, prompts, arguments.tokens)
            row["plain"] = measured(work, arguments, batch, device)
        rows.append(row)
        print(line_of(row), flush=True)
    if arguments.json:
        facts = {"device": devices.describe(device), "torch": torch.__version__, "kernels": selection.facts()}
        settings = {name: value for name, value in vars(arguments).items() if name != "json"}
        arguments.json.write_text(json.dumps({"settings": settings, "facts": facts, "rows": rows}, indent=2))


def line_of(row: dict[str, Any]) -> str:
    """Tokens per second of each, how long its steps are, and what the engine is to the plain loop."""
    parts = [f"batch {row['batch']}"]
    for name, found in row.items():
        if name == "batch":
            continue
        text = f"{name} {found['tokens_per_s']:.4g}/s"
        if "step_s" in found:
            text += f" ({1e3 * statistics.median(found['step_s']):.2f} ms)"
        if "plain" in row and name != "plain":
            text += f" = {found['tokens_per_s'] / row['plain']['tokens_per_s']:.2f} x plain"
        parts.append(text)
    return "  ".join(parts)


def measured(work: Callable[[], None], arguments: argparse.Namespace, batch: int, device: torch.device) -> dict[str, Any]:
    """Generated tokens per second, the best round, and the seconds of all, the one that warms up first."""
    seconds = []
    for _ in range(arguments.rounds + 1):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return {"tokens_per_s": batch * arguments.tokens / min(seconds[1:]), "seconds_s": seconds}


def by_engine(
    model: Any,
    device: torch.device,
    prompts: list[tuple[int, ...]],
    arguments: argparse.Namespace,
    choices: Mapping[str, ops.Choice],
    graphs: Graphs = "off",
) -> dict[str, Any]:
    """All prompts as requests of one engine, which has no prefix cache: a round finds nothing of the one before it."""
    longest = len(prompts[0]) + arguments.tokens
    blocks = len(prompts) * -(-longest // 16) + 1
    sizes = Sizes(16, blocks, len(prompts), max(8192, len(prompts) + 1), longest, False)
    engine = Engine(model, device, sizes, lambda weights: None, choices=choices, invariant=arguments.invariant, graphs=graphs)
    engine.begin(0)
    steps: list[float] = []

    def work() -> None:
        ended: list[Any] = []
        steps.clear()
        jobs = [
            Job(Request(str(number), prompt, Sampling(arguments.tokens, seed=number)), number, None, ended.append)
            for number, prompt in enumerate(prompts)
        ]
        for job in jobs:
            engine.add(job)
        going_on = False
        while True:
            start = time.perf_counter()
            if not engine.step():
                break
            if going_on:  # a step ends with its tokens on the host
                steps.append(time.perf_counter() - start)
            going_on = all(job.log_probs for job in jobs)
        made = sum(len(result.tokens) for result in ended)
        assert made == len(prompts) * arguments.tokens, f"{made} tokens were generated"

    found = measured(work, arguments, len(prompts), device)
    return {**found, "step_s": steps, "graphs": engine.stats(False).graphs}


def by_loop(generator: Generator, prompts: list[tuple[int, ...]], tokens: int) -> None:
    """The plain loop: all prompts as one batch."""
    generator.generate(prompts, SamplingConfig(max_tokens=tokens, ignore_eos=True))


if __name__ == "__main__":
    main()
