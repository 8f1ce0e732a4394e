"""Roles on plain modules: n ranks, as threads, give what one gives, every gradient by name; what cannot be cut is refused with the numbers."""

from __future__ import annotations

import dataclasses

import chz
import pytest
import torch
from intarsia import logical, ops
from intarsia.contracts import IGNORE
from intarsia.errors import PluginError, UsageError
from intarsia.layout import slices, whole_region
from intarsia.mesh import Mesh
from intarsia.parameters import ParameterTable, materialise_buffers
from intarsia_eager.context import TrainContext
from intarsia_float8.format import quantise
from intarsia_llama3.config import llama3
from intarsia_llama3.model import Llama3
from intarsia_llama3.sharding import TABLE
from intarsia_models_common.build import Linear
from intarsia_models_common.config import AttentionConfig, RMSNormConfig
from intarsia_parallel import apply as declared
from intarsia_parallel import overlap, table
from intarsia_parallel.collectives import even_counts, gather
from intarsia_parallel.config import DeclaredConfig
from intarsia_parallel.cuts import EvenCut, local_box
from intarsia_parallel.roles.attention_heads import kv_heads_of
from intarsia_testing.communicator import run_ranks
from torch import nn

SIZES = {"dim": 24, "layers": 2, "heads": 6, "kv_heads": 2, "head_dim": 4, "hidden": 26, "vocab_size": 29, "embedding_std": 0.5}


@dataclasses.dataclass
class Recipe:
    """What the paralleliser reads of a recipe."""

    model: object


def config_of(attention=None, **changes):
    config = llama3(**{**SIZES, **changes})
    if attention is not None:
        kept = {name: getattr(config.layers[0].attention, name) for name in ("heads", "kv_heads", "head_dim")}
        block = chz.replace(config.layers[0], attention=AttentionConfig(**{**kept, **attention}))
        config = chz.replace(config, layers=(block,) * len(config.layers))
    return config


def built(config, comm=None, rows=TABLE, adjust=None, **settings):
    """A filled model, whole or this rank's part; the boxes that it holds; its paralleliser's product."""
    with torch.device("meta"):
        model = Llama3(config)
    if adjust is not None:
        adjust(model)
    parameters = ParameterTable.from_model(model, seed=4)
    parallel, mesh = None, None
    if comm is not None:
        mesh = Mesh({"tp": comm.size}, comm)
        parallel = declared.build(DeclaredConfig(**settings)).apply(model, parameters, mesh, Recipe(config), rows)
    modules, boxes = dict(model.named_modules()), {}
    for name, info in parameters.items():
        region = whole_region(info.shape)
        if info.outer:
            region = (local_box(name, info.shape, tuple((axis, placement) for axis, _, placement in info.outer), mesh),)
        values = torch.empty(region[0].size)
        parameters.fill(name, region, values)
        if info.init.kind == "zeros":  # They would hide what is wrong with biases and sinks.
            whole = 0.01 * (torch.arange(torch.Size(info.shape).numel()) % 7).view(info.shape)
            values = whole[slices(region[0])].clone()
        boxes[name] = region[0]
        parameter = nn.Parameter(values, requires_grad=info.trainable)
        for alias in info.names:
            owner, _, attribute = alias.rpartition(".")
            setattr(modules[owner], attribute, parameter)
    materialise_buffers(model, torch.device("cpu"), 0)
    return model, parameters, boxes, parallel


def step(model, length=7, rows=2, vocabulary=29):
    """Loss, logits and gradients by canonical name."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, vocabulary, (rows, length), generator=generator)
    labels = tokens.roll(-1, 1)
    labels[0, 0] = IGNORE
    hidden = model(tokens, TrainContext(torch.arange(length).expand(rows, length)))
    cross_entropy = getattr(model, "cross_entropy", ops.cross_entropy)
    loss = cross_entropy(hidden.flatten(0, 1), model.head_weight_VD, labels.flatten(), chunk=5)
    loss.backward()
    with torch.no_grad():
        logits = model.project(hidden)
    return float(loss.detach()), logits, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def check_equal(config, size, length=7, prepare=lambda model, parameters, boxes: None, **settings):
    """Everything of `size` ranks against one; returns the ranks' models. `prepare(model, parameters, boxes)` is called with each model that is filled."""
    one, parameters, one_boxes, _ = built(config, adjust=settings.get("adjust"))
    prepare(one, parameters, one_boxes)
    loss, logits, gradients = step(one, length, vocabulary=config.vocab_size)

    def work(comm):
        model, mine, boxes, parallel = built(config, comm, **settings)
        prepare(model, mine, boxes)
        return model, boxes, parallel, step(model, length, vocabulary=config.vocab_size)

    results = run_ranks(size, work)
    for _, _, _, (ours, ours_logits, _) in results:
        assert ours == pytest.approx(loss, rel=1e-5)
        assert torch.allclose(ours_logits, logits, rtol=1e-4, atol=1e-5)
    for name in parameters:
        trainable = parameters[name].trainable
        assert all((name in mine) == trainable for _, _, _, (_, _, mine) in results), name
        if trainable:
            whole = torch.zeros_like(gradients[name])
            for _, boxes, _, (_, _, mine) in results:
                whole[slices(boxes[name])] += mine[name]
            assert (whole - gradients[name]).abs().max() <= 1e-5 * gradients[name].abs().max(), name
    return [(model, parallel) for model, _, parallel, _ in results]


@pytest.mark.parametrize(
    ("size", "length", "changes"),
    [
        (2, 7, {}),
        (3, 7, {}),  # 2 key/value heads over 3 ranks, 29 ids, 26 hidden: nothing comes out even
        (3, 2, {}),  # a rank without tokens
        (4, 9, {"heads": 8}),  # tp above the key/value heads
        (2, 8, {"tied": True}),
        (3, 8, {"kv_heads": 6}),
        (6, 5, {}),
    ],
)
def test_every_gradient_equals_one_process(size, length, changes):
    check_equal(config_of(**changes), size, length)


@pytest.mark.parametrize("size", [2, 3])
def test_biases_sinks_and_head_norms(size):
    attention = {"bias": True, "sinks": True, "qk_norm": RMSNormConfig(), "window": 4}

    def with_output_bias(model):
        for layer in model.layers:
            layer.attention.wo = Linear(layer.attention.wo.in_features, 24, 0.02, bias=True)

    for model, parallel in check_equal(config_of(attention), size, adjust=with_output_bias):
        assert model.layers[0].attention.sinks.shape == (6 // size,)
        assert parallel.roles["layers.0.attention.sinks"] == "attention_heads"


def test_frozen_parameters_stay_frozen_and_the_rest_is_equal():
    def freeze(model):
        model.tok_embeddings.weight.requires_grad_(False)
        model.layers[0].attention.wk.weight.requires_grad_(False)
        model.layers[1].feed_forward.w2.weight.requires_grad_(False)

    check_equal(config_of(), 2, adjust=freeze)


def test_what_a_module_says_of_itself_is_about_this_rank():
    for (model, _), heads in zip(check_equal(config_of(), 3), (1, 2, 1), strict=True):
        attention = model.layers[0].attention
        assert attention.cache_spec().caches[0].shape == (heads, 4)
        assert attention.wk.weight.shape == (8, 24), "whole: its heads cannot be shared out"
        assert attention.wq.out_features == 8 and attention.wo.in_features == 8
        assert attention.mixing_flops_per_token(16) == pytest.approx(4 * 8 * 8.5)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks", "expected"),
    [
        (6, 2, 3, [[0], [0, 1], [1]]),
        (8, 2, 4, [[0], [0], [1], [1]]),
        (12, 4, 3, [[0, 0, 0, 1], [1, 1, 2, 2], [2, 3, 3, 3]]),
    ],
)
def test_which_key_value_heads_a_rank_makes(heads, kv_heads, ranks, expected):
    found = run_ranks(ranks, lambda comm: kv_heads_of(heads, kv_heads, comm))
    # Equal shares are made once; where shares differ, one for each query head.
    assert found == [[1, 2] if each == [1, 1, 2, 2] else each for each in expected]


def test_the_whole_vocabulary_on_every_rank():
    rows = [(pattern, role, {"whole": True}) if role == "vocab" else (pattern, role) for pattern, role in TABLE]
    for model, _ in check_equal(config_of(tied=True), 3, rows=rows):
        assert model.head.weight.shape == (29, 24)


def test_replicated_and_gathering_roles():
    """The feed-forward layer computed by all; queries and keys by projections that gather for themselves."""
    rows = [(pattern, role) for pattern, role in TABLE if "feed_forward." not in pattern and not pattern.endswith("feed_forward")]
    gathers = {"attention": False, "wq": True, "wk": True, "wv": True}
    rows = [(p, r, {"gather": gathers[p.split(".")[-1]]}) if p.split(".")[-1] in gathers else (p, r) for p, r in rows]
    check_equal(config_of(), 2, rows=[*rows, ("layers.*.feed_forward", "replicated")])


TILE = (4, 4)


def as_float8(model, parameters, boxes):
    """What a sharder that gathers float8 leaves: payload and scales of this rank's box beside each projection's weight, which has no values."""
    for name, module in model.layers.named_modules():
        if isinstance(module, Linear):
            full = f"layers.{name}.weight"
            info, box = parameters[full], boxes[full]
            whole = torch.empty(info.shape)
            parameters.fill(full, whole_region(info.shape), whole)
            payload, scales = quantise(whole, TILE)
            rows, columns = (slice(a // 4, b // 4) for a, b in zip(box.start, box.end, strict=True))
            module.weight_payload, module.weight_scales, module.weight_tile = payload[slices(box)], scales[rows, columns], TILE
            with torch.no_grad():
                module.weight.fill_(torch.nan)


@pytest.mark.parametrize("async_tensor", [False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_projections_that_come_as_float8(size, async_tensor, monkeypatch):
    """Columns, rows with and without bias, and sliced key/value heads multiply by the payload, and their gradients go to the weight; overlap stands back."""
    monkeypatch.setattr(declared, "products_of", lambda comm, device: overlap.Decomposed(comm))

    def with_output_bias(model):
        for layer in model.layers:
            layer.attention.wo = Linear(layer.attention.wo.in_features, 24, 0.02, bias=True)

    config = config_of({"bias": True}, hidden=24)
    check_equal(config, size, adjust=with_output_bias, prepare=as_float8, async_tensor=async_tensor)


@pytest.mark.parametrize("size", [2, 3])
def test_overlapped_products_are_the_same(size, monkeypatch):
    calls = []

    class Counted(overlap.Decomposed):
        def gather_products(self, *arguments):
            calls.append(len(arguments[1]))
            return super().gather_products(*arguments)

    monkeypatch.setattr(declared, "products_of", lambda comm, device: Counted(comm))
    check_equal(config_of({"bias": True}), size, async_tensor=True)
    # Forward: attention's columns and the feed-forward layer's two; backward: one for each row. Keys and values are no plain columns where they are sliced.
    assert sorted(set(calls)) == ([1, 2, 3] if size == 2 else [1, 2])


def test_overlap_without_the_operators_is_refused():
    with pytest.raises(UsageError, match=r"parallel.async_tensor needs torch's symmetric-memory operators .* this run is on cpu"):
        run_ranks(2, lambda comm: built(config_of(), comm, async_tensor=True))


def test_logical_sums_span_the_ranks():
    def work(comm):
        built(config_of(), comm)
        x = torch.ones((), requires_grad=True)
        total = logical.sum(x * (comm.rank + 1), ("sequence",))
        total.backward()
        with logical.micro_batch(1.0) as sums:
            logical.record("load", torch.tensor(float(comm.rank)))
        ranks = logical.ranks(("sequence", "batch"))
        logical.reset()
        return float(total.detach()), float(x.grad), ranks, float(sums["load"])

    assert run_ranks(2, work) == [(3.0, 2.0, 2, 1.0), (3.0, 4.0, 2, 1.0)]


# ---------------------------------------------------------------- what is refused


def refused(rows=TABLE, size=2, config=None, adjust=None, **settings):
    with pytest.raises(UsageError) as caught:
        run_ranks(size, lambda comm: built(config or config_of(), comm, rows, adjust, **settings))
    return str(caught.value)


def test_heads_that_do_not_divide_tell_the_nearest_degrees():
    message = refused(size=4)
    assert (
        "layers.0.attention has 6 query heads, which tp=4 does not divide. The nearest degrees that do: 3 or 6. (1 more alike)" in message
    )


def test_all_problems_are_told_together():
    rows = [(pattern.replace("w3", "w9"), role) for pattern, role in TABLE]
    message = refused([*rows, ("norm", "sequenced"), ("norm", "sequence", {"gathers": True}), ("layers.*.drop?", "sequence")], size=4)
    assert "'layers.*.feed_forward.w9' (column) names a module that Llama3 does not have. Did you mean 'layers.*.feed_forward.w" in message
    assert "unknown role 'sequenced'. Did you mean 'sequence'?" in message
    assert "the role 'sequence' has no setting 'gathers'. Did you mean 'gather'?" in message
    assert "6 query heads" in message
    assert "drop" not in message


def test_a_region_that_nothing_ends_and_a_module_without_a_role():
    message = refused([row for row in TABLE if row[1] != "row"])
    assert "layers.0.attention (attention_heads) sees all tokens, and nothing inside ends that" in message
    message = refused([row for row in TABLE if row[0] not in ("norm", "layers.*.attention_norm")])
    assert "no row says what layers.0.attention_norm, layers.1.attention_norm, norm with parameters do under tp=2" in message
    message = refused([*(row for row in TABLE if row[0] != "head"), ("head", "sequence")])
    assert "Give it the role vocab" in message


def test_a_family_without_a_table_and_a_row_that_is_none():
    assert "needs a sharding table, and the family of Llama3 has none" in refused(None)
    assert "Row 0 of the sharding table of Llama3 is ('head',)" in refused([("head",)])


def test_a_parameter_cannot_be_cut_twice():
    message = refused([*TABLE, ("layers.*.feed_forward.w1", "row")])
    assert "layers.0.feed_forward.w1.weight is cut twice over tp" in message


def test_a_role_on_the_wrong_sort_of_module():
    assert "norm has the role column, which is for nn.Linear" in refused([*TABLE, ("norm", "column")])
    message = refused(
        [("layers.*.attention", "attention_heads", {"queries": "wx"}) if row[1] == "attention_heads" else row for row in TABLE]
    )
    assert "whose setting queries names 'wx'; Attention has no such module. Known: wk, wo, wq, wv." in message


def test_experts_on_a_mesh_without_any():
    def work(comm):
        with torch.device("meta"):
            model = Llama3(config_of())
        parameters = ParameterTable.from_model(model)
        declared.build(DeclaredConfig()).apply(model, parameters, Mesh({"dp_shard": 2, "ep": 2}, comm), Recipe(config_of()), TABLE)

    with pytest.raises(UsageError, match="no row cuts anything over ep"):
        run_ranks(2, work)


def test_a_tensor_that_is_not_this_ranks_part():
    def work(comm):
        model, _, _, _ = built(config_of(), comm)
        step(model)
        model.layers[0].feed_forward(torch.ones(2, 7, 24))

    with pytest.raises(
        PluginError, match=r"layers.0.feed_forward: a tensor of shape \(2, 7, 24\) came in, but this rank's part of 7 tokens"
    ):
        run_ranks(2, work)


def test_a_role_of_somebody_elses(monkeypatch):
    """A third party's role cuts, checks and wraps by the same three methods."""
    seen = []

    class Halved:
        def check(self, name, module, sizes):
            seen.append(("check", name, sizes["tp"]))

        def cut(self, name, module, sizes):
            return {"weight": ("tp", EvenCut(0))}

        def apply(self, name, module, groups):
            comm = groups("tp")
            seen.append(("apply", name, comm.size))
            module.forward = lambda x: ops.rms_norm(x, gather(module.weight, 0, even_counts(24, comm.size), comm), module.eps)

    real = table.build_role
    monkeypatch.setattr(table, "build_role", lambda name, settings: Halved() if name == "acme:halved" else real(name, settings))
    rows = [("norm", "acme:halved") if row[0] == "norm" else row for row in TABLE]
    for model, parallel in check_equal(config_of(), 2, rows=rows):
        assert model.norm.weight.shape == (12,)
        assert parallel.roles["norm.weight"] == "acme:halved"
    assert ("check", "norm", 2) in seen and ("apply", "norm", 2) in seen
