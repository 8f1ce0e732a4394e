"""Attention over paged caches on a GPU: promises of kernels, the bits of a trainer's packed rows, shares of work however requests lie, and a CUDA graph that goes on with other values."""

from __future__ import annotations

import pytest
import torch
from intarsia import ops, plugins
from intarsia_generation.paged import Paged, paged_attention
from intarsia_testing.kernel import KernelConformance
from intarsia_testing.paged_cases import Requests, requests

pytestmark = pytest.mark.gpu

WIDTHS = [(32, 8, 64, 64), (32, 8, 128, 128), (8, 8, 64, 64), (12, 2, 96, 64), (4, 1, 256, 256)]
"""Query and key/value heads, and their dims: Llama 3 1B's and 8B's among them."""
NAMES = ["paged_attention/blocks", "paged_attention/split"]


class TestSplit(KernelConformance):
    op, entry = "paged_attention", "intarsia-kernels:paged_attention/split"


class TestBlocks(KernelConformance):
    op, entry = "paged_attention", "intarsia-kernels:paged_attention/blocks"


def target(op: str, name: str):
    found = plugins.current()
    return found.target(found.registry("kernel").find(name, op=op))


def made(counts, ends, widths, size=16, dtype=torch.bfloat16, **settings) -> tuple[Requests, tuple]:
    found = requests(counts, ends, size, *widths, **settings)
    return found, (*(x.to("cuda", dtype) for x in (found.q, found.keys, found.values)), found.where.to("cuda"))


def spoiled(found: Requests, cache: torch.Tensor) -> torch.Tensor:
    """The cache, not a number wherever nobody's entry is."""
    seen = torch.zeros(cache.shape[:2], dtype=torch.bool, device=cache.device)
    for slots in found.slots:
        seen.view(-1)[slots.to(cache.device)] = True
    return torch.where(seen[:, :, None, None], cache, torch.nan)


def exact(operands: tuple, **settings) -> torch.Tensor:
    q, keys, values, where = operands
    if settings.get("sinks_H") is not None:
        settings = {**settings, "sinks_H": settings["sinks_H"].double()}
    return paged_attention.reference(q.double(), keys.double(), values.double(), where, **settings)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
@pytest.mark.parametrize("settings", [{}, {"window": 700}, {"softcap": 5.0, "sinks": True}], ids=str)
def test_requests_of_all_lengths_in_one_call(name, widths, settings):
    settings = dict(settings)
    if settings.pop("sinks", False):
        settings["sinks_H"] = torch.linspace(-1, 1, widths[0], device="cuda").bfloat16()
    ends = (1, 15, 64, 65, 700, 3000, 17, 4097)
    for counts in ((1,) * 8, (1, 1, 0, 1, 1, 0, 1, 1), (1, 9, 40, 0, 1, 300, 17, 2), (3, 0, 0, 0, 0, 0, 0, 0), (0, 0, 0, 0, 0, 200, 0, 0)):
        found, operands = made(counts, [max(end, count) for end, count in zip(ends, counts, strict=True)], widths)
        wanted = exact(operands, scale=0.1, **settings)
        q, keys, values, where = operands
        y = target("paged_attention", name)(q, spoiled(found, keys), spoiled(found, values), where, scale=0.1, **settings)
        error = float((y.double() - wanted).abs().max() / wanted.abs().max())
        assert error < 1e-2, (counts, error)


@pytest.mark.parametrize("requests_and_ends", [(1, 32768), (64, 700), (300, 90), (1, 40)], ids=str)
@pytest.mark.parametrize("size", [1, 16, 64, 256])
def test_few_and_many_requests_and_blocks_of_any_size(requests_and_ends, size):
    count, end = requests_and_ends
    ends = [max(1, end - 7 * number % end) for number in range(count)]
    _, operands = made([1] * count, ends, (8, 2, 64, 64), size)
    wanted = exact(operands, scale=0.2)
    for name in NAMES:
        y = target("paged_attention", name)(*operands, scale=0.2)
        assert float((y.double() - wanted).abs().max() / wanted.abs().max()) < 1e-2, name


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
@pytest.mark.parametrize("settings", [{}, {"window": 100}, {"softcap": 5.0, "sinks": True}], ids=str)
def test_blocks_have_the_bits_of_a_trainers_rows(widths, settings):
    settings = dict(settings)
    if settings.pop("sinks", False):
        settings["sinks_H"] = torch.linspace(-1, 1, widths[0], device="cuda").bfloat16()
    trained, paged = target("attention", "attention/blocks"), target("paged_attention", "paged_attention/blocks")
    lengths = (1, 63, 64, 65, 700, 2000)
    # A trainer's packed rows: every token is new.
    found, operands = made(lengths, lengths, widths)
    q, keys, values, where = operands
    documents = torch.cat([torch.full((1, n), i, dtype=torch.int32, device="cuda") for i, n in enumerate(lengths)], 1)
    k, v = (torch.cat(parts)[None] for parts in zip(*found.own(keys, values), strict=True))
    masks = {"documents_q_BS": documents, "documents_k_BT": documents, "packing": ops.Packing((lengths,))}
    packed = trained(q[None], k, v, scale=0.1, **masks, **settings)[0]
    assert torch.equal(paged(*operands, scale=0.1, **settings), packed)
    starts = torch.tensor([0, *lengths]).cumsum(0)[:-1]
    # The same requests decoded, and in pieces of 5 and of 40, at several ends.
    for count in (1, 5, 40):
        for back in (0, 1, 30):
            chosen = [n for n, length in enumerate(lengths) if length >= count + back]
            firsts = [int(starts[n]) + lengths[n] - back - count for n in chosen]
            rows = torch.cat([torch.arange(first, first + count) for first in firsts]).cuda()
            on_device = [
                torch.tensor(each, dtype=torch.int32, device="cuda")
                for each in (range(0, count * len(chosen), count), [count] * len(chosen), [lengths[n] - back - count for n in chosen])
            ]
            again = Paged(where.tables_RW[chosen], *on_device, count, where.size)
            assert torch.equal(paged(q[rows], keys, values, again, scale=0.1, **settings), packed[rows]), (count, back)


@pytest.mark.parametrize("name", NAMES)
def test_a_graph_goes_on_with_other_values(name):
    function = target("paged_attention", name)
    _, (q, keys, values, where) = made([1, 1, 1, 1], [5, 900, 64, 2048], (32, 8, 64, 64), width=256)
    static = Paged(where.tables_RW.clone(), where.firsts_R.clone(), where.counts_R.clone(), where.positions_R.clone(), 1, 16)
    for _ in range(2):
        function(q, keys, values, static, scale=0.1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = function(q, keys, values, static, scale=0.1)
    for shift in (0, 3, 4):
        static.positions_R.copy_((where.positions_R - shift).clamp(min=0))
        static.tables_RW.copy_(where.tables_RW.roll(shift, 0))
        static.positions_R.copy_(static.positions_R.roll(shift, 0))
        static.counts_R.copy_(torch.tensor([1, int(shift != 3), 1, 1], device="cuda"))
        graph.replay()
        wanted = function(q, keys, values, static, scale=0.1)
        kept = static.counts_R > 0
        assert torch.equal(out[kept], wanted[kept]), shift
        known = exact(
            (q, keys, values, Paged(static.tables_RW, static.firsts_R, torch.ones_like(static.counts_R), static.positions_R, 1, 16)),
            scale=0.1,
        )
        assert float((out[kept].double() - known[kept]).abs().max() / known.abs().max()) < 1e-2, shift


@pytest.mark.parametrize("name", NAMES)
def test_nothing_waits_for_the_device(name):
    function = target("paged_attention", name)
    _, (q, keys, values, where) = made([1] * 4, [5, 900, 64, 2048], (32, 8, 64, 64))
    _, prompts = made([30, 2], [30, 900], (32, 8, 64, 64))
    for operands in ((q, keys, values, where), prompts):
        function(*operands, scale=0.1)
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for operands in ((q, keys, values, where), prompts):
            function(*operands, scale=0.1)
    finally:
        torch.cuda.set_sync_debug_mode(before)


def test_it_is_chosen_on_a_gpu():
    from intarsia.device import capabilities

    found = ops.select({}, plugins.current(), capabilities(), "bfloat16")
    assert found.choices["paged_attention"].kernel == "intarsia-kernels:paged_attention/split"
