"""Latent attention by itself: its two forms, what it sees, its scale, and kernels whose values are narrower than keys."""

from __future__ import annotations

import math

import pytest
import torch
from intarsia import ops
from intarsia.errors import UsageError
from intarsia.plugins import current
from intarsia_eager.context import TrainContext
from intarsia_models_common.build import Scope, build
from intarsia_models_common.config import MLAConfig, RMSNormConfig, RopeConfig
from intarsia_models_common.rope import Rope, attention_factor, score_factor
from intarsia_testing.model import packed_context

SCOPE = Scope("layers.0.attention", 32, 0, 1, True, 0.02, 0.02)
YARN = RopeConfig(scaling="yarn", factor=40.0, original_positions=64, mscale=1.0, mscale_all_dim=1.0)


def make(q_rank=12, scope=SCOPE, **fields):
    torch.manual_seed(0)
    mixer = build(MLAConfig(heads=4, kv_rank=16, q_rank=q_rank, nope_dim=8, rope_dim=4, value_dim=6, **fields), scope)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.normal_(std=0.3)
    return mixer, Rope(RopeConfig(dim=4), scope)


def run(mixer, rope, x_BSD, context, form="auto"):
    mixer.form = form
    return mixer(x_BSD, rope(context.positions_BS), context)


@pytest.mark.parametrize("q_rank", [None, 12])
@pytest.mark.parametrize("lengths", [((9,), (9,)), ((3, 1, 5), (4, 5))])
def test_absorbed_equals_plain_forward_and_backward(q_rank, lengths):
    mixer, rope = make(q_rank)
    found = {}
    for form in ("plain", "absorbed"):
        x_BSD = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(1), requires_grad=True)
        y_BSD = run(mixer, rope, x_BSD, packed_context(lengths), form)
        gradients = torch.autograd.grad(y_BSD.square().sum(), [x_BSD, *mixer.parameters()])
        found[form] = [y_BSD, *gradients]
    for one, other in zip(*found.values(), strict=True):
        assert (one - other).abs().max() <= 1e-5 * other.abs().max()


def test_absorbed_is_taken_where_it_is_cheaper_and_never_in_training():
    mixer, _ = make()
    assert not mixer._absorbs(1, 1000)
    with torch.no_grad():
        assert mixer._absorbs(1, 1000) and not mixer._absorbs(1000, 1000)
        mixer.wkv_b.weight_payload = torch.zeros(1)  # a sharder brings float8 beside the weight, which has no values then
        assert not mixer._absorbs(1, 1000)


class Gathered(TrainContext):
    """What another rank's part of the sequence looks like: half of the queries, every entry, in another order."""

    def __init__(self, whole: TrainContext, every, order, mine):
        super().__init__(whole.positions_BS[:, mine], None if whole.documents_BS is None else whole.documents_BS[:, mine])
        self.whole, self.every, self.order = whole, every, order

    def latent(self, mixer, latent_BSC, attend, **settings):
        documents = self.whole.documents_BS
        chosen = None if documents is None else documents[:, self.order]
        return attend(self.every[:, self.order], self.whole.positions_BS[:, self.order], chosen, **settings)


@pytest.mark.parametrize("lengths", [((12,),), ((3, 1, 8),)])
@pytest.mark.parametrize("form", ["plain", "absorbed"])
def test_more_entries_than_queries_are_masked_by_document_and_position(lengths, form):
    mixer, rope = make()
    whole = packed_context(lengths)
    x_BSD = torch.randn(1, 12, 32, generator=torch.Generator().manual_seed(2))
    kept = []
    plain = whole.latent
    whole.latent = lambda name, latent, attend, **settings: (kept.append(latent), plain(name, latent, attend, **settings))[1]
    expected = run(mixer, rope, x_BSD, whole, "plain")
    mine, order = [0, 1, 2, 9, 10, 11], [0, 1, 2, 9, 10, 11, 3, 4, 5, 6, 7, 8]
    part = run(mixer, rope, x_BSD[:, mine], Gathered(whole, kept[0], order, mine), form)
    assert torch.allclose(part, expected[:, mine], atol=1e-6)


def test_yarns_scale_of_scores():
    assert attention_factor(YARN) == 1.0
    # The fact sheet's numbers: a query width of 24, and the released one of 192.
    scale = 24**-0.5 * score_factor(YARN)
    assert scale == pytest.approx(0.3824989, abs=1e-7)
    assert 192**-0.5 * score_factor(YARN) == pytest.approx(0.1352338, abs=1e-7)
    scope = Scope("a", 32, 0, 1, True, 0.02, 0.02, score_factor(YARN))
    mixer = build(MLAConfig(heads=1, kv_rank=4, nope_dim=16, rope_dim=8, value_dim=4), scope)
    assert mixer.scale == pytest.approx(0.3824989, abs=1e-7)
    assert score_factor(RopeConfig(scaling="yarn", factor=4.0)) == score_factor(RopeConfig()) == 1.0


def test_the_cache_is_the_latent_and_the_rotated_key():
    mixer, rope = make()
    (cache,) = mixer.cache_spec().caches
    assert mixer.cache_spec().kind == "latent" and cache.shape == (20,) and cache.storage == "paged"
    context = packed_context(((5,),))
    seen = []
    context.latent = lambda name, latent, attend, **settings: (seen.append((name, latent)), latent.new_zeros(1, 5, 4, 6))[1]
    run(mixer, rope, torch.randn(1, 5, 32), context)
    assert seen[0][0] == "layers.0.attention" and seen[0][1].shape == (1, 5, 20)


def test_a_slice_of_the_heads_is_the_same_module():
    mixer, rope = make()
    x_BSD, context = torch.randn(1, 7, 32), packed_context(((7,),))
    whole = run(mixer, rope, x_BSD, context)
    parts = []
    for half in range(2):
        part, _ = make()
        with torch.no_grad():
            part.wq_b.weight = torch.nn.Parameter(mixer.wq_b.weight.chunk(2)[half])
            part.wkv_b.weight = torch.nn.Parameter(mixer.wkv_b.weight.chunk(2)[half])
            part.wo.weight = torch.nn.Parameter(mixer.wo.weight.chunk(2, 1)[half])
        parts.append(run(part, rope, x_BSD, context))
    assert torch.allclose(parts[0] + parts[1], whole, atol=1e-6)


@pytest.mark.parametrize(
    "fields,words",
    [({"heads": 0}, "mla.heads"), ({"rope_dim": 3}, "odd"), ({"q_rank": 0}, "mla.q_rank"), ({"kv_rank": -1}, "mla.kv_rank")],
)
def test_impossible_settings_are_refused(fields, words):
    with pytest.raises(UsageError, match=words):
        MLAConfig(**{"heads": 2, "kv_rank": 4, "nope_dim": 4, "rope_dim": 4, "value_dim": 4, **fields})


def test_a_norm_of_ones_own():
    mixer, _ = make(norm=RMSNormConfig(eps=1e-3))
    assert mixer.kv_norm.eps == mixer.q_norm.eps == 1e-3


@pytest.mark.parametrize("widths", [(24, 16), (16, 24)])
@pytest.mark.parametrize("packed", [False, True])
def test_the_kernel_takes_values_of_another_width(widths, packed):
    choice = current().target(next(entry for entry in current().registry("kernel").entries() if entry.name == "sdpa"))
    keys, values = widths
    context = packed_context(((3, 4, 5),)) if packed else packed_context(((12,),))
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1, 12, 2, width, generator=generator, requires_grad=True) for width in (keys, keys, values)]
    settings = {"scale": 0.3, "documents_q_BS": context.documents_BS, "documents_k_BT": context.documents_BS, "packing": context.packing}
    results = []
    for function in (ops.attention.reference, choice):
        assert getattr(function, "supports", lambda *a, **k: None)(*tensors, **settings) is None
        y = function(*tensors, **settings)
        assert y.shape == (1, 12, 2, values)
        results.append([y, *torch.autograd.grad((y * torch.arange(values)).sum(), tensors)])
    for one, other in zip(*results, strict=True):
        assert (one - other).abs().max() <= 1e-5 * other.abs().max()
    wide = [torch.zeros(1, 1, 1, width) for width in (576, 576, 512)]
    assert "256" in choice.supports(*wide)


def test_flops_follow_the_sheet():
    mixer, _ = make()
    # 2 H (192 + 128) S_eff a token and layer, S_eff the average of 1 .. S
    assert mixer.mixing_flops_per_token(100) == pytest.approx(2 * 4 * (12 + 6) * (101 / 2))
    assert math.isclose(mixer.mixing_flops_per_token(1), 2 * 4 * 18)
