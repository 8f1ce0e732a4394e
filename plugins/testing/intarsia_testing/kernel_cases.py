"""Calls with which kernels are checked and timed: for every operator awkward sizes (1, 15, 63, 300; head dim 100) and everything its signature can say.

Tensors are made in float64 and cast, so that every dtype sees the same numbers. Shape suffixes as in `intarsia.ops`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from intarsia.errors import UsageError
from intarsia.ops import Packing, operators
from intarsia_float8.format import quantise
from torch import Tensor

SIZES = (1, 15, 63, 300)


@dataclasses.dataclass(frozen=True)
class Case:
    """One call. `tensors` are the floating arguments, which get gradients (of an operator that has none: `differentiable` is False); `fixed` the others. `batched` names the arguments whose dim 0 is the batch:
    an invariant kernel gives a row of the batch the same bits alone. `rows`, where dim 0 says it otherwise, gives the same call with one row alone."""

    label: str
    tensors: Mapping[str, Tensor]
    fixed: Mapping[str, Any]
    batched: tuple[str, ...] = ()
    differentiable: bool = True
    rows: Callable[[int], Case] | None = None

    def arguments(self, dtype: torch.dtype, device: str, rounded_to: torch.dtype | None = None) -> dict[str, Any]:
        """Arguments by name, floating ones in `dtype` as leaves that ask for gradients; `rounded_to` first, so that a reference in float64 starts from
        the very numbers that a kernel in another dtype was given."""
        made: dict[str, Any] = {
            name: tensor.to(rounded_to or dtype).to(device, dtype).detach().requires_grad_(self.differentiable)
            for name, tensor in self.tensors.items()
        }
        for name, value in self.fixed.items():
            value = Packing(value) if name == "packing" else value
            made[name] = value.to(device) if hasattr(value, "to") else value
        return made

    def row(self, b: int) -> Case | None:
        """The same call with row `b` alone; None where rows cannot be taken apart."""
        if self.rows is not None:
            return self.rows(b)
        if not self.batched:
            return None
        cut = {name: t[b : b + 1] if name in self.batched else t for name, t in self.tensors.items()}
        fixed = {name: v[b : b + 1] if name in self.batched or name == "packing" else v for name, v in self.fixed.items()}
        return Case(f"{self.label}, row {b} alone", cut, fixed, self.batched)


def cases(op: str) -> list[Case]:
    """The cases of an operator: the kit's, or those that the operator's own attribute `cases()` gives; empty where there are none."""
    torch_state = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=torch_state, dtype=torch.float64)

    if op in _CASES:
        return list(_CASES[op](normal))
    own = getattr(operators().get(op), "cases", None)
    return [] if own is None else list(own())


Normal = Callable[..., Tensor]


def _linear(normal: Normal) -> Iterator[Case]:
    for rows, inputs, outputs in ((1, 15, 63), (15, 100, 1), (63, 1, 300), (300, 63, 100)):
        tensors = {"x_NI": normal(rows, inputs), "weight_OI": normal(outputs, inputs)}
        yield Case(f"{rows} x {inputs} -> {outputs}", tensors, {}, ("x_NI",))
        yield Case(f"{rows} x {inputs} -> {outputs}, bias", {**tensors, "bias_O": normal(outputs)}, {}, ("x_NI",))
    yield Case("two leading dimensions", {"x_NI": normal(3, 15, 20), "weight_OI": normal(30, 20)}, {}, ("x_NI",))


def _scaled_linear(normal: Normal) -> Iterator[Case]:
    # The parameter's values mean nothing: whoever reads them is found out.
    for rows, inputs, outputs, tile in (
        (1, 128, 128, (128, 128)),
        (63, 256, 384, (128, 128)),
        (300, 640, 128, (128, 128)),
        (15, 100, 63, (8, 16)),
    ):
        payload, scales = quantise(normal(outputs, inputs).float(), tile)
        fixed = {"payload_OI": payload, "scales_oi": scales, "tile": tile}
        tensors = {"x_NI": normal(rows, inputs), "weight_OI": normal(outputs, inputs)}
        label = f"{rows} x {inputs} -> {outputs}, tiles of {tile[0]} x {tile[1]}"
        yield Case(label, tensors, fixed, ("x_NI",))
        yield Case(f"{label}, bias", {**tensors, "bias_O": normal(outputs)}, fixed, ("x_NI",))
    payload, scales = quantise(normal(128, 256).float(), (128, 128), True)
    fixed = {"payload_OI": payload, "scales_oi": scales}
    yield Case("two leading dimensions", {"x_NI": normal(3, 15, 256), "weight_OI": normal(128, 256)}, fixed, ("x_NI",))


def _rms_norm(normal: Normal) -> Iterator[Case]:
    for rows, dim in ((1, 1), (15, 63), (63, 300), (3, 100), (0, 15)):
        eps = 0.5 if dim == 1 else 1e-5  # one column and a small eps: the gradient is all cancellation, and nobody's is right
        yield Case(f"{rows} rows of {dim}", {"x_ND": normal(rows, dim), "weight_D": normal(dim)}, {"eps": eps}, ("x_ND",))
    yield Case("no weight", {"x_ND": normal(4, 15, 63)}, {"weight_D": None, "eps": 1e-6}, ("x_ND",))
    yield Case("large numbers", {"x_ND": 1e3 * normal(5, 300), "weight_D": normal(300)}, {"eps": 1e-5}, ("x_ND",))


def _offset_rms_norm(normal: Normal) -> Iterator[Case]:
    for case in _rms_norm(normal):
        if "weight_D" in case.tensors:
            yield case


def _layer_norm(normal: Normal) -> Iterator[Case]:
    for rows, dim in ((1, 1), (15, 63), (63, 300), (0, 100)):
        tensors = {"x_ND": normal(rows, dim), "weight_D": normal(dim), "bias_D": normal(dim)}
        yield Case(f"{rows} rows of {dim}", tensors, {"eps": 1e-6}, ("x_ND",))
    tensors = {"x_ND": 100 * normal(5, 300) + 1e3, "weight_D": normal(300), "bias_D": normal(300)}
    yield Case("far from zero", tensors, {"eps": 1e-6}, ("x_ND",))


def _segment_attention(normal: Normal) -> Iterator[Case]:
    for lengths, heads, dim in (((1,), 1, 8), ((15, 0, 63, 1), 2, 72), ((64, 64, 16), 3, 100), ((300, 7), 2, 64), ((), 2, 72)):
        q_NHD, k_NHD, v_NHD = (normal(sum(lengths), heads, dim) for _ in range(3))
        tensors = {"q_NHD": q_NHD, "k_NHD": k_NHD, "v_NHD": v_NHD}
        yield Case(f"segments of {lengths}, {heads} heads of {dim}", tensors, {"lengths": lengths, "scale": dim**-0.5})


def _sigmoid_gate(normal: Normal) -> Iterator[Case]:
    for rows, dim in ((1, 1), (15, 63), (63, 300)):
        yield Case(f"{rows} rows of {dim}", {"x_ND": normal(rows, dim), "gate_ND": normal(rows, dim)}, {}, ("x_ND", "gate_ND"))
    yield Case("gates that are open or shut", {"x_ND": normal(5, 63), "gate_ND": 40 * normal(5, 63)}, {}, ("x_ND", "gate_ND"))


def _rope(normal: Normal) -> Iterator[Case]:
    for tokens, dim, rotated, interleaved in (
        (1, 2, 1, False),
        (15, 100, 50, False),
        (63, 100, 50, True),
        (15, 100, 20, False),
        (15, 64, 16, True),
    ):
        angles = normal(2, tokens, rotated)
        label = f"{tokens} tokens, head dim {dim}, {rotated} pairs, {'interleaved' if interleaved else 'half-split'}"
        fixed = {"cos_BSd": angles.cos().float(), "sin_BSd": angles.sin().float(), "interleaved": interleaved}
        yield Case(label, {"x_BSHD": normal(2, tokens, 3, dim)}, fixed, ("x_BSHD", "cos_BSd", "sin_BSd"))


def _swiglu(normal: Normal) -> Iterator[Case]:
    for rows, dim in ((1, 1), (15, 63), (63, 300)):
        yield Case(f"{rows} rows of {dim}", {"gate_NF": normal(rows, dim), "up_NF": normal(rows, dim)}, {}, ("gate_NF", "up_NF"))


def _embedding(normal: Normal) -> Iterator[Case]:
    for vocab, dim in ((1, 1), (15, 63), (300, 100)):
        ids = torch.arange(2 * 63).reshape(2, 63) * 7 % vocab
        yield Case(f"{vocab} rows of {dim}", {"weight_VD": normal(vocab, dim)}, {"ids_BS": ids}, ("ids_BS",))


def _cross_entropy(normal: Normal) -> Iterator[Case]:
    for tokens, dim, vocab, softcap in ((1, 15, 63, None), (63, 100, 300, None), (300, 63, 15, 5.0), (0, 15, 63, None)):
        labels = torch.arange(tokens) * 11 % vocab
        labels[::4] = -100
        tensors = {"hidden_ND": normal(tokens, dim), "weight_VD": normal(vocab, dim) / dim**0.5}
        yield Case(
            f"{tokens} tokens of {dim}, vocabulary {vocab}, softcap {softcap}",
            tensors,
            {"labels_N": labels, "softcap": softcap, "chunk": 64},
        )
    nothing = {"labels_N": torch.full((15,), -100)}
    yield Case("every label ignored", {"hidden_ND": normal(15, 63), "weight_VD": normal(63, 63)}, nothing)


GROUPS = ((0, 3, 0, 60, 0), (15, 0, 0, 0, 0), (0, 0, 0, 0, 0), (1, 1, 300, 1, 7))
"""Rows of five groups."""


def _grouped_linear(normal: Normal) -> Iterator[Case]:
    # Whole multiples of 8, which tensor cores take, and other sizes; tails of rows that belong to no group.
    for counts, tail, inputs, outputs in zip(GROUPS, (0, 5, 9, 1), (64, 15, 8, 128), (8, 63, 8, 72), strict=True):
        tensors = {"x_MI": normal(sum(counts) + tail, inputs), "weight_EOI": normal(5, outputs, inputs) / inputs**0.5}
        yield Case(f"groups of {counts} rows and {tail} more, {inputs} -> {outputs}", tensors, {"counts_E": torch.tensor(counts)})
    tensors = {"x_MI": normal(63, 64), "weight_EOI": normal(1, 16, 64)}
    yield Case("one group", tensors, {"counts_E": torch.tensor([63])})


def _scaled_grouped_linear(normal: Normal) -> Iterator[Case]:
    for counts, tail, inputs, outputs, tile in (
        (GROUPS[0], 5, 256, 128, (128, 128)),
        (GROUPS[3], 0, 24, 40, (8, 16)),
        (GROUPS[2], 3, 16, 8, (8, 8)),
    ):
        payload, scales = quantise(normal(5, outputs, inputs).float() / inputs**0.5, tile)
        tensors = {"x_MI": normal(sum(counts) + tail, inputs), "weight_EOI": normal(5, outputs, inputs)}
        fixed = {"payload_EOI": payload, "scales_Eoi": scales, "counts_E": torch.tensor(counts), "tile": tile}
        yield Case(f"groups of {counts} rows and {tail} more, {inputs} -> {outputs}, tiles of {tile[0]} x {tile[1]}", tensors, fixed)


def _router_linear(normal: Normal) -> Iterator[Case]:
    for tokens, dim, experts in ((1, 15, 8), (63, 64, 7), (300, 100, 64)):
        yield Case(f"{tokens} tokens of {dim}, {experts} experts", {"x_ND": normal(tokens, dim), "weight_ED": normal(experts, dim)}, {})


def _grouped_swiglu(normal: Normal) -> Iterator[Case]:
    for counts, tail, inputs, outputs in zip(GROUPS, (0, 5, 9, 1), (64, 16, 8, 128), (8, 63, 8, 72), strict=True):
        matrices = {name: normal(5, outputs, inputs) / inputs**0.5 for name in ("gate_EOI", "up_EOI")}
        label = f"groups of {counts} rows and {tail} more, {inputs} -> {outputs}"
        yield Case(label, {"x_MI": normal(sum(counts) + tail, inputs), **matrices}, {"counts_E": torch.tensor(counts)})


CHOICES = (
    (1, 1, 1, 1, 1, "max"),
    (15, 7, 2, 1, 1, "max"),
    (63, 64, 6, 1, 1, "max"),
    (63, 24, 4, 4, 2, "top2"),
    (15, 21, 3, 3, 1, "max"),
    (300, 256, 8, 8, 4, "top2"),
)
"""Tokens, experts, experts of a token, groups, groups that are chosen from, what they are worth."""


def _top_experts(normal: Normal) -> Iterator[Case]:
    for tokens, experts, k, groups, best, score in CHOICES:
        fixed = {"top_k": k, "groups": groups, "top_groups": best, "group_score": score}
        # Which of equal scores comes first is open: all are distinct in every dtype, and so are groups' worths, of which the largest by one score is the least by two.
        scores = -1.0 - normal(tokens, experts).argsort(-1).double().view(tokens, groups, -1)
        rank, member = normal(tokens, groups).argsort(-1)[..., None], normal(tokens, groups, experts // groups).argsort(-1)
        scores.scatter_(2, member[..., 1:2], (0.25 + (groups - 1 - rank) / 32).double()).scatter_(
            2, member[..., :1], (0.5 + rank / 128).double()
        )
        scores = scores.flatten(1)
        yield Case(f"{k} of {experts} for {tokens} tokens, {best} of {groups} groups by {score}", {"scores_NE": scores}, fixed)


def _chosen(tokens: int, experts: int, k: int) -> Tensor:
    return torch.rand(tokens, experts, generator=torch.Generator().manual_seed(experts)).topk(k, -1).indices


def _expert_weights(normal: Normal) -> Iterator[Case]:
    for (tokens, experts, k, *_), normalise, scale in zip(CHOICES, (True, False) * 3, (1.0, 2.5, 2.5) * 2, strict=True):
        fixed = {"experts_NK": _chosen(tokens, experts, k), "normalise": normalise, "scale": scale}
        label = f"{k} of {experts} for {tokens} tokens, normalised: {normalise}, times {scale:g}"
        yield Case(label, {"scores_NE": torch.sigmoid(normal(tokens, experts))}, fixed)


def _expert_counts(normal: Normal) -> Iterator[Case]:
    for tokens, experts, k, *_ in CHOICES:
        counts, dropped = torch.bincount(_chosen(tokens, experts, k).flatten(), minlength=experts), torch.tensor(tokens // 2)
        fixed = {"counts_E": counts, "dropped": dropped if tokens > 15 else None}
        yield Case(f"{tokens} tokens, {experts} experts", {"scores_NE": torch.softmax(3 * normal(tokens, experts), -1)}, fixed)
    scores = torch.zeros(5, 3, dtype=torch.float64)
    scores[1:, 1], scores[4] = 1, 1e-22
    yield Case(
        "shares of 0 and 1, hardly any scores, and none", {"scores_NE": scores}, {"counts_E": torch.tensor([0, 5, 0]), "dropped": None}
    )


def _sort_pairs(normal: Normal) -> Iterator[Case]:
    for tokens, experts, k, *_ in (*CHOICES, (2100, 64, 6)):
        yield Case(f"{k} of {experts} for {tokens} tokens", {}, {"experts_NK": _chosen(tokens, experts, k), "experts": experts})
    yield Case("all to one expert", {}, {"experts_NK": torch.full((63, 1), 3), "experts": 5})


def _router_sigmoid(normal: Normal) -> Iterator[Case]:
    for tokens, experts in ((1, 1), (15, 7), (63, 64)):
        logits = 3 * normal(tokens, experts)
        yield Case(f"{tokens} tokens, {experts} experts", {"logits_NE": logits}, {}, ("logits_NE",))
    yield Case("scores of 0 and 1", {"logits_NE": 30 * normal(5, 9)}, {}, ("logits_NE",))


def _routes(tokens: int, k: int, dropped: int, tail: int) -> dict[str, Tensor]:
    """Pairs in a fixed disorder; some are dropped, and some rows serve none."""
    pairs = torch.randperm(tokens * k, generator=torch.Generator().manual_seed(tokens))[dropped:]
    places = torch.full((tokens * k,), -1)
    places[pairs] = torch.arange(len(pairs))
    return {"pairs_M": torch.cat([pairs, pairs.new_full((tail,), -1)]), "places_NK": places.view(tokens, k)}


def _permute(normal: Normal) -> Iterator[Case]:
    for tokens, k, dim, dropped, tail in ((1, 1, 15, 0, 0), (9, 2, 100, 0, 0), (7, 3, 300, 7, 5), (10, 6, 64, 0, 0), (0, 2, 8, 0, 3)):
        label = f"{tokens} tokens of {dim} to {k} experts each, {dropped} pairs dropped, {tail} rows of tail"
        yield Case(label, {"x_ND": normal(tokens, dim)}, _routes(tokens, k, dropped, tail))


def _combine(normal: Normal) -> Iterator[Case]:
    for tokens, k, dim, dropped, tail in ((1, 1, 15, 0, 0), (9, 2, 100, 0, 0), (7, 3, 300, 7, 5), (10, 6, 64, 0, 0), (0, 2, 8, 0, 3)):
        label = f"{tokens} tokens of {dim} from {k} experts each, {dropped} pairs dropped, {tail} rows of tail"
        tensors = {"y_MD": normal(tokens * k - dropped + tail, dim), "weights_NK": normal(tokens, k)}
        yield Case(label, tensors, _routes(tokens, k, dropped, tail))


PACKED = ((3, 1, 40, 19), (63,), (62, 1))
"""Documents of three rows of 63 tokens."""


def _attention(normal: Normal) -> Iterator[Case]:
    batched = ("q_BSHD", "k_BTKD", "v_BTKD", "documents_q_BS", "documents_k_BT", "positions_q_BS", "positions_k_BT")

    def qkv(rows: int, queries: int, keys: int, heads: int, kv_heads: int, dim: int) -> dict[str, Tensor]:
        return {
            "q_BSHD": normal(rows, queries, heads, dim),
            "k_BTKD": normal(rows, keys, kv_heads, dim),
            "v_BTKD": normal(rows, keys, kv_heads, dim),
        }

    for tokens, heads, kv_heads, dim in ((1, 1, 1, 16), (15, 4, 2, 100), (63, 6, 2, 64), (300, 3, 3, 16)):
        yield Case(
            f"causal, {tokens} tokens, {heads}/{kv_heads} heads of {dim}",
            qkv(2, tokens, tokens, heads, kv_heads, dim),
            {"scale": dim**-0.5},
            batched,
        )
    yield Case("window 7", qkv(2, 63, 63, 4, 2, 32), {"scale": 0.2, "window": 7}, batched)
    documents = torch.stack([torch.cat([torch.full((n,), i, dtype=torch.int32) for i, n in enumerate(row)]) for row in PACKED])
    packed = {"scale": 0.2, "documents_q_BS": documents, "documents_k_BT": documents}
    yield Case("packed", qkv(3, 63, 63, 4, 2, 32), packed, batched)
    yield Case("packed, lengths known", qkv(3, 63, 63, 4, 2, 32), {**packed, "packing": PACKED}, batched)
    yield Case("packed, window 7, lengths known", qkv(3, 63, 63, 4, 2, 32), {**packed, "window": 7, "packing": PACKED}, batched)
    many = tuple((1,) * 60 + (3,) for _ in range(2))
    crowd = torch.tensor([[*range(60), 60, 60, 60]] * 2, dtype=torch.int32)
    yield Case(
        "63 tokens in 61 documents",
        qkv(2, 63, 63, 4, 2, 32),
        {"scale": 0.2, "documents_q_BS": crowd, "documents_k_BT": crowd, "packing": many},
        batched,
    )
    yield Case("softcap 2", qkv(2, 63, 63, 4, 2, 32), {"scale": 0.5, "softcap": 2.0}, batched)
    yield Case("sinks", {**qkv(2, 63, 63, 4, 2, 32), "sinks_H": normal(4)}, {"scale": 0.2}, batched)
    yield Case(
        "sinks, softcap, window, packed",
        {**qkv(3, 63, 63, 4, 2, 32), "sinks_H": normal(4)},
        {**packed, "softcap": 3.0, "window": 9},
        batched,
    )
    yield Case("five queries at the end of 63 keys", qkv(2, 5, 63, 4, 2, 32), {"scale": 0.2}, batched)
    positions_q, positions_k = torch.tensor([[30], [2]]), torch.arange(63).expand(2, 63)
    slots = torch.where(positions_k <= positions_q, 0, -1).int()
    decode = {
        "documents_q_BS": torch.zeros(2, 1, dtype=torch.int32),
        "documents_k_BT": slots,
        "positions_q_BS": positions_q,
        "positions_k_BT": positions_k,
    }
    yield Case("one query over slots, some empty", qkv(2, 1, 63, 4, 2, 32), {"scale": 0.2, **decode}, batched)
    empty = {**decode, "documents_k_BT": torch.stack((slots[0], torch.full((63,), -1, dtype=torch.int32)))}
    yield Case("a query that sees nothing", qkv(2, 1, 63, 4, 2, 32), {"scale": 0.2, **empty}, batched)


def _documents(*rows: tuple[int, ...]) -> Tensor:
    return torch.stack([torch.cat([torch.full((n,), i, dtype=torch.int32) for i, n in enumerate(row)]) for row in rows])


def _gated_delta_rule(normal: Normal) -> Iterator[Case]:
    batched = ("q_BSHK", "k_BSHK", "v_BSHV", "decay_BSH", "beta_BSH", "state_BHKV", "documents_BS", "counts_B")

    def inputs(rows: int, tokens: int, heads: int, keys: int, values: int, decay: float = 0.3) -> dict[str, Tensor]:
        return {
            "q_BSHK": normal(rows, tokens, heads, keys),
            "k_BSHK": normal(rows, tokens, heads, keys),
            "v_BSHV": normal(rows, tokens, heads, values),
            "decay_BSH": -decay * normal(rows, tokens, heads).abs(),
            "beta_BSH": normal(rows, tokens, heads).sigmoid(),
        }

    plain = {"scale": 0.125, "normalise": True}
    for tokens, heads, keys, values in ((1, 1, 64, 64), (15, 2, 100, 36), (63, 1, 64, 128), (130, 2, 64, 64)):
        yield Case(f"{tokens} tokens, {heads} heads of {keys} and {values}", inputs(1, tokens, heads, keys, values), plain, batched)
    packed, short = {**plain, "documents_BS": _documents(*PACKED)}, {**plain, "counts_B": torch.tensor([63, 0, 40])}
    yield Case("packed", inputs(3, 63, 1, 64, 64), packed, batched)
    yield Case("packed, a state enters", {**inputs(3, 63, 1, 64, 64), "state_BHKV": normal(3, 1, 64, 64)}, packed, batched)
    yield Case("63 tokens in 61 documents", inputs(1, 63, 1, 64, 64), {**plain, "documents_BS": _documents((1,) * 60 + (3,))}, batched)
    yield Case("rows of 63, 0 and 40 tokens", {**inputs(3, 63, 1, 64, 64), "state_BHKV": normal(3, 1, 64, 64)}, short, batched)
    tensors = {**inputs(1, 70, 1, 64, 64, decay=0.0), "k_BSHK": normal(1, 1, 1, 64).expand(1, 70, 1, 64)}
    yield Case("equal keys, nothing decays", tensors, plain, batched)
    yield Case("decays of up to e^-300", inputs(1, 70, 1, 64, 64, decay=100.0), plain, batched)
    tensors = inputs(1, 70, 1, 64, 64)
    unit = tensors["k_BSHK"] / tensors["k_BSHK"].norm(dim=-1, keepdim=True)
    yield Case("lengths as they are, chunks of 16", {**tensors, "k_BSHK": unit}, {"scale": 0.1, "normalise": False, "chunk": 16}, batched)
    yield Case("states computed again", inputs(1, 70, 1, 64, 64), {**plain, "recompute": True}, batched)


def _short_conv(normal: Normal) -> Iterator[Case]:
    batched = ("x_BSC", "state_BKC", "documents_BS", "counts_B")
    for tokens, channels, taps in ((1, 15, 4), (15, 63, 2), (63, 300, 4)):
        yield Case(
            f"{tokens} tokens, {channels} channels, {taps} taps",
            {"x_BSC": normal(2, tokens, channels), "weight_CK": normal(channels, taps)},
            {},
            batched,
        )
    tensors = {"x_BSC": normal(3, 63, 20), "weight_CK": normal(20, 4), "state_BKC": normal(3, 3, 20)}
    yield Case("a state enters, no activation", tensors, {"activation": "none"}, batched)
    yield Case("packed, a state enters", tensors, {"documents_BS": _documents(*PACKED)}, batched)
    counts = {"documents_BS": _documents(*PACKED), "counts_B": torch.tensor([63, 0, 2])}
    yield Case("packed, rows of 63, 0 and 2 tokens", tensors, counts, batched)
    yield Case(
        "63 tokens in 61 documents",
        {"x_BSC": normal(1, 63, 20), "weight_CK": normal(20, 4)},
        {"documents_BS": _documents((1,) * 60 + (3,))},
        batched,
    )


def _paged_attention(normal: Normal) -> Iterator[Case]:
    from intarsia_testing import paged_cases  # of an operator of the generator's, which not everybody has

    yield from paged_cases.cases(normal)


_CASES: dict[str, Callable[[Normal], Iterator[Case]]] = {
    "linear": _linear,
    "scaled_linear": _scaled_linear,
    "rms_norm": _rms_norm,
    "offset_rms_norm": _offset_rms_norm,
    "sigmoid_gate": _sigmoid_gate,
    "layer_norm": _layer_norm,
    "segment_attention": _segment_attention,
    "rope": _rope,
    "swiglu": _swiglu,
    "embedding": _embedding,
    "cross_entropy": _cross_entropy,
    "attention": _attention,
    "grouped_linear": _grouped_linear,
    "scaled_grouped_linear": _scaled_grouped_linear,
    "grouped_swiglu": _grouped_swiglu,
    "top_experts": _top_experts,
    "expert_weights": _expert_weights,
    "expert_counts": _expert_counts,
    "sort_pairs": _sort_pairs,
    "router_linear": _router_linear,
    "router_sigmoid": _router_sigmoid,
    "permute": _permute,
    "combine": _combine,
    "gated_delta_rule": _gated_delta_rule,
    "short_conv": _short_conv,
    "paged_attention": _paged_attention,
}


def bench_case(op: str, small: bool) -> Case:
    """One call of a size met in training: Llama 3 1B's widths on a GPU, the debug model's on a CPU; of a plugin's operator its largest case."""
    generator = torch.Generator().manual_seed(0)
    rows, tokens, dim, heads, kv_heads, head_dim, vocab = (4, 512, 256, 8, 4, 32, 2048) if small else (2, 4096, 2048, 32, 8, 64, 32768)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    if op == "linear":
        return Case(f"{rows} x {tokens} x {dim} -> {3 * dim}", {"x_NI": normal(rows, tokens, dim), "weight_OI": normal(3 * dim, dim)}, {})
    if op == "scaled_linear":
        payload, scales = quantise(normal(3 * dim, dim), (128, 128))
        tensors = {"x_NI": normal(rows, tokens, dim), "weight_OI": torch.zeros(()).expand(3 * dim, dim)}
        return Case(f"{rows} x {tokens} x {dim} -> {3 * dim}", tensors, {"payload_OI": payload, "scales_oi": scales})
    if op == "rms_norm":
        return Case(f"{rows} x {tokens} x {dim}", {"x_ND": normal(rows, tokens, dim), "weight_D": normal(dim)}, {"eps": 1e-5})
    if op == "rope":
        angles = normal(rows, tokens, head_dim // 2)
        fixed = {"cos_BSd": angles.cos(), "sin_BSd": angles.sin()}
        return Case(f"{rows} x {tokens} x {heads} x {head_dim}", {"x_BSHD": normal(rows, tokens, heads, head_dim)}, fixed)
    if op == "swiglu":
        return Case(
            f"{rows} x {tokens} x {3 * dim}", {"gate_NF": normal(rows, tokens, 3 * dim), "up_NF": normal(rows, tokens, 3 * dim)}, {}
        )
    if op == "embedding":
        ids = torch.randint(0, vocab, (rows, tokens), generator=generator)
        return Case(f"{rows} x {tokens} of {vocab} x {dim}", {"weight_VD": normal(vocab, dim)}, {"ids_BS": ids})
    if op == "cross_entropy":
        labels = torch.randint(0, vocab, (rows * tokens,), generator=generator)
        tensors = {"hidden_ND": normal(rows * tokens, dim), "weight_VD": normal(vocab, dim) / dim**0.5}
        return Case(f"{rows * tokens} tokens of {dim}, vocabulary {vocab}", tensors, {"labels_N": labels})
    if op == "attention":
        shapes = {"q_BSHD": heads, "k_BTKD": kv_heads, "v_BTKD": kv_heads}
        tensors = {name: normal(rows, tokens, count, head_dim) for name, count in shapes.items()}
        lengths = ((tokens // 4, tokens - tokens // 4), *((tokens,),) * (rows - 1))
        documents = torch.stack([torch.cat([torch.full((n,), i, dtype=torch.int32) for i, n in enumerate(row)]) for row in lengths])
        packed = {"scale": head_dim**-0.5, "documents_q_BS": documents, "documents_k_BT": documents, "packing": lengths}
        return Case(f"{rows} x {tokens}, {heads}/{kv_heads} heads of {head_dim}, packed", tensors, packed)
    found = cases(op)
    if not found:
        raise UsageError(f"The kit knows no call of operator {op!r} to time: give it an attribute `cases`.")
    return max(found, key=lambda case: sum(tensor.numel() for tensor in case.tensors.values()))
