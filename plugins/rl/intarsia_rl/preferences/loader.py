"""The loader `preferences`: pairs of documents in an exact global order, and what the run's initial weights say of them. N pairs.

The position is the number of pairs that all ranks together have been given. Pairs of an epoch are shuffled by seed; a step takes the next train.global_batch of them.

The reference is the run's initial weights. Before the first step the pairs that the steps will use are run through the model once, without gradients, and in the very
micro-batches in which they are trained on in the first epoch; the two sums of log-probabilities of each pair are kept in float64, and every checkpoint has them.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from intarsia.config import Recipe
from intarsia.contracts import IGNORE, Batch, Run, StateItem, Tokenizer
from intarsia.device import on_device
from intarsia.errors import CheckpointError, UsageError
from intarsia.hooks import undisturbed
from intarsia.plugins import current
from intarsia_data.batches import Row, padding_of, stack
from intarsia_data.order import key_of, mix
from intarsia_data.steps import changed_settings
from intarsia_data.store import TokenStore, open_store

from intarsia_rl.preferences import packing
from intarsia_rl.preferences.config import PreferencesConfig

log = logging.getLogger("intarsia.rl")

VERSION = 1
"""Of the order. It goes up whenever a sample's number comes to mean another pair."""


@dataclasses.dataclass(frozen=True)
class Pairs:
    """All pairs, those to train on first: each one's store and the number of its first document there, and its documents' lengths."""

    stores: Sequence[TokenStore]
    store_N: numpy.ndarray
    document_N: numpy.ndarray
    lengths_N2: numpy.ndarray

    @classmethod
    def of(cls, stores: Sequence[TokenStore], documents: Sequence[numpy.ndarray]) -> Pairs:
        """Of each store the pairs whose first documents are these."""
        sizes = [numpy.diff(store.offsets) for store in stores]
        return cls(
            stores,
            numpy.concatenate([numpy.full(len(numbers), store) for store, numbers in enumerate(documents)]),
            numpy.concatenate(documents),
            numpy.concatenate([numpy.stack([size[n], size[n + 1]], 1) for size, n in zip(sizes, documents, strict=True)]),
        )

    def __len__(self) -> int:
        return len(self.store_N)

    def lengths(self, pair: int) -> tuple[int, int]:
        """Tokens of the chosen and of the rejected document."""
        return int(self.lengths_N2[pair, 0]), int(self.lengths_N2[pair, 1])

    def document(self, pair: int, side: int) -> tuple[numpy.ndarray, numpy.ndarray]:
        """A document's ids and labels (int64): the next token where that is trained on, else IGNORE."""
        store, number = self.stores[self.store_N[pair]], self.document_N[pair] + side
        first, end = store.offsets[number], store.offsets[number + 1]
        ids = store.tokens[first:end].astype(numpy.int64)
        labels = numpy.full(len(ids), IGNORE, numpy.int64)
        trained = numpy.ones(len(ids), bool) if store.trained is None else store.trained[first:end] != 0
        labels[:-1][trained[1:]] = ids[1:][trained[1:]]
        return ids, labels


def build(
    config: PreferencesConfig, recipe: Recipe, plugins: Any, rank: int, ranks: int, directory: Path, split: str
) -> PreferencesLoader | HeldOutPairs:
    """The entry's target. Of a run's evaluation the training loader, which was built before, has the pairs."""
    place = (str(directory), rank)
    if split == "evaluation":
        return HeldOutPairs(_LOADERS[place])
    loader = _LOADERS[place] = PreferencesLoader(config, recipe, plugins, rank, ranks, directory)
    return loader


_LOADERS: weakref.WeakValueDictionary[tuple[str, int], PreferencesLoader] = weakref.WeakValueDictionary()


class PreferencesLoader:
    """See the module and `intarsia.contracts.Loader`."""

    def __init__(self, config: PreferencesConfig, recipe: Recipe, plugins: Any, rank: int, ranks: int, directory: Path) -> None:
        self.tokenizer: Tokenizer = plugins.build(recipe.data.tokenizer)
        self._config, self._recipe, self._rank, self._ranks = config, recipe, rank, ranks
        data, train = recipe.data, recipe.train
        self._row, self._rows, self._batch = train.sequence_length, train.micro_batch, train.global_batch
        cache = Path(data.cache).expanduser() if data.cache else Path(directory) / "cache"
        self.skipped = 0
        found = [
            _Found.of(where, each, number, plugins, self.tokenizer, cache)
            for where, mixture in (("data.mixture", data.mixture), ("data.evaluation", data.evaluation))
            for number, each in enumerate(mixture)
        ]
        checked = [self._checked(each) for each in found]
        self.pairs = Pairs.of([each.store for each in found], checked)
        self._train, self.held_out = self._split(sum(len(documents) for documents in checked[: len(data.mixture)]))
        self.total = None if data.epochs is None else data.epochs * len(self._train)
        self._pad_id = next((number for number in (self.tokenizer.pad_id, self.tokenizer.eos_id) if number is not None), 0)
        self._reference_N2 = torch.full((len(self.pairs), 2), math.nan, dtype=torch.float64)
        self._run: Run | None = None
        self.depends_on = {
            "order's version": VERSION,
            "tokenizer": self.tokenizer.fingerprint(),
            "data.shuffle": data.shuffle,
            "data.held_out": data.held_out,
            "train.seed": train.seed,
            "train.sequence_length": self._row,
            "data.loader.too_long": config.too_long,
            **{f"{each.name} documents": each.store.digest for each in found},
        }
        self.samples = self.steps = 0

    # ------------------------------------------------------------ pairs

    def _checked(self, found: _Found) -> numpy.ndarray:
        """Numbers of the first documents of a store's pairs that can be trained on. UsageError that names the first which cannot."""
        store, kept = found.store, []
        for document in range(0, store.documents, 2):
            lengths = [int(store.offsets[number + 1] - store.offsets[number]) for number in (document, document + 1)]
            named = f"{found.name}: pair {document // 2}"
            for number, length in zip((document, document + 1), lengths, strict=True):
                first = store.offsets[number]
                if length < 2 or (store.trained is not None and not store.trained[first + 1 : first + length].any()):
                    side = ("chosen", "rejected")[number - document]
                    raise UsageError(f"{named} has no token to train on in its {side} answer ({length} tokens).")
            if max(lengths) > self._row or (self._rows == 1 and sum(lengths) > self._row):
                if self._config.too_long == "skip":
                    self.skipped += 1
                    continue
                raise UsageError(
                    f"{named} has documents of {lengths[0]} and {lengths[1]} tokens, which do not fit into {self._rows} row{'s' * (self._rows > 1)} of train.sequence_length={self._row}: both are "
                    "in one micro-batch. Raise train.sequence_length (or train.micro_batch to 2), or leave such pairs out: data.loader.too_long=skip."
                )
            kept.append(document)
        if not kept:
            raise UsageError(f"{found.name}: there is no pair" + (f": all {self.skipped} are too long." if self.skipped else "."))
        return numpy.array(kept)

    def _split(self, own: int) -> tuple[numpy.ndarray, numpy.ndarray]:
        """Numbers of pairs to train on, and of those held out: the `data.held_out` share with the smallest hashes, or the pairs of `data.evaluation`."""
        numbers = numpy.arange(own)
        if self._recipe.data.evaluation:
            return numbers, numpy.arange(own, len(self.pairs))
        share = self._recipe.data.held_out
        count = max(1, round(share * own)) if share else 0
        if count >= own:
            raise UsageError(
                f"data.held_out={share} of {own} pair{'s' * (own > 1)} leaves none to train on. Set data.held_out=0, and name sources in data.evaluation if you want evaluation."
            )
        ranked = numbers[numpy.argsort(mix(numbers, key_of("held out")), kind="stable")]
        return numpy.sort(ranked[count:]), numpy.sort(ranked[:count])

    def _pair(self, sample: int) -> int:
        """The pair of a global sample."""
        epoch, number = divmod(sample, len(self._train))
        if not self._recipe.data.shuffle:
            return int(self._train[number])
        return int(self._order(epoch)[number])

    def _order(self, epoch: int) -> numpy.ndarray:
        if getattr(self, "_ordered", (None,))[0] != epoch:
            keys = mix(self._train, key_of(self._recipe.train.seed, epoch))
            self._ordered = (epoch, self._train[numpy.argsort(keys, kind="stable")])
        return self._ordered[1]

    # ------------------------------------------------------------ steps

    def next_step(self) -> list[Batch] | None:
        """See Loader. In a run the first call makes the reference: a collective."""
        if self.samples == self.total:
            return None
        self._make_reference()
        stop = self._after(self.samples)
        numbers = [self._pair(sample) for sample in range(self.samples, stop)]
        batches = self._with_reference(self.make_step(numbers))
        self.samples, self.steps = stop, self.steps + 1
        return batches

    def _after(self, position: int) -> int:
        return position + self._batch if self.total is None else min(position + self._batch, self.total)

    def make_step(self, numbers: Sequence[int]) -> list[Batch]:
        """This rank's micro-batches of a step of these pairs, without a reference. Pure."""
        plan = packing.step([self.pairs.lengths(number) for number in numbers], self._row, self._rows, self._ranks)
        return [self._stacked(rows, numbers) for rows in plan[self._rank]]

    def _stacked(self, rows: packing.Rows, numbers: Sequence[int]) -> Batch:
        """One micro-batch. In `extra`: `pairs` (the numbers of its pairs), and `sides_BS` (int32): 2 p + side at the labels of the p-th of them, -1 elsewhere."""
        here = sorted({pair for row in rows for pair, _ in row})
        made, sides_BS = [], numpy.full((len(rows), self._row), -1, numpy.int32)
        for number, row in enumerate(rows):
            ids, labels = numpy.full(self._row, self._pad_id, numpy.int64), numpy.full(self._row, IGNORE, numpy.int64)
            at, lengths = 0, []
            for pair, side in row:
                document, following = self.pairs.document(numbers[pair], side)
                end = at + len(document)
                ids[at:end], labels[at:end] = document, following
                sides_BS[number, at:end][following != IGNORE] = 2 * here.index(pair) + side
                lengths.append(len(document))
                at = end
            lengths += [self._row - at] if at < self._row else []
            made.append(Row(ids, labels, numpy.array(lengths), 0, numbers[row[0][0]] if row else -1, self._row - at))
        batch = stack(made, self._row)
        extra = {"sides_BS": torch.from_numpy(sides_BS), "pairs": tuple(numbers[pair] for pair in here), **padding_of(made, self._row)}
        return dataclasses.replace(batch, extra=extra)

    # ------------------------------------------------------------ the reference

    def attach(self, run: Run) -> None:
        """Take the run's parts, which make the reference. UsageError where the loss is none for pairs."""
        if not getattr(run.parts["loss"], "learns_from_pairs", False):
            raise UsageError(
                f"data.loader=preferences gives pairs of documents, of which one is preferred, and the loss is `{current().entry_of(run.recipe.loss).name}`. Choose loss=dpo."
            )
        self._run = run

    def _with_reference(self, batches: list[Batch]) -> list[Batch]:
        """The batches with `reference_P` (float64): the reference's sums for each of the micro-batch's pairs, chosen and rejected. UsageError for a pair that has none."""
        if self._run is None or not self._run.parts["loss"].needs_reference:
            return batches
        made = []
        for batch in batches:
            reference_P2 = self._reference_N2[list(batch.extra["pairs"])]
            if bool(reference_P2.isnan().any()):
                raise UsageError(
                    "This step has pairs that got no log-probabilities of the reference when the run began, and the initial weights are gone. Begin a new run with "
                    "data.loader.reference_steps as large as train.steps will ever be."
                )
            made.append(dataclasses.replace(batch, extra={**batch.extra, "reference_P": reference_P2.flatten()}))
        return made

    def evaluation_step(self, number: int) -> list[Batch] | None:
        """Step `number` of an evaluation: the held-out pairs in order, at most evaluation.batches steps."""
        first = number * self._batch
        if number >= self._recipe.evaluation.batches or first >= len(self.held_out):
            return None
        self._make_reference()
        return self._with_reference(self.make_step([int(pair) for pair in self.held_out[first : first + self._batch]]))

    def _make_reference(self) -> None:
        """Where a run begins, and nothing is known of its initial weights: ask the model. A collective."""
        run = self._run
        if run is None or run.step > 0 or not run.parts["loss"].needs_reference or not bool(self._reference_N2.isnan().all()):
            return
        _, error, _ = undisturbed(self._ask, run)
        if error is not None:
            raise error

    @torch.no_grad()
    def _ask(self, run: Run) -> None:
        engine, loss, model, mesh = (run.parts[name] for name in ("engine", "loss", "model", "mesh"))
        steps = self._recipe.train.steps if self._config.reference_steps is None else self._config.reference_steps
        last = min(steps * self._batch, len(self._train))
        # A step at the end of the first epoch is cut there: every pair is asked about once.
        asked = [[self._pair(sample) for sample in range(first, min(first + self._batch, last))] for first in range(0, last, self._batch)]
        if self._recipe.evaluation.every != 0:
            held_out = self.held_out[: self._recipe.evaluation.batches * self._batch].tolist()
            asked += [held_out[first : first + self._batch] for first in range(0, len(held_out), self._batch)]
        values_N2, known_N = torch.zeros_like(self._reference_N2), torch.zeros(len(self.pairs), dtype=torch.float64)
        log.info("the reference: log-probabilities of %d pairs by the initial weights", sum(map(len, asked)))
        # Of ranks that share rows one tells; along pp the last stage has computed it.
        tells = not mesh.coordinates["cp"] and not mesh.coordinates["tp"]
        was_training = model.training
        model.eval()
        try:
            with loss.recording() as recorded:
                for numbers in asked:
                    for batch in self.make_step(numbers):
                        engine.evaluate(on_device(batch, mesh.device))
        finally:
            model.train(was_training)
        for pairs, sums_P2 in recorded if tells else ():
            values_N2[list(pairs)], known_N[list(pairs)] = sums_P2.cpu(), 1.0
        together = torch.cat([values_N2.flatten(), known_N]).to(mesh.device)
        together = mesh.world.all_reduce(together, what="log-probabilities of the reference").cpu()
        values_N2, known_N = together[: values_N2.numel()].view_as(values_N2), together[values_N2.numel() :]
        self._reference_N2.copy_(torch.where(known_N[:, None] == 1, values_N2, math.nan))
        run.record("reference", pairs=int(known_N.sum()))

    # ------------------------------------------------------------ position

    def reset(self, samples: int = 0, steps: int = 0) -> None:
        """Set the position."""
        self.samples, self.steps = samples, steps

    def close(self) -> None:
        """Nothing runs in the background."""

    def state(self) -> list[StateItem]:
        """The position, and the reference's sums (NaN for pairs that were not asked about)."""
        value = {"samples": self.samples, "steps": self.steps, "settings": self.depends_on}
        return [StateItem("data", "position", "replicated", value), StateItem("data", "reference", "replicated", self._reference_N2)]

    def load_state(self, values: Mapping[str, Any], missing_rank_state: bool = False) -> None:
        """Go on after the last pair that was given out. CheckpointError for a missing item; UsageError where the pairs or their order have changed."""
        missing = [name for name in ("position", "reference") if name not in values]
        if missing:
            raise CheckpointError(f"data/{missing[0]} is missing from the checkpoint. Start a new run from its weights.")
        if lines := changed_settings(values["position"]["settings"], self.depends_on):
            raise UsageError(
                f"The position among the pairs cannot be taken up, since they or their order have changed:\n{lines}\nRestore them, or start a new run from the checkpoint's weights."
            )
        self._reference_N2.copy_(values["reference"])
        self.reset(values["position"]["samples"], values["position"]["steps"])

    def facts(self) -> dict[str, Any]:
        """How many pairs, and how many were left out."""
        return {
            "split": "train", "pairs": len(self._train), "held_out_pairs": len(self.held_out), "skipped_pairs": self.skipped, "samples": self.total,
            "tokens": int(self.pairs.lengths_N2[self._train].sum()), "fingerprint": f"{key_of(sorted(self.depends_on.items())):016x}",
        }  # fmt: skip


class HeldOutPairs:
    """Pairs that only evaluation sees, the same ones each time; a Loader without a position."""

    def __init__(self, loader: PreferencesLoader) -> None:
        self._loader = loader
        self.tokenizer, self.total = loader.tokenizer, len(loader.held_out)
        self.samples = self.steps = 0

    def next_step(self) -> list[Batch] | None:
        """The next of the evaluation's steps."""
        batches = self._loader.evaluation_step(self.steps)
        self.steps += batches is not None
        return batches

    def reset(self, samples: int = 0, steps: int = 0) -> None:
        """Begin again."""
        self.samples, self.steps = samples, steps

    def facts(self) -> dict[str, Any]:
        """How many pairs."""
        return {"split": "evaluation", "pairs": len(self._loader.held_out)}

    def close(self) -> None:
        """The training loader has everything."""

    def state(self) -> list[StateItem]:
        """None."""
        return []

    def load_state(self, values: Mapping[str, Any], missing_rank_state: bool = False) -> None:
        """None."""


@dataclasses.dataclass(frozen=True)
class _Found:
    """A source's store, and what it is called."""

    name: str
    store: TokenStore

    @classmethod
    def of(cls, where: str, part: Any, number: int, plugins: Any, tokenizer: Tokenizer, cache: Path) -> _Found:
        name = f"{where}.{number}.source ({plugins.entry_of(part.source).name})"
        if part.weight != 1.0:
            raise UsageError(
                f"{where}.{number}.weight is {part.weight}: the loader `preferences` takes every pair once an epoch, whatever source it is from. Leave the weight out."
            )
        source = plugins.build(part.source)
        if not getattr(source, "pairs", False):
            raise UsageError(
                f"{name} gives documents and no pairs (an attribute `pairs` that is True says that they come in twos). Choose data.mixture.0.source=preferences."
            )
        return cls(name, open_store(source, tokenizer, name, cache))
