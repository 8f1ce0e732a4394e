"""The vocabulary-parallel cross-entropy against the operator's reference."""

from __future__ import annotations

import pytest
import torch
from intarsia import ops
from intarsia.contracts import IGNORE
from intarsia.errors import UsageError
from intarsia_parallel import tokens
from intarsia_parallel.collectives import even_counts
from intarsia_parallel.config import VocabConfig
from intarsia_parallel.roles import vocab as role
from intarsia_testing.communicator import run_ranks
from torch import nn


def _case(dtype, length=7, rows=2, dim=8, vocabulary=13):
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(rows, length, dim, generator=generator, dtype=torch.float32)
    weight = torch.randn(vocabulary, dim, generator=generator, dtype=torch.float32)
    labels = torch.randint(0, vocabulary, (rows, length), generator=generator)
    labels[0, 1] = labels[1, 0] = IGNORE
    return hidden.to(dtype), weight.to(dtype), labels


def _reference(hidden, weight, labels, **settings):
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    loss = ops.cross_entropy.reference(hidden.flatten(0, 1), weight, labels.flatten(), **settings)
    (loss * 0.5).backward()
    return loss.detach(), hidden.grad, weight.grad


def _parallel(size, hidden, weight, labels, whole=False, **settings):
    length, vocabulary = hidden.shape[1], weight.shape[0]

    def work(comm):
        tokens.note(length)
        parts, rows = even_counts(length, comm.size), even_counts(vocabulary, comm.size)
        module = nn.Linear(weight.shape[1], vocabulary, bias=False, device="meta")
        made = role.build(VocabConfig(whole=whole))
        made.check("head", module, {"tp": size})
        made.cut("head", module, {"tp": size})
        h = hidden.split(parts, 1)[comm.rank].clone().requires_grad_()
        w = (weight if whole else weight.split(rows)[comm.rank]).clone().requires_grad_()
        loss = made.cross_entropy("head", module, lambda axis: comm)(h.flatten(0, 1), w, labels.flatten(), **settings)
        (loss * 0.5).backward()
        return loss.detach(), h.grad, w.grad

    results = run_ranks(size, work)
    of_weight = sum(r[2] for r in results) if whole else torch.cat([r[2] for r in results])
    return [r[0] for r in results], torch.cat([r[1] for r in results], 1), of_weight


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("settings", [{}, {"chunk": 3}, {"softcap": 2.0, "chunk": 5}])
def test_it_equals_the_reference(size, settings, whole):
    case = _case(torch.float32)
    expected = _reference(*case, **settings)
    losses, of_hidden, of_weight = _parallel(size, *case, whole=whole, **settings)
    assert all(torch.allclose(loss, expected[0], rtol=1e-6) for loss in losses)
    assert torch.allclose(of_hidden, expected[1], rtol=1e-5, atol=1e-6)
    assert torch.allclose(of_weight, expected[2], rtol=1e-5, atol=1e-6)


def test_bfloat16_has_float32_statistics():
    case = _case(torch.bfloat16)
    expected = _reference(*case)
    losses, of_hidden, of_weight = _parallel(2, *case)
    assert losses[0].dtype == torch.float32 and torch.allclose(losses[0], expected[0], rtol=1e-6)
    assert of_hidden.dtype == of_weight.dtype == torch.bfloat16
    assert torch.allclose(of_hidden.float(), expected[1].float(), rtol=0.05, atol=0.02)
    assert torch.allclose(of_weight.float(), expected[2].float(), rtol=0.05, atol=0.02)


def test_no_counted_label_and_rows_shorter_than_ranks():
    hidden, weight, labels = _case(torch.float32, length=2)
    losses, of_hidden, of_weight = _parallel(4, hidden, weight, torch.full_like(labels, IGNORE))
    assert [float(loss) for loss in losses] == [0.0] * 4
    assert not of_hidden.any() and not of_weight.any()


def test_labels_of_parts_only_are_refused():
    hidden, weight, labels = _case(torch.float32)
    with pytest.raises(UsageError, match="the labels of whole rows"):
        _parallel(2, hidden, weight, labels[:, :4])


def test_too_small_a_vocabulary_is_refused():
    with pytest.raises(UsageError, match=r"head has 3 ids, too few for tp=4. The most is tp=3"):
        role.build(VocabConfig()).check("head", nn.Linear(4, 3, bias=False), {"tp": 4})
    with pytest.raises(UsageError, match="a bias"):
        role.build(VocabConfig()).check("head", nn.Linear(4, 8), {"tp": 4})
