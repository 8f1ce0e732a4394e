"""The operator of policy losses against its definition, alone and over ranks that share the vocabulary out."""

from __future__ import annotations

import pytest
import torch
from intarsia import ops
from intarsia.contracts import IGNORE
from intarsia_parallel import tokens
from intarsia_parallel.collectives import even_counts
from intarsia_parallel.config import VocabConfig
from intarsia_parallel.roles import vocab as role
from intarsia_rl.algorithms.operators import token_log_probs
from intarsia_testing.communicator import run_ranks
from torch import Tensor, nn

Triple = tuple[Tensor, Tensor, Tensor]


def case(dtype: torch.dtype, rows: int = 2, length: int = 7, dim: int = 8, vocabulary: int = 13) -> Triple:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(rows, length, dim, generator=generator)
    weight = torch.randn(vocabulary, dim, generator=generator)
    chosen = torch.randint(0, vocabulary, (rows, length), generator=generator)
    chosen[0, 1] = chosen[1, 0] = IGNORE
    return hidden.to(dtype), weight.to(dtype), chosen


def definition(
    hidden_ND: Tensor, weight_VD: Tensor, tokens_N: Tensor, softcap: float | None = None, chunk: int = 1024
) -> tuple[Tensor, Tensor]:
    """Log-softmax of all logits, as it is written on paper."""
    chosen, entropies = [], []
    for h, t in zip(hidden_ND.split(chunk), tokens_N.split(chunk), strict=True):
        logits = ops.linear(h, weight_VD)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        log_p = (logits if softcap is None else softcap * torch.tanh(logits / softcap)).log_softmax(-1)
        chosen.append(log_p.gather(1, t.clamp_min(0)[:, None]).squeeze(1).where(t != IGNORE, 0.0))
        entropies.append(-(log_p.exp() * log_p).sum(-1).where(t != IGNORE, 0.0))
    return torch.cat(chosen), torch.cat(entropies)


def wave(n: int, dtype: torch.dtype) -> Tensor:
    return torch.cos(torch.arange(n) * 0.7).to(dtype)


def score(log_p: Tensor, entropy: Tensor, of: str) -> Tensor:
    """A number of which each log-probability (l), each entropy (e), or both have a share of their own."""
    shares = {"l": (log_p * wave(log_p.numel(), log_p.dtype)).sum(), "e": (entropy * wave(log_p.numel(), log_p.dtype).flip(0)).sum()}
    return sum((shares[each] for each in of), torch.zeros((), dtype=log_p.dtype))


@pytest.mark.parametrize("of", ["l", "e", "le"])
@pytest.mark.parametrize("settings", [{}, {"chunk": 3}, {"softcap": 2.0, "chunk": 5}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_it_is_its_definition_bit_for_bit(dtype, settings, of):
    hidden, weight, chosen = case(dtype)
    results = []
    for function in (definition, token_log_probs.reference):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        log_p, entropy = function(h.flatten(0, 1), w, chosen.flatten(), **settings)
        assert log_p.dtype == entropy.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        score(log_p, entropy, of).backward()
        results.append((log_p.detach(), entropy.detach(), h.grad, w.grad))
    (log_p, entropy, *expected), (ours, our_entropy, *found) = results
    assert torch.equal(log_p, ours) and torch.equal(entropy, our_entropy)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.02}[dtype]
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype == dtype
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


def test_gradients_are_those_of_differences():
    hidden, weight, chosen = case(torch.float64)
    arguments = (hidden.flatten(0, 1).clone().requires_grad_(), weight.clone().requires_grad_())
    for softcap in (None, 3.0):
        assert torch.autograd.gradcheck(
            lambda h, w, cap=softcap: token_log_probs.reference(h, w, chosen.flatten(), softcap=cap, chunk=4), arguments
        )


def test_ignored_tokens_and_no_tokens_give_zeros_with_a_gradient():
    hidden, weight, chosen = case(torch.float32)
    for h, t in ((hidden.flatten(0, 1), torch.full_like(chosen, IGNORE).flatten()), (hidden.flatten(0, 1)[:0], chosen.flatten()[:0])):
        h, w = h.clone().requires_grad_(), weight.clone().requires_grad_()
        log_p, entropy = token_log_probs.reference(h, w, t)
        log_p.sum().backward()
        assert not log_p.any() and not entropy.any() and not h.grad.any() and not w.grad.any()


def test_logits_are_never_all_there():
    """Of 64 tokens with chunks of 8, no tensor of V columns that is made has more than 8 rows, forward or backward."""
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: set[int] = set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), named=None):  # type: ignore[no-untyped-def]
            result = function(*arguments, **(named or {}))
            for each in result if isinstance(result, tuple | list) else [result]:
                if isinstance(each, Tensor) and each.dim() == 2 and each.shape[1] == 97:
                    seen.add(each.shape[0])
            return result

    hidden, weight = torch.randn(64, 8).requires_grad_(), torch.randn(97, 8).requires_grad_()
    with Watch():
        token_log_probs.reference(hidden, weight, torch.arange(64), chunk=8)[0].sum().backward()
    assert max(seen - {8}, default=8) == 8 and 8 in seen


# ---------------------------------------------------------------- over ranks


def over_ranks(
    size: int, data: Triple, whole: bool, of: str = "l", **settings: object
) -> tuple[list[tuple[Tensor, Tensor]], Tensor, Tensor]:
    hidden, weight, chosen = data
    length, vocabulary = hidden.shape[1], weight.shape[0]

    def work(comm):  # type: ignore[no-untyped-def]
        tokens.note(length)
        parts, rows = even_counts(length, comm.size), even_counts(vocabulary, comm.size)
        module = nn.Linear(weight.shape[1], vocabulary, bias=False, device="meta")
        made = role.build(VocabConfig(whole=whole))
        made.cut("head", module, {"tp": size})
        h = hidden.split(parts, 1)[comm.rank].clone().requires_grad_()
        w = (weight if whole else weight.split(rows)[comm.rank]).clone().requires_grad_()
        log_p, entropy = made.token_log_probs("head", module, lambda axis: comm)(h.flatten(0, 1), w, chosen.flatten(), **settings)
        score(log_p, entropy, of).backward()
        return (log_p.detach(), entropy.detach()), h.grad, w.grad

    results = run_ranks(size, work)
    of_weight = sum(r[2] for r in results) if whole else torch.cat([r[2] for r in results])
    return [r[0] for r in results], torch.cat([r[1] for r in results], 1), of_weight


@pytest.mark.parametrize("whole", [False, True], ids=["shared_out", "whole"])
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(("settings", "of"), [({}, "l"), ({"softcap": 2.0, "chunk": 5}, "le"), ({"chunk": 3}, "e")], ids=str)
def test_ranks_equal_one(size, settings, of, whole):
    hidden, weight, chosen = case(torch.float64)
    h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    log_p, entropy = token_log_probs.reference(h.flatten(0, 1), w, chosen.flatten(), **settings)
    score(log_p, entropy, of).backward()
    results, of_hidden, of_weight = over_ranks(size, (hidden, weight, chosen), whole, of, **settings)
    for found, found_entropy in results:
        torch.testing.assert_close(found, log_p.detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found_entropy, entropy.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(of_hidden, h.grad, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(of_weight, w.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("whole", [False, True], ids=["shared_out", "whole"])
def test_rows_shorter_than_ranks_and_nothing_chosen(whole):
    hidden, weight, chosen = case(torch.float32, length=2)
    results, of_hidden, of_weight = over_ranks(4, (hidden, weight, torch.full_like(chosen, IGNORE)), whole)
    assert all(not log_p.any() and not entropy.any() for log_p, entropy in results)
    assert not of_hidden.any() and not of_weight.any()


def test_bfloat16_over_ranks_has_float32_statistics():
    data = case(torch.bfloat16)
    results, of_hidden, of_weight = over_ranks(2, data, False)
    expected, _ = token_log_probs.reference(data[0].flatten(0, 1), data[1], data[2].flatten())
    assert results[0][0].dtype == torch.float32 and torch.allclose(results[0][0], expected, rtol=1e-6, atol=1e-6)
    assert of_hidden.dtype == of_weight.dtype == torch.bfloat16
