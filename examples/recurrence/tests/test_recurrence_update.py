"""The update against a plain loop, whole and in parts."""

from __future__ import annotations

import torch
from acme_recurrence import recurrence
from acme_recurrence.recurrence import GatedRecurrence
from torch import Tensor

UPDATE = GatedRecurrence()


def inputs(rows: int, tokens: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(rows, tokens, 2, 3, generator=generator, dtype=torch.float64) for _ in range(3))
    return [q, k, v, -torch.rand(rows, tokens, 2, generator=generator, dtype=torch.float64)]


def loop(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, documents: Tensor) -> Tensor:
    state, out = q.new_zeros(q.shape[0], 2, 3, 3), []
    for t in range(q.shape[1]):
        goes_on = documents[:, t] == documents[:, t - 1] if t else torch.ones(q.shape[0], dtype=torch.bool)
        state = torch.where(goes_on[:, None, None, None], state, 0.0)
        state = decay[:, t].exp()[..., None, None] * state + torch.einsum("bhd,bhe->bhde", k[:, t], v[:, t])
        out.append(torch.einsum("bhd,bhde->bhe", q[:, t], state))
    return torch.stack(out, 1)


def test_chunks_equal_the_loop(monkeypatch) -> None:
    values = inputs(2, 17)
    documents = torch.tensor([[0] * 5 + [1] * 7 + [2] * 5, [0] * 17], dtype=torch.int32)
    right = loop(*values, documents)
    for chunk in (1, 4, 5, 64):
        monkeypatch.setattr(recurrence, "CHUNK", chunk)
        assert torch.allclose(UPDATE(*values, state=None, documents_BS=documents)[0], right, atol=1e-12)
    assert torch.allclose(UPDATE(*values, state=None, documents_BS=None)[0][1], right[1], atol=1e-12)


def test_tokens_behind_a_rows_count_change_nothing() -> None:
    values = inputs(3, 9)
    documents = torch.tensor([[0] * 9, [0] * 2 + [1] * 2 + [9] * 5, [0] * 9], dtype=torch.int32)
    counts = torch.tensor([9, 4, 0])
    state = torch.ones(3, 2, 3, 3, dtype=torch.float64)
    for numbers in (None, documents):
        outputs, after = UPDATE(*values, state=state, documents_BS=numbers, counts_B=counts)
        short = None if numbers is None else numbers[1:2, :4]
        alone, kept = UPDATE(*(x[1:2, :4] for x in values), state=state[1:2], documents_BS=short)
        assert torch.equal(after[2], state[2])
        assert torch.allclose(after[1:2], kept) and torch.allclose(outputs[1:2, :4], alone)
        carried = UPDATE.carry(*values, documents_BS=numbers, counts_B=counts)
        assert torch.allclose(carried[0][1, :, None, None] * state[1] + carried[1][1], kept[0])


def test_carries_combine_to_the_whole() -> None:
    values = inputs(2, 12)
    documents = torch.tensor([[0] * 12, [0] * 7 + [1] * 5], dtype=torch.int32)
    whole = UPDATE.carry(*values, documents_BS=documents)
    assert torch.allclose(whole[1], UPDATE(*values, state=None, documents_BS=documents)[1])
    for cut in (0, 3, 7, 9, 12):
        parts = [UPDATE.carry(*(x[:, at] for x in values), documents_BS=documents[:, at]) for at in (slice(0, cut), slice(cut, 12))]
        if cut == 7:  # a document begins with the second part: what comes before is nothing to it, and only its reader knows
            parts[0] = tuple(x * torch.tensor([1.0, 0.0]).view(-1, *[1] * (x.ndim - 1)) for x in parts[0])
        combined = UPDATE.combine(*parts)
        assert torch.allclose(combined[1], whole[1], atol=1e-12)
        if cut != 7:
            assert torch.allclose(combined[0], whole[0], atol=1e-12)
