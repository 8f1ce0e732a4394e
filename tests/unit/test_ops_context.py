"""The training context, and the models that run in compiled regions with it."""

from __future__ import annotations

import pytest
import torch
from intarsia import ops
from intarsia.contracts import Batch
from intarsia.errors import UsageError
from intarsia.plugins import current
from intarsia_eager.context import TrainContext, windows_of
from intarsia_llama3.config import llama3
from intarsia_testing.model import documents_of, fill, packed_context, positions_of


def test_positions_restart_with_each_document():
    assert positions_of(torch.tensor([[0, 0, 0, 1, 2, 2, 2, 2]])).tolist() == [[0, 1, 2, 0, 0, 1, 2, 3]]


def test_rows_of_single_documents_take_the_plain_causal_path():
    assert packed_context(((8,), (8,))).documents_BS is None
    assert packed_context(((8,), (3, 5))).documents_BS is not None


def test_context_of_a_batch():
    documents = documents_of(((3, 5),))
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    context = TrainContext.of(Batch(tokens, tokens, positions_of(documents), documents, ((3, 5),)))
    assert context.packing is not None and context.packing.lengths == ((3, 5),)
    assert context.positions_BS.tolist() == [[0, 1, 2, 0, 1, 2, 3, 4]]


def test_an_indexed_mixer_is_refused_by_name():
    with pytest.raises(UsageError, match=r"layers\.3\.attention.*indexed.*TrainContext"):
        packed_context(((4,),)).indexed("layers.3.attention", torch.ones(1))


def test_latent_and_recurrent_mixers_are_handed_documents():
    context = packed_context(((1, 3),))
    seen = context.latent("a", torch.ones(1, 4, 2), lambda latent, positions, documents: (positions.tolist(), documents.tolist()))
    assert seen == ([[0, 0, 1, 2]], [[0, 1, 1, 1]])
    out = context.recurrent("b", "state", lambda x, state, documents_BS, counts_B: (x * documents_BS, state), torch.full((1, 4), 2.0))
    assert out.tolist() == [[0.0, 2.0, 2.0, 2.0]]


def test_a_kernels_prepare_runs_once_for_a_packed_batch():
    calls = []

    def attend(*arguments, **named):
        return ops.attention.reference(*arguments, **named)

    attend.prepare = lambda packing, windows, documents_BS: calls.append((packing.lengths, windows, tuple(documents_BS.shape)))
    model = fill(current().build(llama3(dim=16, layers=2, heads=2, kv_heads=1, head_dim=8, hidden=16, vocab_size=32)))
    assert windows_of(model) == (None,)
    with ops.installed({"attention": ops.Choice("fakes:mine", "a test", attend)}):
        model(torch.zeros(1, 8, dtype=torch.int64), packed_context(((3, 5),)))
        packed_context(((8,),))
    assert calls == [(((3, 5),), (None,), (1, 8))]


@pytest.mark.parametrize("kernel", ["reference", "sdpa"])
def test_compiled_blocks_give_the_same_and_compile_once_for_all_layers(kernel):
    from torch._dynamo.testing import CompileCounterWithBackend

    torch.compiler.reset()
    ops_choice = ops.select({"attention": kernel}, current(), ("cpu",), "float32", compiled=True).choices["attention"]
    model = fill(current().build(llama3(dim=32, layers=3, heads=2, kv_heads=1, head_dim=16, hidden=48, vocab_size=64)), std=0.02)
    tokens = torch.arange(64).reshape(2, 32)
    batches = [((32,), (32,)), ((10, 22), (32,)), ((5, 5, 22), (3, 29))]
    with ops.installed({"attention": ops_choice}):
        plain = [model(tokens, packed_context(lengths)) for lengths in batches]
        counter = CompileCounterWithBackend("aot_eager")
        for layer in model.layers:
            layer.compile(backend=counter, fullgraph=True)
        for lengths, expected in zip(batches, plain, strict=True):
            found = model(tokens, packed_context(lengths))
            assert torch.allclose(found, expected, atol=1e-5)
            found.sum().backward()
    assert counter.frame_count <= 2, "one graph for whole rows and one for packed ones, whatever the layer and the lengths"
