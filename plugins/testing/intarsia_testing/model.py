"""Conformance of model families. Subclass, name your entry, give a tiny config, run pytest; a failure says which promise is broken, in words.

    class TestMine(ModelConformance):
        entry = "my-distribution:mine"

        def config(self):
            return MineConfig(vocab_size=96, dim=32, max_positions=64, ...)

The promises are those of `intarsia.contracts.Model` and of DESIGN: one device, no knowledge of parallelism, documents never see each other.
Shape suffixes: B rows, S tokens, D model width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from intarsia import ops
from intarsia.config import ModelConfig
from intarsia.contracts import Batch, Box, Entry, Mixer, ModelEntry
from intarsia.errors import PluginError
from intarsia.layout import whole_region
from intarsia.parameters import ParameterTable, fill_region, persistent_buffers
from intarsia.plugins import current, import_reference
from intarsia_eager.context import TrainContext
from intarsia_eager.following import FOLLOWING, with_following
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from intarsia_testing.base import Conformance
from intarsia_testing.promise import broken, keep

LENGTHS = ((5, 1, 10), (16,), (2, 14))
"""Documents of the test batch: three rows of 16 tokens, one of them with a single document."""


class RecordingContext(TrainContext):
    """A TrainContext that notes which mixer asked for which kind, and the shapes of keys and values."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.calls: dict[str, tuple[str, tuple[tuple[int, ...], ...]]] = {}
        self.states: dict[str, list[str]] = {}

    def softmax(self, mixer: str, q_BSHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, **settings: Any) -> Tensor:
        """Note, then attend."""
        self.calls[mixer] = ("softmax", (tuple(k_BSKD.shape[2:]), tuple(v_BSKD.shape[2:])))
        return super().softmax(mixer, q_BSHD, k_BSKD, v_BSKD, **settings)

    def latent(self, mixer: str, latent_BSC: Tensor, attend: Any, **settings: Any) -> Tensor:
        """Note, then attend."""
        self.calls[mixer] = ("latent", (tuple(latent_BSC.shape[2:]),))
        return super().latent(mixer, latent_BSC, attend, **settings)

    def recurrent(self, mixer: str, cache: str, update: Any, *inputs: Tensor, **settings: Any) -> Tensor:
        """Note, with the names of the states, then run."""
        self.calls[mixer] = ("recurrent", ())
        self.states.setdefault(mixer, []).append(cache)
        return super().recurrent(mixer, cache, update, *inputs, **settings)

    def indexed(self, mixer: str, *inputs: Tensor, **settings: Any) -> Tensor:
        """Note, then attend."""
        self.calls[mixer] = ("indexed", ())
        return super().indexed(mixer, *inputs, **settings)


def documents_of(lengths: tuple[tuple[int, ...], ...]) -> Tensor:
    """int32 document numbers of rows that pack documents of these lengths."""
    rows = [torch.cat([torch.full((n,), i, dtype=torch.int32) for i, n in enumerate(row)]) for row in lengths]
    return torch.stack(rows)


def positions_of(documents_BS: Tensor) -> Tensor:
    """int64 positions that restart where the document number changes along a row."""
    index_S = torch.arange(documents_BS.shape[1], device=documents_BS.device)
    starts_BS = torch.zeros_like(documents_BS, dtype=torch.bool)
    starts_BS[:, 1:] = documents_BS[:, 1:] != documents_BS[:, :-1]
    return index_S - torch.where(starts_BS, index_S, 0).cummax(1).values


def packed_context(lengths: tuple[tuple[int, ...], ...], extra: Mapping[str, Any] | None = None) -> TrainContext:
    """The context of rows that pack documents of these lengths; `extra` is what a loader adds."""
    documents_BS = documents_of(lengths)
    return TrainContext(positions_of(documents_BS), documents_BS, lengths, extra=extra)


def following_of(model: nn.Module, tokens_BS: Tensor, lengths: tuple[tuple[int, ...], ...]) -> Tensor | None:
    """The tokens further on, [B, S, K], for a model that predicts so far ahead."""
    depth = int(getattr(model, "predicts_ahead", 0))  # type: ignore[arg-type]
    documents_BS = documents_of(lengths)
    batch = Batch(tokens_BS, tokens_BS, positions_of(documents_BS), documents_BS, lengths)
    return with_following(batch, depth).extra.get(FOLLOWING) if depth else None


def predictions(
    model: Any, tokens_BS: Tensor, lengths: tuple[tuple[int, ...], ...], extra: Mapping[str, Any] | None = None
) -> tuple[Tensor, ...]:
    """The hidden states that predict the next token of packed documents, then those of each depth further ahead."""
    context = packed_context(lengths, extra)
    context.following_BSK = following_of(model, tokens_BS, lengths)
    hidden = model(tokens_BS, context)
    return hidden if isinstance(hidden, tuple) else (hidden,)


def outputs(model: Any, tokens_BS: Tensor, lengths: tuple[tuple[int, ...], ...], extra: Mapping[str, Any] | None = None) -> Tensor:
    """All `predictions`, one behind the other along the width."""
    return torch.cat(predictions(model, tokens_BS, lengths, extra), -1)


def fill(model: nn.Module, seed: int = 0, std: float | None = None) -> nn.Module:
    """Fill a model's parameters as a run does: by the ParameterTable, from the seed and their names alone. `std` adds noise of that size, so that
    nothing is hidden by weights that start at zero or one."""
    table = ParameterTable.from_model(model)
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            table.fill(name, (Box.whole(tuple(parameter.shape)),), parameter.data.view(-1), seed)
            if std is not None:
                parameter.add_(std * torch.randn(parameter.shape, generator=noise))
        inits = model.inits()  # type: ignore[operator]
        for name, buffer in model.named_buffers():
            if name in inits:
                fill_region(name, buffer.shape, inits[name], whole_region(buffer.shape), buffer, seed)
    model.fill_buffers()  # type: ignore[operator]
    return model


class ModelConformance(Conformance):
    """Every promise of a model family, one test each.

    Set `entry`, override `config`. `tolerance` bounds differences of hidden states, relative to their largest element, where the same numbers are
    computed in another shape.
    """

    kind: ClassVar[str] = "model"
    tolerance: ClassVar[float] = 2e-5

    def config(self) -> ModelConfig:
        """A tiny config that uses what the family has (more than one block, every kind of component). At most a few 100,000 parameters."""
        raise NotImplementedError("write `config`: a tiny config of your family for its conformance tests.")

    def media(self) -> Mapping[str, Any]:
        """What a loader adds to a batch of `LENGTHS` with images, for a model that sees: `patches_NC`, `grids`, `visual_BS`, and `positions_3BS` where it has such. Nothing: it reads text."""
        return {}

    # ------------------------------------------------------------ help

    def found_entry(self) -> ModelEntry:
        """The entry under test."""
        found = super().found_entry()
        assert isinstance(found, ModelEntry)
        return found

    def light_references(self, entry: Entry) -> list[str]:
        """The Hugging Face table, the sharding table and the recipes too."""
        assert isinstance(entry, ModelEntry)
        recipes = [other.target for other in current().registry("recipe").entries() if other.owner == entry.owner]
        return [reference for reference in (entry.hf, entry.sharding, *recipes) if reference]

    def _model(self, seed: int = 0, std: float | None = 0.02) -> Any:
        try:
            return fill(current().build(self.config()), seed, std)
        except PluginError as error:
            broken("parameters", f"a run cannot fill the model's parameters: {error}")

    def _tokens(self) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        return torch.randint(0, self.config().vocab_size, (len(LENGTHS), sum(LENGTHS[0])), generator=generator)

    def _close(self, promise: str, one: Tensor, other: Tensor, sentence: str) -> None:
        error = float((one - other).abs().max() / other.abs().max().clamp_min(1e-30))
        keep(promise, error <= self.tolerance, f"{sentence} (relative difference {error:.2e}, allowed {self.tolerance:.0e}).")

    # ------------------------------------------------------------ the entry

    def test_settings_belong_to_the_entry(self) -> None:
        """`config()` gives settings of this family and no other."""
        self.given_configs()

    def test_builds_on_the_meta_device(self) -> None:
        """Built under the meta device, then allocated and filled, it is the same model as one built on the CPU."""
        with torch.device("meta"):
            model: Any = current().build(self.config())
        heavy = [name for name, parameter in model.named_parameters() if parameter.device.type != "meta"]
        keep("meta", not heavy, f"built under the meta device, {heavy[:3]} are not on it: give parameters no explicit device.")
        real = self._model()
        shapes = [{name: tuple(p.shape) for name, p in m.named_parameters()} for m in (model, real)]
        keep("meta", shapes[0] == shapes[1], "parameters' names or shapes differ between the meta device and the CPU.")
        model.to_empty(device="cpu")
        kept = model.state_dict()
        for name, buffer in model.named_buffers():
            # Memory that was just freed may hold the right numbers by chance.
            if name not in kept and buffer.is_floating_point():
                buffer.fill_(math.nan)
        ties = model.regions().ties
        for canonical, *others in ties:
            for other in others:
                _set_parameter(model, other, model.get_parameter(canonical))
        fill(model, 0, 0.02)
        hidden = [outputs(m, self._tokens(), LENGTHS) for m in (model, real)]
        keep(
            "buffers",
            torch.equal(*hidden),
            "after the meta device its outputs differ: `fill_buffers()` must recompute every non-persistent buffer.",
        )

    # ------------------------------------------------------------ parameters

    def test_every_parameter_has_an_init(self) -> None:
        """`inits()` names exactly the parameters (and buffers that are drawn), by canonical name."""
        model: Any = current().build(self.config())
        inits, names = model.inits(), [name for name, _ in model.named_parameters()]
        missing = [name for name in names if name not in inits]
        keep("inits", not missing, f"`inits()` does not say how {missing[:3]} start.")
        known = set(names) | {name for name, _ in model.named_buffers()}
        extra = [name for name in inits if name not in known]
        keep("inits", not extra, f"`inits()` names {extra[:3]}, which are no parameters or buffers; ties go by their canonical name.")
        flat = [name for name, init in inits.items() if init.kind == "normal" and not 0 < init.std < math.inf]
        keep("inits", not flat, f"the normal init of {flat[:3]} has no positive std.")

    def test_same_seed_same_bits(self) -> None:
        """Initial values are a function of the seed and the name alone."""
        one, again, other = (dict(self._model(seed, None).named_parameters()) for seed in (3, 3, 4))
        changed = [name for name in one if not torch.equal(one[name], again[name])]
        keep("seed", not changed, f"the same seed gave {changed[:3]} other bits: the constructor or `fill_buffers` changes parameters.")
        drawn = [name for name, init in self._model().inits().items() if init.kind == "normal"]
        keep("seed", not drawn or any(not torch.equal(one[name], other[name]) for name in drawn), "another seed gave the same weights.")

    def test_regions_are_real(self) -> None:
        """`regions()` names modules that exist, blocks in order without overlap, and ties that share storage."""
        model = self._model()
        regions = model.regions()
        modules = dict(model.named_modules())
        unknown = [name for name in (*regions.blocks, *regions.compile) if name not in modules]
        keep("regions", not unknown, f"`regions()` names {unknown[:3]}, which are no modules.")
        keep("regions", regions.blocks, "`regions()` declares no block: nothing could be sharded, recomputed or cut by units.")
        nested = [b for a in regions.blocks for b in regions.blocks if b.startswith(a + ".")]
        keep("regions", not nested and len(set(regions.blocks)) == len(regions.blocks), f"blocks overlap: {nested[:3]}.")
        seen: list[str] = []
        hooks = [modules[name].register_forward_hook(lambda *_, name=name: seen.append(name)) for name in regions.blocks]
        predictions(model, self._tokens(), LENGTHS, self.media())
        for hook in hooks:
            hook.remove()
        keep(
            "regions",
            seen == list(regions.blocks),
            f"blocks are declared in the order {regions.blocks[:4]} and run in the order {seen[:4]}.",
        )
        listed = {name for name, _ in model.named_parameters()}
        for canonical, *others in regions.ties:
            keep("ties", canonical in listed, f"the first name of a tie, {canonical}, must be the one that `named_parameters()` gives.")
            for other in others:
                same = model.get_parameter(other).data_ptr() == model.get_parameter(canonical).data_ptr()
                keep("ties", same, f"{other} is declared to be tied to {canonical} and does not share its storage.")
        hidden_ties = [name for name, _ in model.named_parameters(remove_duplicate=False) if name not in listed]
        declared = {name for tie in regions.ties for name in tie}
        keep(
            "ties",
            set(hidden_ties) <= declared,
            f"{hidden_ties[:3]} share another parameter's storage and `regions().ties` does not say so.",
        )

    # ------------------------------------------------------------ the mathematics

    def test_documents_do_not_see_each_other(self) -> None:
        """Packed documents give what each gives alone."""
        model, tokens_BS = self._model(), self._tokens()
        with torch.no_grad():
            packed_BSD = outputs(model, tokens_BS, LENGTHS)
            for b, row in enumerate(LENGTHS):
                start = 0
                for length in row:
                    alone = outputs(model, tokens_BS[b : b + 1, start : start + length], ((length,),))
                    sentence = f"document of {length} tokens at {start} in row {b} gives other hidden states packed than alone: positions must restart and mixers must stop at its start"
                    self._close("packing", packed_BSD[b : b + 1, start : start + length], alone, sentence)
                    start += length

    def test_no_token_sees_the_future(self) -> None:
        """Changing a token changes nothing before it, and something from it on."""
        model, tokens_BS = self._model(), self._tokens()[1:2]
        changed_BS = tokens_BS.clone()
        changed_BS[:, 9] = (changed_BS[:, 9] + 1) % self.config().vocab_size
        with torch.no_grad():
            one, other = (model(t, packed_context((LENGTHS[1],))) for t in (tokens_BS, changed_BS))
        self._close("causal", one[:, :9], other[:, :9], "a token's hidden state depends on later tokens")
        keep("causal", not torch.equal(one[:, 9], other[:, 9]), "a token's hidden state does not depend on the token itself.")
        keep(
            "causal",
            not torch.equal(one[:, 15], other[:, 15]),
            "the last token's hidden state does not depend on one six tokens before: nothing mixes along the sequence.",
        )

    def test_rows_are_independent(self) -> None:
        """A row gives the same alone and in a batch."""
        model, tokens_BS = self._model(), self._tokens()
        with torch.no_grad():
            all_BSD = outputs(model, tokens_BS, LENGTHS)
            for b, row in enumerate(LENGTHS):
                self._close(
                    "rows",
                    all_BSD[b : b + 1],
                    outputs(model, tokens_BS[b : b + 1], (row,)),
                    f"row {b} depends on the other rows of its batch",
                )

    def test_loss_of_hidden_is_loss_of_logits(self) -> None:
        """`head_weight_VD` is what `project` multiplies by."""
        model, tokens_BS = self._model(), self._tokens()
        with torch.no_grad():
            hidden_BSD = model(tokens_BS, packed_context(LENGTHS))
            logits_BSV = model.project(hidden_BSD)
            shape = (*tokens_BS.shape, self.config().vocab_size)
            keep("head", tuple(logits_BSV.shape) == shape, f"`project` gives {tuple(logits_BSV.shape)} and not [B, S, V] = {shape}.")
            softcap = getattr(model, "logits_softcap", None)
            chunked = ops.cross_entropy(hidden_BSD.flatten(0, 1), model.head_weight_VD, tokens_BS.flatten(), softcap=softcap, chunk=7)
            whole = nn.functional.cross_entropy(logits_BSV.flatten(0, 1).float(), tokens_BS.flatten(), reduction="sum")
        self._close("head", chunked, whole, "the loss from hidden states and `head_weight_VD` is not the loss of `project`'s logits")

    def test_every_parameter_gets_a_gradient(self) -> None:
        """Backward reaches every trainable parameter, with finite numbers."""
        model, tokens_BS = self._model(), self._tokens()
        labels_N = tokens_BS.roll(-1, 1).flatten()
        hidden = predictions(model, tokens_BS, LENGTHS, self.media())
        torch.stack([ops.cross_entropy(each.flatten(0, 1), model.head_weight_VD, labels_N) for each in hidden]).sum().backward()
        trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        unused = [name for name, p in trainable.items() if p.grad is None]
        keep("gradients", not unused, f"{unused[:3]} get no gradient: they are not used, or cut off.")
        broken_ones = [name for name, p in trainable.items() if p.grad is not None and not p.grad.isfinite().all()]
        keep("gradients", not broken_ones, f"the gradients of {broken_ones[:3]} are not finite.")
        dead = [name for name, p in trainable.items() if p.grad is not None and not p.grad.any()]
        keep("gradients", not dead, f"the gradients of {dead[:3]} are all zero.")

    def test_no_images_is_a_batch_too(self) -> None:
        """Where the loader says that there are images, and here there are none, every parameter gets a gradient nevertheless: ranks with images and ranks without make the same calls."""
        media, tokens_BS = dict(self.media()), self._tokens()
        if not media:
            return
        model, text = self._model(), {name: value for name, value in media.items() if name == "positions_3BS"}
        patches_NC, visual_BS = media["patches_NC"], media["visual_BS"]
        seen_BSD = outputs(model, tokens_BS, LENGTHS, media)
        none = {**text, "patches_NC": patches_NC[:0], "grids": (), "visual_BS": torch.full_like(visual_BS, -1)}
        blind_BSD = outputs(model, tokens_BS, LENGTHS, none)
        self._close(
            "media", blind_BSD.detach(), outputs(model, tokens_BS, LENGTHS, text).detach(), "no images give something else than text alone"
        )
        keep("media", not torch.equal(seen_BSD, blind_BSD), "images change nothing.")
        blind_BSD.sum().backward()
        heads = (model.head_weight_VD,)
        unused = [
            name for name, p in model.named_parameters() if p.requires_grad and p.grad is None and not any(p is head for head in heads)
        ]
        keep("media", not unused, f"without images {unused[:3]} get no gradient: tie the features' sum, times 0, to the result.")

    def test_runs_in_bfloat16(self) -> None:
        """Cast to bfloat16, hidden states are bfloat16 and near the float32 ones."""
        model, tokens_BS = self._model(), self._tokens()
        with torch.no_grad():
            exact = outputs(model, tokens_BS, LENGTHS)
            rough = outputs(model.bfloat16(), tokens_BS, LENGTHS)
        keep(
            "dtype",
            rough.dtype == torch.bfloat16,
            f"parameters are bfloat16 and hidden states {rough.dtype}: something changes the residual stream's dtype.",
        )
        error = float((rough.float() - exact).norm() / exact.norm())
        keep(
            "dtype",
            error < 0.05,
            f"in bfloat16 hidden states are off by {error:.3f} relative (norm): keep statistics, softmax and angles in float32.",
        )

    # ------------------------------------------------------------ declarations

    def test_mixers_declare_their_caches(self) -> None:
        """Whatever calls the context is a module of that name with a `cache_spec` that fits."""
        model, documents_BS = self._model(), documents_of(LENGTHS)
        following_BSK = following_of(model, self._tokens(), LENGTHS)
        context = RecordingContext(positions_of(documents_BS), documents_BS, LENGTHS, (None,), following_BSK)
        model(self._tokens(), context)
        keep(
            "mixers",
            context.calls,
            "no mixer called the context: mixing along the sequence must go through it, so that generation and context parallelism can supply theirs.",
        )
        modules = dict(model.named_modules())
        for name, (kind, shapes) in context.calls.items():
            module = modules.get(name)
            keep(
                "mixers",
                isinstance(module, Mixer),
                f"the context was called as mixer {name!r}, which is no module with `cache_spec()`. Pass the module's dotted name.",
            )
            spec = module.cache_spec()  # type: ignore[union-attr]
            keep("mixers", spec.kind == kind, f"{name} declares kind {spec.kind!r} and calls {kind!r}.")
            keep("mixers", spec.caches, f"{name} declares no cache, so that generation could not keep its past.")
            names = [cache.name for cache in spec.caches]
            keep("mixers", len(set(names)) == len(names), f"{name} declares two caches of one name: {names}.")
            if kind == "recurrent":
                declared_states = sorted(cache.name for cache in spec.caches if cache.storage == "state")
                keep(
                    "mixers",
                    sorted(context.states[name]) == declared_states,
                    f"{name} declares states {declared_states} and calls `recurrent` for {sorted(context.states[name])}: once for each in a forward pass.",
                )
            if kind == "softmax":
                declared = tuple(tuple(cache.shape) for cache in spec.caches)
                keep("mixers", declared == shapes, f"{name} declares caches {declared} and gives keys and values {shapes} for a token.")

    def test_flops_are_near_a_count(self) -> None:
        """`flops_per_token` is what torch counts for forward and backward, half of it for what causal attention leaves out."""
        model, tokens_BS = self._model(), self._tokens()
        tokens = tokens_BS.shape[1]
        claimed = model.flops_per_token(tokens)
        keep("flops", claimed > 0, f"`flops_per_token({tokens})` is {claimed}.")
        reference = {name: ops.Choice("reference", "counting") for name in ops.operators()}
        with ops.installed(reference), FlopCounterMode(display=False) as counter:
            hidden = predictions(model, tokens_BS, ((tokens,),) * len(LENGTHS))
            torch.stack([model.project(each).sum() for each in hidden]).sum().backward()
        counted = counter.get_total_flops() / tokens_BS.numel()
        keep("flops", 0.7 < claimed / counted < 1.1, f"`flops_per_token({tokens})` is {claimed:.4g} and torch counts {counted:.4g}.")
        keep("flops", model.flops_per_token(2 * tokens) >= claimed, "longer sequences cost fewer FLOPs for a token.")

    def test_hugging_face_table_is_complete(self) -> None:
        """Export and import give back the same tensors and the same config; each name is used once."""
        from intarsia_huggingface.rules import apply_rules, experts_of, whole_numbers

        entry = self.found_entry()
        if entry.hf is None:
            return
        table = import_reference(entry.hf)
        config, model = self.config(), self._model()
        theirs = import_reference(table.config_to_theirs)(config)
        back = import_reference(table.config_to_ours)(theirs)
        keep(
            "hf config",
            _shape_config(back) == _shape_config(config),
            f"config -> theirs -> ours gives another config: {back} instead of {config}.",
        )
        ours = {**dict(model.named_parameters()), **persistent_buffers(model)}
        aliases = {other: canonical for canonical, *others in model.regions().ties for other in others}
        sizes = whole_numbers(theirs)
        shapes = {name: tuple(tensor.shape) for name, tensor in ours.items()}
        experts = experts_of(table, sizes)
        names = {name for name, _ in model.named_parameters(remove_duplicate=False)} | persistent_buffers(model).keys()
        settings: dict[str, Any] = {"sizes": sizes, "aliases": aliases, "shapes": shapes, "experts": experts, "names": names}
        layers = len(model.regions().blocks)
        exported = apply_rules(table, ours, layers, "export", **settings)
        imported = apply_rules(table, exported, layers, "import", **settings)
        keep("hf table", set(imported) == set(ours), f"import after export gives other names: {sorted(set(imported) ^ set(ours))[:4]}.")
        changed = [name for name in ours if not torch.equal(imported[name], ours[name])]
        keep("hf table", not changed, f"export followed by import changes {changed[:3]}.")
        if entry.architectures:
            keep(
                "hf config",
                len(theirs.get("architectures") or ()) == 1 and theirs["architectures"][0] in entry.architectures,
                f"exported `architectures` are {theirs.get('architectures')}; the entry reads {entry.architectures}.",
            )


def _shape_config(config: ModelConfig) -> str:
    """A config without what only the start of training needs, which no `config.json` holds."""
    import chz

    starts = {name: 0.0 for name in chz.chz_fields(type(config)) if name.endswith("_std")}
    return repr(chz.replace(config, **starts))


def _set_parameter(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, parameter)
