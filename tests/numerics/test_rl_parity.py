"""Trainer and generator agree bit for bit: every relation of `intarsia rl parity` on the debug models, and the first place where they part when a kernel is not of the mode."""

from __future__ import annotations

import json

import pytest
import torch
from intarsia import cli, plugins
from intarsia.config import resolve
from intarsia_rl.invariant.parity.relations import Parity, Settings
from intarsia_rl.invariant.parity.sides import Paths

MODELS = ("llama3/debug", "deepseek_v3/debug", "qwen3/moe-debug")


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def parity(name, *overrides, invariant=True, settings=None):
    recipe = resolve(name, ("train.device=cpu", *overrides), ("batch_invariant",)).recipe
    return Parity(recipe, plugins.current(), settings or Settings(sequences=3, tokens=40), invariant)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_relation_holds(name, dtype):
    torch.set_num_threads(1)
    outcomes = list(parity(name, f"precision.compute={dtype}").outcomes())
    for outcome in outcomes:
        assert outcome.equal, outcome
    # Latents are gathered, in shapes that follow from what is cached.
    assert ("fixed shapes = decode" in {outcome.relation for outcome in outcomes}) == (name != "deepseek_v3/debug")


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_threads_give_what_one_gives(name, dtype):
    """Trainer and generator need not have the same number."""
    torch.set_num_threads(1)
    found = parity(name, f"precision.compute={dtype}", settings=Settings(sequences=2, tokens=24))
    found.tokens = {"s0": (found.prompts["s1"] * 24)[:24], "s1": (found.prompts["s1"] * 24)[1:20]}
    scored = found._scored(Paths())
    of_one = found.trainer.packed(found.tokens, 60), scored(None)
    torch.set_num_threads(2)
    of_two = found.trainer.packed(found.tokens, 60), scored(None)
    assert of_one[0] == of_one[1] == of_two[0] == of_two[1]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sequence_is_the_same_alone_and_among_2_3_and_16(name, dtype):
    torch.set_num_threads(1)
    found = parity(name, f"precision.compute={dtype}", settings=Settings(sequences=16, tokens=33))
    found.tokens = {key: (prompt * 33)[: 9 + 3 * (number % 9)] for number, (key, prompt) in enumerate(found.prompts.items())}
    every = found.tokens
    of_one = found.trainer.alone({"s1": every["s1"]})
    for count in (2, 3, 16):
        some = dict(list(every.items())[:count])
        for scored in (found.trainer.padded(some), found.trainer.packed(some, 50)):
            assert {token: value for token, value in scored.items() if token[0] == "s1"} == of_one


def test_where_they_part_is_named(capsys):
    arguments = [
        "rl",
        "parity",
        "llama3/debug",
        "train.device=cpu",
        "kernels.attention=reference",
        "--unchecked",
        "--json",
        "--threads",
        "1",
    ]
    assert cli.main([*arguments, "--sequences", "3", "--tokens", "40"]) == 4
    outcomes = {each["relation"]: each for each in json.loads(capsys.readouterr().out)}
    broken = [each for each in outcomes.values() if not each["equal"]]
    assert broken
    first = [each["first"] for each in broken if each["first"]]
    assert first and all(each["module"].endswith(".attention") and each["operator"] == "attention" for each in first)


def test_what_the_table_lacks_is_refused_before_anything_is_computed(capsys):
    assert cli.main(["rl", "parity", "llama3/debug", "train.device=cpu", "kernels.linear=reference"]) == 2
    assert "linear" in capsys.readouterr().err


def test_the_list_needs_no_recipe(capsys):
    assert cli.main(["rl", "parity", "--list"]) == 0
    assert "attention/tiled" in capsys.readouterr().out
