"""Adapters to other packages' gated delta rules, by doubles that compute what those would: the reference, one document at a time."""

from __future__ import annotations

import inspect
import sys
import types
from typing import Any

import pytest
import torch
from intarsia_kernels.delta_rule import peers
from intarsia_models_common.linear_attention.delta_rule import gated_delta_rule as reference
from torch import Tensor

ROWS, TOKENS, HEADS, WIDTH = 3, 12, 2, 64
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 7, [0] * 12, [0, 1, 2, *[0] * 9]])
COUNTS = torch.tensor([12, 7, 0])


def by_offsets(inputs: tuple[Tensor, ...], state: Tensor | None, offsets: Tensor, scale: float, normalise: bool) -> tuple[Tensor, Tensor]:
    """States [documents, H, K, V]."""
    outputs, finals = [], []
    for n, (start, stop) in enumerate(zip(offsets.tolist(), offsets.tolist()[1:], strict=False)):
        entering = None if state is None else state[n : n + 1]
        y, final = reference(*(x[:, start:stop] for x in inputs), entering, scale=scale, normalise=normalise)
        outputs.append(y)
        finals.append(final)
    return torch.cat(outputs, 1), torch.cat(finals)


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float,
    initial_state: Tensor | None,
    output_final_state: bool,
    use_qk_l2norm_in_kernel: bool,
    cu_seqlens: Tensor,
) -> tuple[Tensor, Tensor]:
    assert g.dtype == torch.float32 and output_final_state
    return by_offsets((q, k, v, g, beta), initial_state, cu_seqlens, scale, use_qk_l2norm_in_kernel)


def chunk_gdn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor | None,
    *,
    cu_seqlens: Tensor,
    scale: float,
    output_final_state: bool,
) -> tuple[Tensor, Tensor]:
    assert cu_seqlens.dtype == torch.int32 and output_final_state
    y, final = by_offsets((q, k, v, g, beta), None if state is None else state.mT, cu_seqlens, scale, False)
    return y, final.mT.contiguous()


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def results(function: Any, inputs: list[Tensor], state: Tensor | None, counts_B: Tensor | None, **settings: Any) -> list[Tensor]:
    """Outputs of real tokens, states, and every gradient."""
    leaves = [x.clone().requires_grad_() for x in (*inputs, *([] if state is None else [state]))]
    y, final = function(*leaves[:5], None if state is None else leaves[5], counts_B=counts_B, scale=0.1, **settings)
    if counts_B is not None:
        y = y.masked_fill(torch.arange(TOKENS)[:, None, None] >= counts_B[:, None, None, None], 0.0)
    gradients = torch.autograd.grad((y.float() * drawn(8, *y.shape)).sum() + (final * drawn(9, *final.shape)).sum(), leaves)
    return [y.detach(), final.detach(), *gradients]


@pytest.mark.parametrize("name", ["fla", "attn_gym"])
@pytest.mark.parametrize("normalise", [True, False])
def test_rows_documents_counts_and_states_go_through(name: str, normalise: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, function in (("fla.ops.gated_delta_rule", chunk_gated_delta_rule), ("attn_gym.linear", chunk_gdn)):
        made = types.ModuleType(module)
        setattr(made, function.__name__, function)
        monkeypatch.setitem(sys.modules, module, made)
    q, k, v = (drawn(seed, ROWS, TOKENS, HEADS, WIDTH) for seed in range(3))
    k = k / k.norm(dim=-1, keepdim=True)
    inputs = [*(x.half() for x in (q, k, v)), -drawn(4, ROWS, TOKENS, HEADS).abs(), drawn(5, ROWS, TOKENS, HEADS).sigmoid()]
    for x in inputs:
        x[1, 7:] = torch.nan  # padding
    for documents, entering in ((None, False), (DOCUMENTS, False), (DOCUMENTS, True)):
        state = drawn(6, ROWS, HEADS, WIDTH, WIDTH) if entering else None
        given = {"documents_BS": documents, "normalise": normalise}
        found, expected = (results(each, inputs, state, COUNTS, **given) for each in (getattr(peers, name), reference))
        for one, other in zip(found, expected, strict=True):
            assert one.dtype == other.dtype
            torch.testing.assert_close(one, other, rtol=4e-3, atol=8e-3)
        whole = [x.nan_to_num() for x in inputs]
        found, expected = (results(each, whole, state, None, **given) for each in (getattr(peers, name), reference))
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=4e-3, atol=8e-3)


@pytest.mark.parametrize("name", ["fla", "attn_gym"])
def test_signatures_and_what_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "fla_refuses_here", lambda: None)
    function = getattr(peers, name)
    assert inspect.signature(function).parameters.keys() == inspect.signature(reference).parameters.keys()

    def refused(keys: int, values: int, dtype: torch.dtype = torch.float16, tokens: int = 4, **settings: Any) -> str | None:
        q, v = torch.zeros(1, tokens, 1, keys, dtype=dtype), torch.zeros(1, tokens, 1, values, dtype=dtype)
        share = torch.zeros(1, tokens, 1)
        return function.supports(q, q, v, share, share, scale=1.0, normalise=True, **settings)

    assert refused(64, 64) is None and refused(128, 128, torch.bfloat16) is None
    assert "float16" in (refused(64, 64, torch.float32) or "")
    assert "token by token" in (refused(64, 64, form="recurrent") or "")
    assert refused(64, 64, tokens=0) == "no tokens"
    assert "512" in (refused(512, 64) or "")
    assert (refused(64, 128) is None) == (name == "fla")


def test_fla_is_refused_where_it_refuses_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"fla"}
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: name if name in found else None)
    q, share = torch.zeros(1, 4, 1, 64, dtype=torch.float16), torch.zeros(1, 4, 1)

    def refused(hopper: bool, fixed: bool) -> str | None:
        utilities = types.ModuleType("fla.utils")
        vars(utilities).update(IS_NVIDIA_HOPPER=hopper, TRITON_ABOVE_3_4_0=True, TRITON_ABOVE_3_7_1=fixed)
        monkeypatch.setitem(sys.modules, "fla.utils", utilities)
        peers.fla_refuses_here.cache_clear()
        return peers.fla.supports(q, q, q, share, share, scale=1.0, normalise=True)  # type: ignore[attr-defined,no-any-return]

    try:
        assert "it needs 3.7.1 or tilelang" in (refused(True, False) or "")
        assert refused(True, True) is None and refused(False, False) is None
        found.add("tilelang")
        assert refused(True, False) is None
        found.clear()
        assert refused(True, False) is None, "it is not installed, which its entry says"
    finally:
        peers.fla_refuses_here.cache_clear()
