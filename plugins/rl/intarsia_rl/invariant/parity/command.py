"""`intarsia rl parity`. Torch is imported once the recipe is known to be good."""

from __future__ import annotations

import argparse
import json
from typing import Any

from intarsia.config import resolve
from intarsia.errors import NumericsError, UsageError
from intarsia.plugins import current

from intarsia_rl.invariant import table

TRANSFORM = "batch_invariant"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    add = parser.add_argument
    add("recipe", nargs="?", metavar="RECIPE", help="a recipe's name, or a run directory")
    add("overrides", nargs="*", metavar="PATH=VALUE", help="values of the recipe")
    add("--with", dest="transforms", action="append", default=[], metavar="NAME", help=f"a transform; {TRANSFORM} is always applied first")
    add("--list", action="store_true", help="print what the batch-invariant mode supports, and do nothing else")
    add("--sequences", type=int, default=6, metavar="N", help="how many sequences are compared (default %(default)s)")
    add("--tokens", type=int, default=72, metavar="N", help="how long they are, at most (default %(default)s)")
    add("--seed", type=int, default=0, metavar="N", help="seed of their tokens (default %(default)s)")
    add("--threads", type=int, metavar="N", help="CPU threads; default: train.threads, or torch's own choice")
    add("--unchecked", action="store_true", help="compare though the table refuses the recipe: shows where the two sides part")
    add("--json", action="store_true", help="print JSON and nothing else to stdout")


def run(arguments: argparse.Namespace) -> int:
    """0 where every relation holds, 4 where one does not."""
    if arguments.list:
        print(json.dumps(_supported(), indent=2) if arguments.json else _listing())
        return 0
    if not arguments.recipe:
        raise UsageError("Name a recipe, as in `intarsia rl parity llama3/debug`, or give --list.")
    if arguments.sequences < 1:
        raise UsageError(f"--sequences is {arguments.sequences}; it must be at least 1.")
    recipe = resolve(
        arguments.recipe, arguments.overrides, [TRANSFORM, *(name for name in arguments.transforms if name != TRANSFORM)]
    ).recipe
    plugins = current()
    import torch

    from intarsia_rl.invariant.check import check_recipe
    from intarsia_rl.invariant.parity.relations import Parity, Settings

    threads = arguments.threads or recipe.train.threads
    if threads:
        torch.set_num_threads(threads)
    parity = Parity(recipe, plugins, Settings(arguments.sequences, arguments.tokens, arguments.seed), not arguments.unchecked)
    if not arguments.unchecked:
        check_recipe(recipe, plugins, {op: choice.kernel for op, choice in parity.choices.items()})
    outcomes = []
    for outcome in parity.outcomes():
        outcomes.append(outcome)
        if not arguments.json:
            print(_line(outcome), flush=True)
    if arguments.json:
        print(json.dumps([_facts(outcome) for outcome in outcomes], indent=2))
    failed = [outcome.relation for outcome in outcomes if not outcome.equal]
    if failed and not arguments.json:
        print(f"{len(failed)} of {len(outcomes)} relations do not hold.")
    return NumericsError.exit_code if failed else 0


def _line(outcome: Any) -> str:
    note = f" ({outcome.note})" if outcome.note else ""
    if outcome.equal:
        return f"{outcome.relation:28} equal: {outcome.compared} log-probabilities{note}"
    if not outcome.compared:
        return f"{outcome.relation:28} nothing was compared{note}"
    text = (
        f"{outcome.relation:28} DIFFER: {outcome.differing} of {outcome.compared} log-probabilities, by up to {outcome.largest:.3g}{note}"
    )
    return text if outcome.difference is None else f"{text}\n{'':28} first in {outcome.difference}"


def _facts(outcome: Any) -> dict[str, Any]:
    first = outcome.difference
    return {
        "relation": outcome.relation,
        "equal": outcome.equal,
        "compared": outcome.compared,
        "differing": outcome.differing,
        "largest": outcome.largest,
        "note": outcome.note,
        "first": None
        if first is None
        else {"module": first.module, "operator": first.op, "sequence": first.token[0], "position": first.token[1]},
    }


def _supported() -> dict[str, Any]:
    return {
        "devices": {
            device: {
                "dtypes": list(table.dtypes(device)),
                "operators": {
                    op: [{"kernel": row.kernel, "why": row.why, "environment": dict(row.environment)} for row in table.rows_of(op, device)]
                    for op in table.operators(device)
                },
            }
            for device in ("cpu", "cuda")
        },
        "models": list(table.MODELS),
        "components": dict(table.COMPONENTS),
        "dispatchers": list(table.DISPATCHERS),
        "mesh": list(table.MESH),
        "compile": "none",
        "refused": dict(table.REFUSED),
    }


def _listing() -> str:
    lines = []
    for device in ("cpu", "cuda"):
        lines.append(f"{device}, {' or '.join(table.dtypes(device))}:")
        for op in table.operators(device):
            for number, row in enumerate(table.rows_of(op, device)):
                needs = "".join(f" Needs {name}={value}." for name, value in row.environment.items())
                lines.append(f"  {op if not number else '  or':22} {row.kernel:40} {row.why}{needs}")
        lines.append("")
    lines.append(f"model families: {', '.join(table.MODELS)}")
    lines.append(f"components: {', '.join(table.COMPONENTS)}")
    lines.append(f"dispatchers of experts: {', '.join(table.DISPATCHERS)}")
    lines.append(f"mesh: {', '.join(table.MESH)} may be above 1; compile.mode: none")
    lines += ["", "refused by name, among others:", *(f"  {name}: {why}" for name, why in table.REFUSED.items())]
    return "\n".join(lines)
