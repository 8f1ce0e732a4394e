"""Our context over vLLM's paged cache, without vLLM: a cache of blocks stands in for vLLM's, and a whole pass says what is right."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest
import torch
from intarsia.contracts import CacheSpec, MixerSpec
from intarsia.errors import PluginError, UsageError
from intarsia.plugins import current
from intarsia_eager.context import TrainContext
from intarsia_rl.contracts import Request, Sampling
from intarsia_rl.weights.build import build_model, fill_initial
from intarsia_vllm.admission import Admission, Live
from intarsia_vllm.context import PagedContext, specs_of
from torch import Tensor, nn

BLOCK = 4


@dataclasses.dataclass
class Step:
    """One step's requests, as `backend.PagedMetadata` has them."""

    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    owners: tuple[int, ...]

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(end - start for start, end in zip(self.starts, self.starts[1:], strict=False))


class Kept:
    """Entries of each request, in lists."""

    def __init__(self) -> None:
        self.entries: dict[int, Tensor] = {}

    def exchange(self, new_TKW: Tensor, metadata: Any) -> Tensor:
        for number, owner in enumerate(metadata.owners):
            new = new_TKW[metadata.starts[number] : metadata.starts[number + 1]]
            before = self.entries.get(owner)
            self.entries[owner] = new if before is None else torch.cat((before, new))
        return torch.cat([self.entries[owner] for owner in metadata.owners])


def model_of(name: str) -> Any:
    recipe: Any = current().target(current().registry("recipe").find(name))()
    model = build_model(recipe, current(), "cpu", "float32")
    fill_initial(model, recipe, current())
    return model


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("name", ["llama3/debug", "deepseek_v3/debug", "qwen3/moe-debug", "qwen3_vl/debug"])
@torch.no_grad()
def test_steps_of_several_requests_are_whole_passes(name: str, together: bool) -> None:
    model = model_of(name)
    specs = specs_of(model)
    caches = {mixer: Kept() for mixer in specs}
    texts = [[(7 * number + 3 * place) % 250 for place in range(9 + 5 * number)] for number in range(3)]
    done, found = [0] * 3, [[] for _ in texts]
    # Chunks and single tokens of different requests in one step, in changing order.
    plan = [{0: 4, 1: 7}, {2: 12, 0: 1}, {1: 1, 0: 1, 2: 1}, {2: 5, 1: 5, 0: 3}, {1: 1, 2: 1}]
    for chunks in plan:
        tokens, positions, starts, lengths = [], [], [0], []
        for owner, count in chunks.items():
            first = done[owner]
            tokens += texts[owner][first : first + count]
            positions += range(first, first + count)
            done[owner] = first + count
            starts.append(len(tokens))
            lengths.append(done[owner])
        step = Step(tuple(starts), tuple(lengths), tuple(chunks))
        context = PagedContext(torch.tensor(positions), specs, caches, step, together=together)
        hidden = model(torch.tensor([tokens]), context)[0]
        for number, owner in enumerate(chunks):
            found[owner].append(hidden[starts[number] : starts[number + 1]])
    assert done == [9, 14, 19]
    for text, parts in zip(texts, found, strict=True):
        whole = model(torch.tensor([text]), TrainContext(torch.arange(len(text))[None], None, ((len(text),),)))[0]
        torch.testing.assert_close(torch.cat(parts), whole, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama3/debug", "deepseek_v3/debug"])
@torch.no_grad()
def test_a_request_that_is_not_sound_spoils_no_other_of_its_step(name: str) -> None:
    """The shorter one is padded to it, and sees nothing of it."""
    model = model_of(name)
    model.tok_embeddings.weight[7] = torch.nan
    specs = specs_of(model)
    caches = {mixer: Kept() for mixer in specs}
    for starts, lengths, tokens in [((0, 9, 13), (9, 4), [7] * 9 + [1, 2, 3, 4]), ((0, 1, 2), (10, 5), [7, 5])]:
        positions = torch.cat(
            [torch.arange(length - end + start, length) for length, start, end in zip(lengths, starts, starts[1:], strict=False)]
        )
        hidden = model(torch.tensor([tokens]), PagedContext(positions, specs, caches, Step(starts, lengths, (0, 1))))[0]
        finite = hidden.isfinite().all(-1)
        assert finite[starts[1] :].all() and not finite[: starts[1]].any()


@torch.no_grad()
def test_a_pass_that_measures_keeps_nothing() -> None:
    model = model_of("llama3/debug")
    context = PagedContext(torch.arange(6), specs_of(model), {}, None)
    assert model(torch.zeros(1, 6, dtype=torch.int64), context).isfinite().all()


class Recurrent(nn.Module):
    def __init__(self, spec: MixerSpec) -> None:
        super().__init__()
        self.spec = spec

    def cache_spec(self) -> MixerSpec:
        return self.spec


@pytest.mark.parametrize("kind", ["recurrent", "indexed"])
def test_kinds_that_vllm_cannot_hold_are_refused_by_name(kind: Any) -> None:
    model = nn.ModuleDict({"mixer": Recurrent(MixerSpec(kind, (CacheSpec("state", "state", (4,), "float32"),)))})
    with pytest.raises(
        UsageError, match=rf"Mixer 'mixer' of ModuleDict asks for a context of kind '{kind}', which the vLLM integration does not serve"
    ):
        specs_of(model)
    context = PagedContext(torch.arange(2), {}, {}, None)
    with pytest.raises(UsageError, match="does not serve"):
        context.recurrent("mixer", "state", lambda: None)
    with pytest.raises(PluginError, match="no module with a cache_spec"):
        context.latent("mixer", torch.zeros(1, 2, 3), lambda: None)


def live(name: str, priority: int = 0) -> Live:
    return Live(Request(name, (1,), Sampling(2), priority=priority))


def test_requests_are_begun_by_priority_and_not_while_held() -> None:
    async def work() -> list[str]:
        admission, order = Admission(1), []

        async def serve(one: Live) -> None:
            async with admission.place(one):
                assert admission.is_running(one)
                order.append(one.request.id)
                await asyncio.sleep(0)

        admission.hold("pause")
        tasks = [asyncio.ensure_future(serve(live(name, priority))) for name, priority in (("a", 1), ("b", 0), ("c", 0), ("d", 2))]
        while admission.waiting < 4:
            await asyncio.sleep(0)
        assert not order
        tasks[2].cancel()
        admission.release("pause")
        await admission.until(lambda: not admission.all)
        await asyncio.gather(*tasks, return_exceptions=True)
        assert not admission.running and admission.busy() > 0
        return order

    assert asyncio.run(work()) == ["b", "a", "d"]
