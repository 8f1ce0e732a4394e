"""The engine on small models: arrangements give one result, and what goes wrong leaves nothing behind."""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import pytest
import torch
from intarsia import ops
from intarsia.contracts import CacheSpec, MixerSpec
from intarsia.errors import NumericsError, UsageError
from intarsia.plugins import current
from intarsia_eager.context import TrainContext
from intarsia_generation.engine.build import make_plain, sizes_of
from intarsia_generation.engine.config import LocalConfig
from intarsia_generation.engine.context import specs_of
from intarsia_generation.engine.engine import Engine, Sizes
from intarsia_generation.engine.generator import LocalGenerator
from intarsia_generation.engine.request import Job
from intarsia_rl.contracts import Generated, GeneratorFacts, Request, Sampling, WeightVersion
from intarsia_rl.invariant import table
from torch import nn

from tests.support.small_models import dense, experts

CPU = torch.device("cpu")
PROMPTS = [tuple(range(3, 24)), (5,), tuple(range(3, 17)), tuple(range(40, 49)), tuple(range(3, 24))]


@functools.cache
def model(kind: str) -> Any:
    sizes = {"vocab_size": 96, "max_positions": 96}
    config = experts(layers=2, ahead=0, **sizes) if kind == "latent" else dense(window=6, softcap=20.0, **sizes)
    built: Any = current().build(config)
    fill(built, 0)
    return built.eval()


@torch.no_grad()
def fill(built: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in built.parameters():
        parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))


@functools.cache
def choices(invariant: bool) -> Any:
    kernels = table.kernels("cpu") if invariant else {"*": "reference"}
    return ops.select(kernels, current(), frozenset({"cpu"}), "float32", invariant=invariant).choices


def engine(
    built: Any,
    *,
    blocks: int = 200,
    block: int = 4,
    sequences: int = 5,
    batch: int = 64,
    prefix: bool = True,
    invariant: bool = False,
    **more: Any,
) -> Engine:
    if invariant:
        make_plain(built)
    sizes = Sizes(block, blocks, sequences, batch, min(96, blocks * block), prefix)
    made = Engine(built, CPU, sizes, more.pop("fill", lambda weights: None), choices=choices(invariant), invariant=invariant, **more)
    made.begin(0)
    return made


def submit(made: Engine, prompts: Any, count: int = 14, **settings: Any) -> tuple[list[Job], dict[str, Any]]:
    ended: dict[str, Any] = {}
    jobs = []
    for number, prompt in enumerate(prompts):
        sampling = Sampling(count, seed=number, temperature=settings.get("temperature", 1.0))
        request = Request(str(number), prompt, sampling, settings.get("forced", ()), routes=settings.get("routes", False))
        jobs.append(Job(request, number, None, functools.partial(ended.__setitem__, request.id)))
        made.add(jobs[-1])
    return jobs, ended


def run(made: Engine, prompts: Any = PROMPTS, count: int = 14, **settings: Any) -> list[Any]:
    _, ended = submit(made, prompts, count, **settings)
    while made.step():
        pass
    return [ended[str(number)] for number in range(len(prompts))]


def close(found: list[Generated], expected: list[Generated], exact: bool) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.tokens == other.tokens and one.routes == other.routes
        if exact:
            assert one.log_probs == other.log_probs
        else:
            assert one.log_probs == pytest.approx(other.log_probs, abs=2e-5)


# ---------------------------------------------------------------- one result


ARRANGEMENTS: dict[str, dict[str, Any]] = {
    "alone": {"sequences": 1},
    "chunks": {"batch": 7},
    "no prefix cache": {"prefix": False},
    "blocks run out": {"blocks": 14, "sequences": 5},
    "blocks of one token": {"block": 1, "blocks": 200},
}


@pytest.mark.parametrize("invariant", [False, True], ids=["reference", "invariant"])
@pytest.mark.parametrize("kind", ["softmax", "latent"])
def test_every_arrangement_gives_one_result(kind, invariant):
    """Bit for bit where the kernels are invariant, experts that were chosen included; and it is that of a pass over the whole sequence."""
    built, routes = model(kind), kind == "latent"
    expected = run(engine(built, invariant=invariant), routes=routes)
    for name, settings in ARRANGEMENTS.items():
        made = engine(built, invariant=invariant, **settings)
        close(run(made, routes=routes), expected, invariant)
        assert (made.scheduler.preemptions > 0) == (name == "blocks run out")
        assert made.pool.used == 0
    log_probs = ops.operators(current())["token_log_probs"]
    with torch.no_grad(), ops.installed(choices(invariant)):
        for prompt, found in zip(PROMPTS, expected, strict=True):
            tokens = torch.tensor([*prompt, *found.tokens])
            context = TrainContext(torch.arange(len(tokens))[None], None, ((len(tokens),),))
            whole, _ = log_probs(built(tokens[None], context)[0, :-1], built.head_weight_VD, tokens[1:])
            assert list(found.log_probs) == pytest.approx(whole[len(prompt) - 1 :].tolist(), abs=0.0 if invariant else 2e-5)


@pytest.mark.parametrize("kind", ["softmax", "latent"])
def test_scoring_gives_what_was_generated(kind):
    built = model(kind)
    drawn = run(engine(built, invariant=True), routes=kind == "latent")
    for number, (prompt, found) in enumerate(zip(PROMPTS, drawn, strict=True)):
        made = engine(built, invariant=True, batch=9)
        (scored,) = run(made, [prompt], forced=found.tokens, routes=kind == "latent")
        close([scored], [found], exact=True)
        assert made.generated_tokens == 0, number


def test_an_update_to_equal_weights_in_the_middle_changes_nothing_but_versions():
    built = model("latent")
    expected = run(engine(built, invariant=True), routes=True)
    made = engine(built, invariant=True)
    _, ended = submit(made, PROMPTS, routes=True)
    for step in range(40):
        if step in (3, 8):
            made.update(WeightVersion(step, "", {}, {}, {}))
        made.step()
    close([ended[str(number)] for number in range(5)], expected, exact=True)
    assert {version for each in ended.values() for version in each.versions} == {0, 3, 8}


def test_one_prompt_is_computed_once_for_a_group():
    """All but its last token, which everybody computes in the same step as the first one does the others."""
    made = engine(model("softmax"), sequences=8)
    found = run(made, [PROMPTS[0]] * 6, count=2, temperature=0.0)
    (alone,) = run(engine(model("softmax")), [PROMPTS[0]], count=2, temperature=0.0)
    close(found, [alone] * 6, exact=False)
    assert (made.prompt_tokens, made.cached_tokens) == (21 + 5, 5 * 20)


# ---------------------------------------------------------------- what goes wrong


def test_weights_that_are_not_numbers_end_requests_and_leave_no_trace():
    built = model("softmax")
    expected = run(engine(built))

    def broken_then_good(weights: WeightVersion) -> None:
        fill(built, 0)
        if weights.version == 1:
            with torch.no_grad():
                built.layers[0].attention.wk.weight[0, 0] = torch.nan

    made = engine(built, fill=broken_then_good)
    _, ended = submit(made, PROMPTS)
    made.step()
    made.update(WeightVersion(1, "", {}, {}, {}))
    while made.step():
        pass
    assert len(ended) == 5 and all(isinstance(error, NumericsError) and "version 1" in str(error) for error in ended.values())
    made.update(WeightVersion(2, "", {}, {}, {}))
    close(run(made), expected, exact=False)
    assert made.pool.used == 0


def not_a_number_for(token: int, kind: str) -> Any:
    """A model that computes nothing sound of one token."""
    built: Any = current().build(model(kind).config)
    fill(built, 0)
    with torch.no_grad():
        built.tok_embeddings.weight[token] = torch.nan
    return built.eval()


@pytest.mark.parametrize("kind", ["softmax", "latent"])
def test_a_piece_of_a_prompt_that_is_not_sound_leaves_nothing_in_blocks_of_others(kind: str) -> None:
    """The request ends with the piece, though it decides no token, and is gone before anybody can have its blocks."""
    (expected,) = run(engine(model(kind)), [PROMPTS[3]], count=4)
    made = engine(not_a_number_for(90, kind), blocks=5, batch=12, prefix=False)
    (job,), ended = submit(made, [(90,) * 20])
    made.step()
    made.drop(job)
    close(run(made, [PROMPTS[3]], count=4), [expected], exact=False)
    assert isinstance(ended["0"], NumericsError) and "not finite" in str(ended["0"])


@pytest.mark.parametrize("kind", ["softmax", "latent"])
def test_behind_its_own_blocks_a_request_reads_none_of_others(kind: str) -> None:
    """Of a row that another request had before: its blocks may be those of one that is not sound in the very same step."""
    long, short, other = tuple(range(3, 40)), PROMPTS[1], tuple(range(44, 65))
    expected = run(engine(model(kind)), [long, short, other], count=3, temperature=0.0)
    bad = expected[2].tokens[0]
    assert all(bad not in each for each in (long, short, other, expected[0].tokens, expected[1].tokens))
    made = engine(not_a_number_for(bad, kind), blocks=19, batch=96, prefix=False)
    _, ended = submit(made, [long], count=3, temperature=0.0)
    (gone,), _ = submit(made, [(1,) * 31])
    made.step()
    made.drop(gone)
    _, further = submit(made, [short, other], count=3, temperature=0.0)
    while made.step():
        pass
    close([ended["0"], further["0"]], expected[:2], exact=False)
    assert isinstance(further["1"], NumericsError)


def test_a_step_that_fails_ends_its_requests_alone():
    built = model("softmax")
    expected = run(engine(built))
    made = engine(built, sequences=2)
    _, ended = submit(made, PROMPTS)
    made.step()
    norm = built.norm.forward

    def fails(*arguments: Any) -> Any:
        raise RuntimeError("out of memory")

    built.norm.forward = fails
    try:
        made.step()
    finally:
        built.norm.forward = norm
    assert set(ended) == {"0", "1"} and all("out of memory" in str(error) for error in ended.values())
    while made.step():
        pass
    close([ended[str(number)] for number in (2, 3, 4)], expected[2:], exact=False)


def test_an_update_that_fails_serves_nothing_or_the_old_weights():
    built = model("softmax")
    whole: list[int | None] = [0]

    def refuses(weights: WeightVersion) -> None:
        if weights.version == 2:
            whole[0] = None
        if weights.version < 3:
            raise NumericsError("torn")

    made = engine(built, fill=refuses, filled=lambda: whole[0])
    expected = run(engine(built))
    _, ended = submit(made, PROMPTS)
    made.step()
    for version, served in ((1, 0), (2, None)):
        with pytest.raises(NumericsError, match="torn"):
            made.update(WeightVersion(version, "", {}, {}, {}))
        assert made.version == served
        assert made.step() is (served is not None)
    made.update(WeightVersion(3, "", {}, {}, {}))
    while made.step():
        pass
    close([ended[str(number)] for number in range(5)], expected, exact=False)
    assert {version for each in ended.values() for version in each.versions} == {0, 3}
    with pytest.raises(UsageError, match="never go back"):
        made.update(WeightVersion(2, "", {}, {}, {}))


def test_kinds_that_are_not_served_are_refused_by_name():
    class Indexed(nn.Module):
        def cache_spec(self) -> MixerSpec:
            return MixerSpec("indexed", (CacheSpec("index", "paged", (4,), "float32"),))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mixer = Indexed()

    with pytest.raises(UsageError, match=r"Mixer 'mixer' asks for a context of kind 'indexed' which PagedContext"):
        specs_of(Model())
    made = engine(model("softmax"))
    with pytest.raises(UsageError, match="kind 'indexed'"):
        made.context.indexed("layers.0.attention")


def test_sizes_follow_from_bytes_and_are_refused_where_nothing_fits():
    built = model("softmax")
    per_token = 2 * 2 * 2 * 8 * 4  # layers, keys and values, heads, head dim, bytes
    sizes = sizes_of(LocalConfig(block=4, cache_bytes=per_token * 41), built, 96, CPU)
    assert (sizes.blocks, sizes.max_tokens) == (10, 40)
    sizes = sizes_of(LocalConfig(block=16, max_sequences=3, max_tokens=50), built, 96, CPU)
    assert (sizes.blocks, sizes.max_tokens) == (12, 50)
    with pytest.raises(UsageError, match="no request fits"):
        sizes_of(LocalConfig(block=4, cache_bytes=per_token), built, 96, CPU)


def test_memory_of_windows_is_read_in_part_only():
    """Of a layer with a window only blocks that hold some of it are read, unless entries must lie where their positions are."""
    built = model("softmax")
    read: dict[bool, int] = {}
    for invariant in (False, True):
        made = engine(built, invariant=invariant)
        own, reads = made.choices["attention"].function or ops.attention.reference, []

        def noted(q: Any, k: Any, v: Any, *, own: Any = own, reads: list[int] = reads, **settings: Any) -> Any:
            if settings["window"] == 6 and q.shape[1] == 1:
                reads.append(k.shape[1] // 4)
            return own(q, k, v, **settings)

        made.choices["attention"] = ops.Choice("noted", "the test's", noted)
        run(made, [tuple(range(60))], count=4)
        read[invariant] = max(reads)
    assert read == {False: 3, True: 16}


def test_a_bug_of_the_engine_is_told_to_all_who_wait_and_closes_the_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    made = engine(model("softmax"))
    facts = GeneratorFacts("local", 96, 96, 8, ())
    generator = LocalGenerator(made, facts, lambda: None)  # type: ignore[arg-type, return-value]

    def broken(admit: bool) -> None:
        raise LookupError("a table of blocks")

    async def ask() -> None:
        monkeypatch.setattr(made.scheduler, "plan", broken)
        asked = [generator.generate(Request(str(number), (1, 2, 3), Sampling(4))) for number in range(2)]
        for result in await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 30):
            assert isinstance(result, RuntimeError | UsageError) and "closed" in str(result)
        with pytest.raises(UsageError, match="closed"):
            await generator.generate(Request("later", (1,), Sampling(1)))
        await asyncio.wait_for(generator.close(), 30)

    asyncio.run(ask())
