"""Steps of decoding as CUDA graphs: bit for bit what steps launched one by one give in the batch-invariant mode, whoever sits where; weights that are pushed, caches that are cleared, steps that cannot be recorded."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any

import chz
import pytest
import torch
from intarsia import ops
from intarsia.device import capabilities
from intarsia.errors import NumericsError
from intarsia.plugins import current
from intarsia_generation.engine.build import build
from intarsia_generation.engine.config import LocalConfig
from intarsia_generation.engine.engine import Engine, Sizes
from intarsia_generation.engine.request import Job
from intarsia_models_common.moe.config import softmax_experts
from intarsia_qwen3_5 import config as qwen3_5
from intarsia_rl.contracts import GeneratorContext, Request, Sampling, WeightVersion
from intarsia_rl.invariant import table
from torch import nn

from tests.support.small_models import dense, recipe_of

pytestmark = pytest.mark.gpu

PROMPTS = [tuple(range(3, 100)), (5,), tuple(range(3, 70)), tuple(range(140, 189)), tuple(range(3, 100))]
SIZES = {"dim": 256, "heads": 4, "kv_heads": 2, "head_dim": 64, "hidden": 512, "vocab_size": 512, "max_positions": 512}


def routed() -> Any:
    """Softmax attention, with a window in the second layer, which has experts."""
    model = dense(window=40, softcap=20.0, **SIZES)
    first, second = model.layers
    return chz.replace(model, layers=(first, chz.replace(second, feed_forward=softmax_experts(8, 2, 128, joint_loss=0.0))))


CONFIGS: dict[str, Any] = {"softmax": lambda: dense(window=40, softcap=20.0, **SIZES), "experts": routed, "states": qwen3_5.debug}


def new_model(kind: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    built: Any = current().build(CONFIGS[kind]())
    fill(built, 0)
    for module in built.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if name not in getattr(module, "keeps_float32", ()):
                parameter.data = parameter.data.to(dtype)
    return built.to("cuda").eval()


model = functools.cache(new_model)


@torch.no_grad()
def fill(built: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in built.parameters():
        parameter.copy_((0.1 * torch.randn(parameter.shape, generator=generator)).to(parameter.dtype))


@functools.cache
def kernels(invariant: bool, dtype: str = "bfloat16") -> dict[str, ops.Choice]:
    # A product that asks for no variable of the environment.
    wanted = {**table.kernels("cuda"), "linear": "intarsia-kernels:linear/ascending"} if invariant else {}
    return dict(ops.select(wanted, current(), capabilities(), dtype, invariant=invariant).choices)


def engine(built: Any, graphs: str, *, invariant: bool = True, dtype: str = "bfloat16", **more: Any) -> Engine:
    block, blocks = more.pop("block", 16), more.pop("blocks", 200)
    sizes = Sizes(block, blocks, more.pop("sequences", 5), more.pop("batch", 256), min(512, blocks * block), more.pop("prefix", True))
    made = Engine(
        built,
        torch.device("cuda"),
        sizes,
        more.pop("fill", lambda weights: None),
        choices={**kernels(invariant, dtype), **more.pop("choices", {})},
        invariant=invariant,
        graphs=graphs,  # type: ignore[arg-type]
    )
    made.begin(0)
    return made


def submit(made: Engine, prompts: Any, count: int = 40, **settings: Any) -> dict[str, Any]:
    ended: dict[str, Any] = {}
    for number, prompt in enumerate(prompts):
        request = Request(str(number), prompt, Sampling(count + number % 3, seed=number), routes=settings.get("routes", False))
        made.add(Job(request, number, None, functools.partial(ended.__setitem__, request.id)))
    return ended


def run(made: Engine, prompts: Any = PROMPTS, count: int = 40, **settings: Any) -> list[Any]:
    ended = submit(made, prompts, count, **settings)
    while made.step():
        pass
    found = [ended[str(number)] for number in range(len(prompts))]
    for each in found:
        if type(each) is RuntimeError:  # a step that failed
            raise each
    return found


def same(found: list[Any], expected: list[Any]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one.tokens, one.log_probs, one.routes) == (other.tokens, other.log_probs, other.routes)


def recorded(made: Engine) -> list[int]:
    """The sizes that are recorded from now on."""
    static, sizes = made.runner.static, []
    record: Callable[[Any], None] = static._record

    def noted(step: Any) -> None:
        record(step)
        assert isinstance(step.graph, torch.cuda.CUDAGraph)
        sizes.append(step.size)

    static._record = noted  # type: ignore[method-assign]
    return sizes


ARRANGEMENTS: dict[str, dict[str, Any]] = {
    "as they come": {},
    "alone": {"sequences": 1},
    "rows that are nobody's": {"sequences": 23},
    "chunks": {"batch": 31},
    "no prefix cache": {"prefix": False},
    "blocks run out": {"blocks": 20},
    "blocks of one token": {"block": 1, "blocks": 1000},
}


@pytest.mark.parametrize("kind", ["softmax", "experts"])
def test_graphs_give_the_same_bits(kind: str) -> None:
    """Experts that were chosen included; and those of the reference of `paged_attention`, which gathers."""
    routes = kind == "experts"
    expected = run(engine(model(kind), "off"), routes=routes)
    gathers = engine(model(kind), "off", choices={"paged_attention": ops.Choice("reference", "the test's")})
    same(run(gathers, routes=routes), expected)
    for name, settings in ARRANGEMENTS.items():
        made = engine(model(kind), "on", **settings)
        sizes = recorded(made)
        same(run(made, routes=routes), expected)
        assert made.runner.static.computed > 39, name
        assert 0 < len(sizes) == len(set(sizes)), name
        assert (made.scheduler.preemptions > 0) == (name == "blocks run out")


@pytest.mark.parametrize("kind", ["softmax", "states"])
def test_with_the_kernels_of_every_day_results_are_close(kind: str) -> None:
    """Rows that are nobody's change roundings, and a draw that hangs on one goes another way: up to there all agree. States of who had a place before are gone."""
    built = model(kind, torch.float32)
    expected = run(engine(built, "off", invariant=False, dtype="float32"))
    agreed = total = 0
    for settings in ({}, {"sequences": 3}, {"blocks": 20}, {"batch": 31}):
        made = engine(built, "on", invariant=False, dtype="float32", **settings)
        for one, other in zip(run(made), expected, strict=True):
            pairs = list(zip(one.tokens, other.tokens, strict=True))
            until = next((number for number, (mine, its) in enumerate(pairs) if mine != its), len(pairs))
            assert list(one.log_probs[:until]) == pytest.approx(other.log_probs[:until], abs=2e-3)
            agreed, total = agreed + until, total + len(pairs)
    assert agreed > 0.9 * total, (agreed, total)


def test_weights_are_pushed_in_place_between_steps() -> None:
    built = new_model("softmax")
    found, sizes = {}, []
    for graphs in ("off", "on"):
        fill(built, 0)
        made = engine(built, graphs, fill=lambda weights: fill(built, weights.version))
        sizes = recorded(made)
        ended = submit(made, PROMPTS)
        for step in range(200):
            if step in (4, 9, 23):
                made.update(WeightVersion(step, "", {}, {}, {}))
            if not made.step():
                break
        found[graphs] = [ended[str(number)] for number in range(5)]
    same(found["on"], found["off"])
    assert {version for each in found["on"] for version in each.versions} == {0, 4, 9, 23}
    assert 0 < len(sizes) == len(set(sizes)), "a size was recorded again"


def test_parameters_that_lie_elsewhere_are_recorded_anew() -> None:
    built = new_model("softmax")
    made = engine(built, "on")
    sizes = recorded(made)
    run(made)
    before = list(sizes)
    with torch.no_grad():
        for module in built.modules():
            if isinstance(module, nn.Linear):
                module.weight = nn.Parameter(0.5 * module.weight)
    made.begin(1)
    same(run(made), run(engine(built, "off")))
    assert sizes == [*before, *before]


def test_after_a_request_that_is_not_sound_graphs_are_kept() -> None:
    """Caches are cleared in place."""
    built = new_model("softmax")
    expected = run(engine(built, "off"))
    bad = next(token for token in range(200, 512) if all(token not in each.tokens for each in expected))
    with torch.no_grad():
        built.tok_embeddings.weight[bad] = torch.nan
    made = engine(built, "on", sequences=6)
    sizes = recorded(made)
    run(made)
    before = list(sizes)
    *found, wrong = run(made, [*PROMPTS, (bad,)])
    same(found, expected)
    assert isinstance(wrong, NumericsError)
    assert sizes[: len(before)] == before and len(sizes) == len(set(sizes))


def test_a_kernel_that_waits_on_the_host_is_found_out_and_nothing_is_left_behind() -> None:
    """Steps go on one by one, the allocator gives memory back, and another engine can record."""
    built = model("softmax")
    own = kernels(True)["swiglu"].function or ops.swiglu.reference

    def waits(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        assert gate.flatten()[0].item() == gate.flatten()[0].item()
        return own(gate, up)

    expected = run(engine(built, "off"))
    stream = torch.cuda.current_stream()
    made = engine(built, "auto", choices={"swiglu": ops.Choice("acme:waits", "the test's", waits)})
    same(run(made), expected)
    assert "cannot be recorded" in made.stats(False).graphs and made.runner.static.computed == 0
    assert torch.cuda.current_stream() == stream
    torch.cuda.synchronize()
    held = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    reserved = torch.cuda.memory_reserved()
    del held
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= reserved - (1 << 28)
    other = engine(built, "on")
    same(run(other), expected)
    assert other.stats(False).graphs.startswith("recorded for 1, ")


def test_a_replayed_step_waits_for_nothing_but_its_tokens() -> None:
    """Behind its first steps, in which tables go to the device."""
    made = engine(model("softmax"), "on", invariant=False)
    submit(made, [PROMPTS[0]] * 4, count=60)
    for _ in range(6):
        made.step()
    hidden, waited = made.runner.static.hidden, []

    def strict(*arguments: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return hidden(*arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")
            waited.append(arguments)

    made.runner.static.hidden = strict  # type: ignore[method-assign]
    for _ in range(20):
        made.step()
    assert len(waited) == 20 and made.runner.static.computed >= 20


def test_the_generator_serves_with_graphs() -> None:
    """As a run builds it."""
    recipe = recipe_of(dense(**SIZES))
    config = LocalConfig(device="cuda", dtype="bfloat16", max_sequences=8, blocks=100, graphs="on")

    async def serve() -> tuple[Any, Any]:
        generator = build(config, GeneratorContext(recipe, current(), initial=True))
        requests = [Request(str(number), prompt, Sampling(12, seed=number)) for number, prompt in enumerate(PROMPTS)]
        results = await asyncio.gather(*map(generator.generate, requests))
        stats = await generator.stats()
        facts = generator.facts
        await generator.close()
        return (results, facts), stats

    (results, facts), stats = asyncio.run(serve())
    assert all(len(each.tokens) == 12 for each in results)
    assert "graphs" in facts.capabilities and stats.graphs.startswith("recorded for ")
