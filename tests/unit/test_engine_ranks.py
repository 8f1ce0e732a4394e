"""A generator that is cut over ranks gives what one of one process gives, takes its boxes of the weights, and refuses what cannot be cut. Ranks are threads here."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chz
import pytest
import torch
from _weights import build as trainer
from _weights import change
from _weights import recipe_of as resolved
from intarsia.comm import Communicator
from intarsia.config import Recipe
from intarsia.contracts import Media
from intarsia.errors import DistributedError, NumericsError, UsageError
from intarsia.layout import slices
from intarsia.plugins import current
from intarsia_data.tokenizer import encode_parts
from intarsia_eager.config import WholeConfig
from intarsia_generation.engine import build as building
from intarsia_generation.engine.build import assembled, build
from intarsia_generation.engine.config import LocalConfig
from intarsia_generation.engine.engine import Engine
from intarsia_generation.engine.follower import serve
from intarsia_generation.engine.generator import LocalGenerator
from intarsia_generation.engine.ranks import Team
from intarsia_generation.engine.request import Job
from intarsia_generation.engine.sight import look
from intarsia_generation.engine.tensor import Parts
from intarsia_multimodal.decoding import Decoder
from intarsia_rl import media
from intarsia_rl.contracts import Generated, GeneratorContext, GeneratorFacts, Request, Sampling, WeightVersion
from intarsia_rl.invariant.check import problems
from intarsia_rl.weights import build as weights_build
from intarsia_rl.weights.build import build_model
from intarsia_rl.weights.config import SharedMemoryConfig, SocketConfig
from intarsia_rl.weights.fill import filled_version, own_tensors
from intarsia_rl.weights.shared_memory import SharedMemory
from intarsia_rl.weights.socket import Socket
from intarsia_testing.communicator import run_ranks
from torch import Tensor, nn

from tests.support.media import encoded, image, noise
from tests.support.small_models import dense, experts, recipe_of, seeing

PROMPTS = [tuple(range(3, 40)), (5,), tuple(range(3, 17)), tuple(range(40, 49)), tuple(range(3, 40)), (7, 8, 9)]
SMALL = LocalConfig(block=4, max_sequences=4, max_batch_tokens=19, max_tokens=64, device="cpu")


def recipe_named(kind: str) -> Recipe:
    if kind == "recurrent":
        found: Recipe = current().target(current().registry("recipe").find("qwen3_5/debug"))()
    else:
        found = recipe_of(
            experts() if kind == "latent" else dense(**({"kv_heads": 1} if kind == "one key head" else {"window": 6, "softcap": 20.0}))
        )
    return chz.replace(found, sharder=WholeConfig(), train=chz.replace(found.train, seed=3))


def results(engine: Engine, kind: str, **settings: Any) -> list[Generated]:
    """Requests that are more than run at once, of which some are drawn, some greedy, and one is scored."""
    ended: dict[str, Any] = {}
    for number, prompt in enumerate(PROMPTS):
        forced = (4, 9, 2) if number == 5 else ()
        sampling = Sampling(len(forced) or 6, temperature=float(number % 2), seed=number, top_p=0.9)
        request = Request(str(number), prompt, sampling, forced, routes=kind == "latent")
        engine.add(Job(request, number, None, functools.partial(ended.__setitem__, request.id)))
    while engine.step():
        pass
    for each in ended.values():
        if isinstance(each, BaseException):
            raise each
    return [ended[str(number)] for number in range(len(PROMPTS))]


def alone(recipe: Recipe, config: LocalConfig, work: Callable[[Engine], Any]) -> Any:
    """`work` of an engine of one process."""
    made = assembled(chz.replace(config, tensor=1), GeneratorContext(recipe, current(), initial=True))
    engine = Engine(made.model, made.device, made.sizes, lambda weights: None)
    engine.begin(0)
    return work(engine)


def together(recipe: Recipe, config: LocalConfig, work: Callable[[Engine], Any], world: Communicator) -> Any:
    """`work` of an engine whose model is cut over the ranks of `world`."""
    context = GeneratorContext(recipe, current(), initial=True)
    if world.rank:
        serve(config, context, world)
        return None
    team = Team(world, Parts(world, config.experts))
    made = assembled(config, context, team.parts)
    fill = functools.partial(team.fill, made.model, plugins=current())
    engine = Engine(made.model, made.device, made.sizes, fill, filled=lambda: filled_version(made.model), team=team)
    engine.begin(0)
    try:
        return work(engine)
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("kind", "ranks", "settings"),
    [
        ("softmax", 2, {}),
        ("softmax", 4, {"blocks": 17}),  # more ranks than key heads, and blocks for hardly more than one request
        ("one key head", 2, {"prefix_cache": False}),
        ("latent", 2, {}),
        ("latent", 2, {"experts": "cut", "blocks": 17}),
        ("recurrent", 2, {}),
    ],
)
def test_ranks_give_what_one_process_gives(kind: str, ranks: int, settings: dict[str, Any]) -> None:
    """The very tokens and experts, and log-probabilities up to the rounding of sums over ranks."""
    recipe = recipe_named(kind)
    config = chz.replace(SMALL, tensor=ranks, **settings)
    expected = alone(recipe, config, lambda engine: (results(engine, kind), engine.scheduler.preemptions))
    found = run_ranks(
        ranks, functools.partial(together, recipe, config, lambda engine: (results(engine, kind), engine.scheduler.preemptions))
    )[0]
    assert found[1] == expected[1] and (expected[1] > 0) == ("blocks" in settings)
    for one, other in zip(found[0], expected[0], strict=True):
        assert (one.tokens, one.routes, one.finish, one.cached_tokens) == (other.tokens, other.routes, other.finish, other.cached_tokens)
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-5)
    assert any(each.cached_tokens for each in found[0]) == (kind != "recurrent" and config.prefix_cache)


def seen(engine: Engine, processor: Any) -> list[Generated]:
    """Requests with images, cut by the borders of steps, a video, text beside, and what is known of an equal one."""
    frames = Media("video", tuple(encoded(noise(48, 64, number)) for number in range(4)))
    shown: list[Any] = [
        ("Two: ", image(64, 96), " and ", image(96, 64, 1), "?"),
        ("Text alone.",),
        (frames, "And ", image(64, 64, 2)),
        ("Two: ", image(64, 96), " and ", image(96, 64, 3), "?"),
    ]
    ended: dict[str, Any] = {}
    decoder = Decoder(processor)
    for number, parts in enumerate(shown):
        ids = encode_parts(processor.as_ids(parts), processor.tokenizer.encode, processor.tokenizer.vocab_size)
        places = media.placed(ids, [part for part in parts if isinstance(part, Media)], processor)
        request = Request(str(number), tuple(ids), Sampling(6, temperature=float(number % 2), seed=number), media=places)
        sight = look(request, decoder) if places else None
        engine.add(Job(request, number, None, functools.partial(ended.__setitem__, request.id), sight=sight))
    while engine.step():
        pass
    return [ended[str(number)] for number in range(len(shown))]


@pytest.mark.parametrize("name", ["qwen3_vl/debug", "qwen3_5/debug"])
def test_ranks_see_what_one_process_sees(name: str) -> None:
    """Also with features that are added behind the first blocks. The first rank looks, at each image once."""
    recipe = seeing(name)
    processor = media.processor_of(recipe.data, recipe.model, current())
    config = chz.replace(SMALL, tensor=2, max_tokens=256)

    def work(engine: Engine) -> tuple[list[Generated], int]:
        return seen(engine, processor), engine.eyes.looks

    expected, found = alone(recipe, config, work), run_ranks(2, functools.partial(together, recipe, config, work))[0]
    assert found[1] == expected[1] == 5
    for one, other in zip(found[0], expected[0], strict=True):
        assert (one.tokens, one.finish, one.cached_tokens) == (other.tokens, other.finish, other.cached_tokens)
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-5)


class Reader:
    """Weights that another run has left."""

    location = "here"

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}

    def read(self, name: str, box: Any = None) -> Tensor:
        return self.tensors[name].clone() if box is None else self.tensors[name][slices(box)].clone()


@pytest.mark.parametrize("source", ["drawn", "read"])
def test_every_rank_has_its_boxes_of_the_initial_weights(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit those of the whole model, with more than one way to cut."""
    recipe = recipe_named("latent")
    if source == "read":
        tensors = {
            name: torch.randn(tensor.shape) for name, tensor in own_tensors(build_model(recipe, current(), "cpu", "float32")).items()
        }
        monkeypatch.setattr(weights_build, "open_weights", lambda *arguments: Reader(tensors))
        recipe = chz.replace(recipe, train=chz.replace(recipe.train, init_from="there"))
    whole = own_tensors(assembled(SMALL, GeneratorContext(recipe, current(), initial=True)).model)

    def rank(world: Communicator) -> tuple[int, int]:
        parts = Parts(world, "cut")
        model = assembled(chz.replace(SMALL, tensor=2), GeneratorContext(recipe, current(), initial=True), parts).model
        cut = same_as(whole, model, parts)
        return cut, sum(tensor.numel() for tensor in own_tensors(model).values())

    found = run_ranks(2, rank)
    assert all(cut > 15 for cut, _ in found)
    assert sum(numel for _, numel in found) < 1.5 * sum(tensor.numel() for tensor in whole.values())


def same_as(whole: dict[str, Tensor], model: nn.Module, parts: Parts) -> int:
    """Hold a rank's tensors against the whole ones; how many are cut."""
    own = own_tensors(model)
    assert own.keys() == whole.keys()
    for name, tensor in own.items():
        (part,) = parts.holds.get(name, (None,))
        assert torch.equal(tensor, whole[name] if part is None else whole[name][slices(part.box)]), name
    return len(parts.holds)


def test_an_idle_generator_tells_the_others_that_it_lives() -> None:
    """Else their wait would end in an error; it serves afterwards."""
    recipe = recipe_named("softmax")

    def work(engine: Engine) -> tuple[int, int]:
        told: list[str] = []
        team = engine.team
        assert team is not None
        team.beat_s, tell = 0.02, team._tell
        team._tell = lambda message, *behind: (told.append(message["do"]), tell(message, *behind))[1]  # type: ignore[method-assign]
        generator = LocalGenerator(engine, GeneratorFacts("local", 264, 64, 4))

        async def run() -> int:
            while told.count("wait") < 3:
                await asyncio.sleep(0.01)
            return len((await generator.generate(Request("one", (5, 6), Sampling(4)))).tokens)

        async def whole() -> int:
            count = await run()
            await generator.close()
            return count

        return asyncio.run(whole()), told.count("wait")

    tokens, beats = run_ranks(2, functools.partial(together, recipe, chz.replace(SMALL, tensor=2), work))[0]
    assert tokens == 4 and beats > 2


# ---------------------------------------------------------------- weights


MESHES = ("mesh.dp_shard=2", "mesh.tp=2")


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("kind", [SharedMemory, Socket])
def test_weights_of_any_trainer_mesh(tmp_path: Path, kind: Any, mesh: str) -> None:
    """Each rank reads its boxes, and the digests over all of them are those that were published."""
    name = "deepseek_v3/debug" if kind is Socket else "llama3/debug"
    chosen = resolved(name, mesh, "sharder=flexshard")

    def rank(world: Communicator) -> int:
        run = trainer(chosen, world)
        change(run, 1)
        config = SharedMemoryConfig(folder=str(tmp_path)) if kind is SharedMemory else SocketConfig()
        transport = kind(config, tmp_path)
        try:
            plain = as_json(transport.publish(1, run.parts))
            weights = WeightVersion(**world.broadcast_json(plain))
            whole = filled(chosen.recipe, weights)
            parts = Parts(world.duplicate("generator"), "cut" if kind is Socket else "whole")
            cut = functools.partial(parts.cut, recipe=chosen.recipe, plugins=current())
            model = build_model(chosen.recipe, current(), "cpu", chosen.recipe.precision.compute, cut)
            assert parts.fill(model, weights, current()) is None
            count = same_as(whole, model, parts)
            world.barrier("read")
            return count
        finally:
            transport.close()

    assert all(count > 10 for count in run_ranks(2, rank))


def as_json(weights: WeightVersion | None) -> Any:
    return None if weights is None else {each.name: getattr(weights, each.name) for each in dataclasses.fields(weights)}


def filled(recipe: Recipe, weights: WeightVersion) -> dict[str, Tensor]:
    from intarsia_rl.weights.fill import fill

    model = build_model(recipe, current(), "cpu", recipe.precision.compute)
    fill(model, weights, current())
    return own_tensors(model)


def published(recipe: Recipe, folder: Path, version: int) -> tuple[SharedMemory, WeightVersion]:
    """What a trainer of one process publishes as its initial weights."""
    from intarsia.comm import SelfCommunicator
    from intarsia.mesh import Mesh
    from intarsia.parameters import ParameterTable

    with torch.device("meta"):
        model: Any = current().build(recipe.model)
    table = ParameterTable.from_model(model, seed=recipe.train.seed)
    mesh = Mesh({}, SelfCommunicator())
    sharded = current().build(recipe.sharder).shard(model, table, mesh, mesh.world)
    transport = SharedMemory(SharedMemoryConfig(folder=str(folder)), folder)
    weights = transport.publish(version, {"model": model, "parameters": sharded, "table": table, "mesh": mesh})
    assert weights is not None
    return transport, weights


def test_weights_change_between_steps_or_not_at_all(tmp_path: Path) -> None:
    """A wrong digest of a tensor that is cut, weights that one rank alone cannot read, and good ones: what is in force is the same on all ranks, or nothing is."""
    recipe = recipe_named("softmax")
    transport, weights = published(chz.replace(recipe, train=chz.replace(recipe.train, seed=8)), tmp_path, 5)
    torn = dataclasses.replace(weights, digests={**weights.digests, "layers.1.attention.wo.weight": "0" * 32})
    missing = dataclasses.replace(weights, location={**weights.location, "path": str(tmp_path / "nothing")})
    other = dataclasses.replace(weights, shapes={**weights.shapes, "tok_embeddings.weight": (263, 32)})

    def work(engine: Engine) -> list[Generated]:
        with pytest.raises(UsageError, match="does not fit"):
            engine.update(other)
        assert engine.version is None
        for wrong, error, match in (
            (torn, NumericsError, r"layers\.1\.attention\.wo\.weight differs"),
            (missing, DistributedError, "not at"),
        ):
            with pytest.raises(error, match=match):
                engine.update(wrong)
            assert engine.version is None and not engine.step()
        engine.update(weights)
        assert engine.version == 5
        with pytest.raises(UsageError, match="never go back"):
            engine.update(dataclasses.replace(weights, version=4))
        # Refused before anything was touched: what was in force stays.
        with pytest.raises(UsageError, match="does not fit"):
            engine.update(dataclasses.replace(other, version=6))
        assert engine.version == 5
        return results(engine, "softmax")

    try:
        found = run_ranks(2, functools.partial(together, recipe, chz.replace(SMALL, tensor=2), work))[0]
    finally:
        transport.close()
    expected = alone(chz.replace(recipe, train=chz.replace(recipe.train, seed=8)), SMALL, lambda engine: results(engine, "softmax"))
    assert [each.tokens for each in found] == [each.tokens for each in expected]
    assert {version for each in found for version in each.versions} == {5}


def test_what_one_rank_cannot_take_no_rank_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank's reader fails half-way: the others hear of it and do not wait, and none serves."""
    recipe = recipe_named("softmax")
    transport, weights = published(recipe, tmp_path, 5)
    from intarsia_generation.engine import tensor

    whole = tensor.fill

    def rank(world: Communicator) -> tuple[str, int | None]:
        parts = Parts(world, "whole")
        model = assembled(chz.replace(SMALL, tensor=2), GeneratorContext(recipe, current()), parts).model

        def fails(*arguments: Any) -> None:
            if world.rank:
                raise DistributedError("the connection ended")
            whole(*arguments)

        world.barrier("built")
        with monkeypatch.context() as patch:
            if world.rank == 0:
                patch.setattr(tensor, "fill", lambda own, *rest: fails(own, *rest) if own is model else other(own, *rest))
            world.barrier("patched")
            return str(parts.fill(model, weights, current())), filled_version(model)

    def other(*arguments: Any) -> None:
        raise DistributedError("the connection ended")

    try:
        found = run_ranks(2, rank)
    finally:
        transport.close()
    assert found == [("Rank 1 of the 2 of this generator: the connection ended", None)] * 2


# ---------------------------------------------------------------- what is refused


def test_what_cannot_be_cut_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the roles' own messages, before anything is computed."""

    def refusal(model: Any, ranks: int, kind: str = "whole") -> str:
        def rank(world: Communicator) -> str:
            with pytest.raises(UsageError) as caught:
                assembled(chz.replace(SMALL, tensor=ranks), GeneratorContext(recipe_of(model), current()), Parts(world, kind))
            return str(caught.value)

        (text,) = set(run_ranks(ranks, rank))
        return text

    text = refusal(dense(), 3)
    assert text.startswith("generator.tensor (tp) = 3: ") and "4 query heads, which tp=3 does not divide" in text and "2 or 4" in text
    assert "2 query heads" in refusal(experts(), 4)
    assert refusal(dense(), 2, "cut").startswith("generator.tensor (tp) and experts (ep) = 2: ")


def test_settings_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_named("softmax")
    with pytest.raises(UsageError, match=r"generator\.tensor is 0; it must be at least 1"):
        LocalConfig(tensor=0)
    with pytest.raises(UsageError, match=r"generator\.experts is 'cutt'\. Did you mean 'cut'"):
        LocalConfig(experts="cutt")
    with pytest.raises(UsageError, match=r"cannot be batch-invariant: generator\.tensor=2: each rank multiplies a part of a row"):
        build(chz.replace(SMALL, tensor=2), GeneratorContext(recipe, current(), invariant=True))
    run: Recipe = current().target(current().registry("recipe").find("arithmetic/debug"))()
    cut = chz.replace(run, data=chz.replace(run.data, loader=chz.replace(run.data.loader, generator=chz.replace(SMALL, tensor=2))))
    assert any("generator.tensor=2" in each for each in problems(cut, current(), {}, {}))
    assert not any("generator.tensor" in each for each in problems(run, current(), {}, {}))


def test_every_rank_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building.devices, "select", lambda name: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 6)
    config = chz.replace(SMALL, tensor=2)
    places = [building.device_of(config, index, rank).index for index in range(4) for rank in range(2)]
    assert places == [5, 4, 3, 2, 1, 0, 5, 4]
    assert [building.device_of(SMALL, index, 0).index for index in range(3)] == [5, 4, 3]
    with pytest.raises(UsageError, match=r"generator\.tensor is 8, and this machine has 6 GPUs"):
        building.device_of(chz.replace(config, tensor=8), 0, 0)
