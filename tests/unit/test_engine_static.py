"""Steps of decoding in fixed shapes: what they give is what other steps give, bit for bit where kernels are invariant; what they hold is dropped when it goes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import chz
import pytest
import torch
from intarsia import ops
from intarsia.errors import NumericsError, UsageError
from intarsia.plugins import current
from intarsia_generation.engine.config import LocalConfig
from intarsia_generation.engine.context import PagedContext
from intarsia_generation.engine.engine import Engine, Sizes
from intarsia_generation.engine.request import Job
from intarsia_generation.engine.static import sizes_up_to
from intarsia_models_common.moe.config import softmax_experts
from intarsia_rl.contracts import Request, Sampling, WeightVersion
from intarsia_rl.invariant import table
from torch import nn

from tests.support.replayed import ReplayedCall
from tests.support.small_models import dense, experts, hybrid

CPU = torch.device("cpu")
PROMPTS = [tuple(range(3, 24)), (5,), tuple(range(3, 17)), tuple(range(40, 49)), tuple(range(3, 24))]
SMALL = {"vocab_size": 96, "max_positions": 96}


def routed() -> Any:
    """Softmax attention, and experts in the second layer."""
    model = dense(window=6, softcap=20.0, **SMALL)
    first, second = model.layers
    return chz.replace(model, layers=(first, chz.replace(second, feed_forward=softmax_experts(6, 2, 24, joint_loss=0.0))))


CONFIGS: dict[str, Any] = {
    "softmax": lambda: dense(window=6, softcap=20.0, **SMALL),
    "experts": routed,
    "states": lambda: hybrid(chunk=4, **SMALL),
    "latent": lambda: experts(layers=2, ahead=0, **SMALL),
}


def new_model(kind: str) -> Any:
    built: Any = current().build(CONFIGS[kind]())
    fill(built, 0)
    return built.eval()


model = functools.cache(new_model)


@torch.no_grad()
def fill(built: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in built.parameters():
        parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))


def engine(built: Any, graphs: str = "eager", *, invariant: bool = True, **more: Any) -> Engine:
    kernels = table.kernels("cpu") if invariant else {"*": "reference"}
    choices = ops.select(kernels, current(), frozenset({"cpu"}), "float32", invariant=invariant).choices
    block, blocks = more.pop("block", 4), more.pop("blocks", 200)
    sizes = Sizes(block, blocks, more.pop("sequences", 5), more.pop("batch", 64), min(96, blocks * block), more.pop("prefix", True))
    made = Engine(built, CPU, sizes, more.pop("fill", lambda weights: None), choices=choices, invariant=invariant, graphs=graphs, **more)  # type: ignore[arg-type]
    made.begin(0)
    return made


def submit(made: Engine, prompts: Any, count: int = 14, **settings: Any) -> dict[str, Any]:
    ended: dict[str, Any] = {}
    for number, prompt in enumerate(prompts):
        sampling = Sampling(count + number % 3, seed=number, temperature=settings.get("temperature", 1.0))
        request = Request(str(number), prompt, sampling, routes=settings.get("routes", False))
        made.add(Job(request, number, None, functools.partial(ended.__setitem__, request.id)))
    return ended


def run(made: Engine, prompts: Any = PROMPTS, count: int = 14, **settings: Any) -> list[Any]:
    ended = submit(made, prompts, count, **settings)
    while made.step():
        pass
    return [ended[str(number)] for number in range(len(prompts))]


def check(found: list[Any], expected: list[Any], exact: bool = True) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.tokens == other.tokens and one.routes == other.routes
        assert list(one.log_probs) == (list(other.log_probs) if exact else pytest.approx(other.log_probs, abs=2e-5))


def test_sizes_are_few_and_the_last_is_the_most() -> None:
    assert sizes_up_to(1) == (1,)
    assert sizes_up_to(5) == (1, 2, 4, 5)
    assert sizes_up_to(64) == (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)
    assert sizes_up_to(100) == (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 100)


# ---------------------------------------------------------------- one result


ARRANGEMENTS: dict[str, dict[str, Any]] = {
    "alone": {"sequences": 1},
    "rows that are nobody's": {"sequences": 7},
    "chunks": {"batch": 7},
    "no prefix cache": {"prefix": False},
    "blocks run out": {"blocks": 14},
    "blocks of one token": {"block": 1, "batch": 6},
}


@pytest.mark.parametrize("kind", ["softmax", "experts"])
def test_fixed_shapes_give_the_same_bits(kind: str) -> None:
    """Experts that were chosen included."""
    routes = kind == "experts"
    expected = run(engine(model(kind), "off"), routes=routes)
    for name, settings in ARRANGEMENTS.items():
        made = engine(model(kind), **settings)
        check(run(made, routes=routes), expected)
        assert made.runner.static.computed > 14, name
        assert (made.scheduler.preemptions > 0) == (name == "blocks run out")
        assert made.pool.used == 0


def test_states_in_fixed_shapes_give_the_same_result() -> None:
    """Places change hands, and requests lose theirs and begin anew."""
    expected = run(engine(model("states"), "off", invariant=False))
    for settings in ({}, {"sequences": 3}, {"blocks": 14}, {"batch": 7}):
        made = engine(model("states"), invariant=False, **settings)
        check(run(made), expected, exact=False)
        assert made.runner.static.computed > 14


def without_looking(kernels: dict[str, ops.Choice]) -> None:
    """References of experts look at numbers on a CPU, which they do on no other device."""

    def permute(x_ND: Any, pairs_M: Any, places_NK: Any) -> Any:
        return x_ND.index_select(0, pairs_M // places_NK.shape[1])

    def combine(y_MD: Any, weights_NK: Any, pairs_M: Any, places_NK: Any) -> Any:
        return (y_MD[places_NK] * weights_NK[..., None]).sum(1)

    for function in (permute, combine):
        kernels[function.__name__] = ops.Choice(f"acme:{function.__name__}", "the test's", function)


def replays(made: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let steps be recorded and replayed as on a GPU; the sizes that were recorded."""
    static, recorded = made.runner.static, []

    def record(step: Any) -> None:
        static._compute(step)
        with ReplayedCall() as call:
            step.hidden_ND = static._compute(step)
        step.graph = call
        recorded.append(step.size)

    monkeypatch.setattr(static, "_setting", "auto")
    monkeypatch.setattr(static, "_kernels_problem", lambda: "")
    monkeypatch.setattr(static, "_record", record)
    return recorded


@pytest.mark.parametrize("kind", ["softmax", "states", "experts"])
@pytest.mark.parametrize("settings", [{"blocks": 14}, {"batch": 7, "sequences": 3}, {"block": 1}], ids=str)
def test_nothing_that_changes_is_held_and_nothing_waits(kind: str, settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators noted once and run again on the same memory give later steps' results, whoever sits where; experts that were chosen, too."""
    routes = kind == "experts"
    expected = run(engine(model(kind), "off", invariant=False), routes=routes)
    made = engine(model(kind), invariant=False, **settings)
    without_looking(made.choices)
    recorded = replays(made, monkeypatch)
    check(run(made, routes=routes), expected, exact=False)
    assert 0 < len(recorded) == len(set(recorded)) < made.runner.static.computed


def test_rows_that_are_nobodys_touch_nothing_and_are_read_by_nobody() -> None:
    """Be what lies there not finite."""
    expected = run(engine(model("states"), "off", invariant=False), PROMPTS[:3])
    made = engine(model("states"), invariant=False)
    ended = submit(made, PROMPTS[:3])
    context = made.context
    while made.step():
        for cache in context._caches.values():
            assert not cache[0].any(), "block 0 holds zeros"
            cache[context.scratch] = torch.nan
        for state in context._states.values():
            state[context.nobody] = torch.nan
    check([ended[str(number)] for number in range(3)], expected, exact=False)


# ---------------------------------------------------------------- what is held


def test_weights_that_are_pushed_in_place_keep_what_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    built = new_model("softmax")
    made = engine(built, invariant=False, fill=lambda weights: fill(built, weights.version))
    recorded = replays(made, monkeypatch)
    ordinary = engine(built, "off", invariant=False, fill=lambda weights: fill(built, weights.version))
    found, expected = [], []
    for each, results in ((made, found), (ordinary, expected)):
        fill(built, 0)
        ended = submit(each, PROMPTS)
        for step in range(40):
            if step in (4, 9):
                each.update(WeightVersion(step, "", {}, {}, {}))
            each.step()
        results += [ended[str(number)] for number in range(5)]
    check(found, expected, exact=False)
    assert {version for each in found for version in each.versions} == {0, 4, 9}
    assert 0 < len(recorded) == len(set(recorded)), "a size was recorded again"


@pytest.mark.parametrize("what", ["parameters", "caches", "kernels"])
def test_what_lies_elsewhere_is_recorded_anew(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    built = new_model("softmax")

    def elsewhere(weights: WeightVersion) -> None:
        fill(built, 1)
        for module in built.modules():
            if isinstance(module, nn.Linear):
                module.weight = nn.Parameter(module.weight.clone())

    made = engine(built, invariant=False, fill=elsewhere)
    recorded = replays(made, monkeypatch)
    run(made, PROMPTS[:2])
    before = list(recorded)
    if what == "parameters":
        made.update(WeightVersion(1, "", {}, {}, {}))
    elif what == "caches":
        made.runner.clear()
        made.begin(0)
        made.pool.forget()
    else:
        made.choices["rms_norm"] = ops.Choice("reference", "another one")
    expected = run(engine(built, "off", invariant=False), PROMPTS[:2])
    check(run(made, PROMPTS[:2]), expected, exact=False)
    assert recorded == [*before, *before]


def test_a_request_that_is_not_sound_ends_alone_and_steps_go_on() -> None:
    built = new_model("softmax")
    expected = run(engine(built, "off"))
    bad = next(token for token in range(60, 96) if all(token not in each.tokens for each in expected))
    with torch.no_grad():
        built.tok_embeddings.weight[bad] = torch.nan
    made = engine(built)
    ended = submit(made, [*PROMPTS, (bad,)])
    while made.step():
        pass
    check([ended[str(number)] for number in range(5)], expected)
    assert isinstance(ended["5"], NumericsError)


# ---------------------------------------------------------------- where it is not possible


def test_why_there_are_no_graphs_is_said() -> None:
    assert engine(model("softmax"), "off").stats(False).graphs == "none: generator.graphs is off"
    automatic = engine(model("latent"), "auto", invariant=False)
    text = automatic.stats(False).graphs
    assert "the device is cpu" in text and "'layers.0.attention' keeps latents" in text
    check(run(automatic), run(engine(model("latent"), "off", invariant=False)))
    with pytest.raises(UsageError, match=r"generator\.graphs=on: .*the device is cpu.*generator\.graphs=auto"):
        engine(model("softmax"), "on")
    made = engine(model("softmax"), sequences=3)
    assert made.stats(False).graphs == "computed without graphs for none yet of at most 3 requests"
    run(made)
    assert made.stats(False).graphs.startswith("computed without graphs for 1, 2, 3 of")
    with pytest.raises(UsageError, match=r"generator\.graphs is 'On'\. Did you mean"):
        LocalConfig(graphs="On")


def test_a_dispatcher_that_waits_is_named() -> None:
    built = new_model("experts")
    layer = built.layers[1].feed_forward.experts
    promises = layer.dispatcher.capabilities
    layer.dispatcher.capabilities = type(promises)(needs_host_sync=True, static_shapes=False, drops_tokens=False)
    made = engine(built)
    assert "the dispatcher of layers.1.feed_forward.experts, Local, waits on the host for sizes" in made.stats(False).graphs
    check(run(made), run(engine(model("experts"), "off")))


def test_a_step_that_cannot_be_recorded_is_computed_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    from intarsia_generation.engine.static import NotStatic

    made = engine(model("softmax"))
    replays(made, monkeypatch)

    def refuse(step: Any) -> None:
        raise NotStatic("its memory is full")

    monkeypatch.setattr(made.runner.static, "_record", refuse)
    check(run(made), run(engine(model("softmax"), "off")))
    assert made.stats(False).graphs == "none: its memory is full" and made.runner.static.computed == 0
    insists = engine(model("softmax"))
    replays(insists, monkeypatch)
    monkeypatch.setattr(insists.runner.static, "_record", refuse)
    monkeypatch.setattr(insists.runner.static, "_setting", "on")
    for result in run(insists):
        assert isinstance(result, UsageError) and "its memory is full" in str(result)


class Stream:
    """A stream's double."""

    device_index = 0

    def wait_stream(self, other: Stream) -> None:
        """Nothing."""


class Graph:
    """A CUDA graph's double, and the context that records it."""

    def __init__(self) -> None:
        self.call = ReplayedCall()
        self.replay = self.call.replay

    @contextlib.contextmanager
    def recorded(self, **settings: Any) -> Iterator[None]:
        assert settings["capture_error_mode"] == "thread_local" and settings["pool"] == (0, 1)
        try:
            with self.call:
                yield
        except AssertionError as error:
            raise RuntimeError("operation not permitted when stream is capturing\nmore") from error


def on_doubles(made: Engine, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """Let the engine record on doubles of CUDA; what is done with them."""
    here, done = Stream(), {"set": [], "ended": []}
    doubles = {
        "current_stream": lambda device: here,
        "Stream": lambda device: Stream(),
        "graph_pool_handle": lambda: (0, 1),
        "CUDAGraph": Graph,
        "graph": lambda graph, **settings: graph.recorded(**settings),
        "stream": lambda stream: contextlib.nullcontext(),
        "device": lambda device: contextlib.nullcontext(),
        "set_stream": done["set"].append,
    }
    for name, double in doubles.items():
        monkeypatch.setattr(torch.cuda, name, double)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda *which: done["ended"].append(which), raising=False)
    monkeypatch.setattr(made.runner.static, "_setting", "auto")
    return done


def paged(supports: str | None) -> ops.Choice:
    """A kernel that takes all calls of `paged_attention`, or none and says why."""

    def attend(*arguments: Any, **settings: Any) -> Any:
        return ops.operators()["paged_attention"].reference(*arguments, **settings)

    attend.supports = lambda *arguments, **settings: supports  # type: ignore[attr-defined]
    return ops.Choice("acme:paged", "the test's", attend)


def test_a_recording_is_warmed_up_and_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = engine(model("softmax"), invariant=False)
    made.choices["paged_attention"] = paged(None)
    done = on_doubles(made, monkeypatch)
    check(run(made), run(engine(model("softmax"), "off", invariant=False)), exact=False)
    assert made.stats(False).graphs.startswith("recorded for 1, 4, 5 of") and not done["set"]


@pytest.mark.parametrize("how", ["waits", "refuses"])
def test_a_recording_that_fails_leaves_nothing_behind(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that reads a number on the host, and one that would leave its calls to the reference."""
    made = engine(model("softmax"), invariant=False)
    made.choices["paged_attention"] = paged("heads are too wide" if how == "refuses" else None)

    def waits(gate: Any, up: Any) -> Any:
        assert gate.sum().item() < 1e9
        return ops.swiglu.reference(gate, up)

    if how == "waits":
        made.choices["swiglu"] = ops.Choice("acme:waits", "the test's", waits)
    done = on_doubles(made, monkeypatch)
    check(run(made), run(engine(model("softmax"), "off", invariant=False)), exact=False)
    assert made.runner.static.computed == 0
    if how == "refuses":
        assert made.stats(False).graphs == "none: kernel acme:paged cannot take its calls (heads are too wide)"
    else:
        assert made.stats(False).graphs.endswith("(operation not permitted when stream is capturing)")
        assert len(done["set"]) == 1 and done["ended"] == [(0, (0, 1))]


@pytest.mark.parametrize("name", ["paged_attention", "grouped_linear"])
def test_a_reference_that_no_graph_should_hold_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = engine(model("experts"), invariant=False)
    static = made.runner.static
    monkeypatch.setattr(static, "_setting", "auto")
    other = {"paged_attention": "grouped_linear", "grouped_linear": "paged_attention"}[name]
    reference = ops.operators()[other].reference
    made.choices[other] = ops.Choice("acme:fast", "the test's", reference)
    run(made, PROMPTS[:2])
    assert f"operator {name} runs as its reference" in static.reason


@dataclasses.dataclass
class Piece:
    """What a context sees of a request."""

    row: int
    start: int
    blocks: list[int]
    decode: bool = True
    tokens: tuple[int, ...] = (7,)

    @property
    def end(self) -> int:
        return self.start + 1


def test_tables_on_the_device_have_what_other_steps_added() -> None:
    """A request whose pieces are computed one way and the other; and one that takes another's place."""
    context = PagedContext({}, CPU, count=40, size=4, sequences=2, longest=40)

    def seen(*pieces: Piece) -> list[list[int]]:
        context.show(pieces)
        numbers = ([each.start for each in pieces], [each.row for each in pieces], [each.blocks[each.start // 4] for each in pieces])
        context.begin_single(torch.zeros(len(pieces), dtype=torch.int64), *map(torch.tensor, numbers))
        (group,) = context._groups
        assert group.tables_RW is not None
        return [row[: len(each.blocks)] for row, each in zip(group.tables_RW.tolist(), pieces, strict=True)]

    one, other = [3], [9, 8, 7]
    assert seen(Piece(0, 3, one), Piece(1, 8, other)) == [one, other]
    one += [4, 5, 6]
    context.begin([Piece(0, 12, one)])
    one += [1]
    assert seen(Piece(1, 9, other), Piece(0, 16, one)) == [other, one]
    assert seen(Piece(0, 4, [30, 31])) == [[30, 31]]
    assert context._device_tables is not None and not context._device_tables[0, 2:].any(), "blocks of who was there before"
