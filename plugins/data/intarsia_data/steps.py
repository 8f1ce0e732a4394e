"""What loaders of documents have in common: this rank's micro-batches of each global step, and the exact position.

The position is one number, the samples consumed by all ranks together. Everything else (which documents, which tokens, which rank) follows
from it by arithmetic, so it is valid at any number of ranks and for any global batch.

A step takes the next G samples (fewer at the end of the data). Each rank gets a contiguous slice, as even as can be, in micro-batches that are as
even as can be. The number of micro-batches is the same on every rank; a rank without a sample for one gets a row of padding there. When the
data is used up, `next_step` gives None on all ranks alike.
"""

from __future__ import annotations

import abc
import collections
import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from intarsia.config import MixturePart, Recipe
from intarsia.contracts import Batch, Run, StateItem, Tokenizer
from intarsia.errors import CheckpointError, DistributedError, UsageError

from intarsia_data.order import VERSION, Mixture, key_of


def has_evaluation(recipe: Recipe) -> bool:
    """Whether there is anything to evaluate on."""
    return bool(recipe.data.evaluation) or recipe.data.held_out > 0


class SampleStream(Protocol):
    """One source in sample order. Stability: provisional."""

    samples: int | None
    tokens_per_sample: float
    cut_tokens: int

    def consumed(self, samples: int) -> tuple[float, float]:
        """Tokens in the first `samples` samples, and how many epochs that is."""


@dataclasses.dataclass(frozen=True)
class Parts:
    """The sources of a split: their names in messages, the mixture's parts, and the folder for what is kept of them. Stability: provisional."""

    names: list[str]
    parts: Sequence[MixturePart]
    cache: Path

    @classmethod
    def of(cls, recipe: Recipe, plugins: Any, directory: Path, split: str) -> Parts:
        """Those of `split`, "train" or "evaluation". Errors: UsageError for another split, and where there is nothing to evaluate on."""
        data, train = recipe.data, split == "train"
        if split not in ("train", "evaluation"):
            raise UsageError(f"split={split!r} is unknown; it is train or evaluation.")
        if not train and not has_evaluation(recipe):
            raise UsageError(
                "There is nothing to evaluate on: set data.held_out above 0, name sources in data.evaluation, or set evaluation.every=0."
            )
        own = not train and bool(data.evaluation)
        where, parts = ("data.evaluation", data.evaluation) if own else ("data.mixture", data.mixture)
        cache = Path(data.cache).expanduser() if data.cache else Path(directory) / "cache"
        return cls([f"{where}.{number}.source ({plugins.entry_of(part.source).name})" for number, part in enumerate(parts)], parts, cache)


def stream_key(recipe: Recipe, number: int, train: bool) -> int | None:
    """The key of the order of source `number`; None: the documents' own order. Evaluation is the same whatever the seed, so that runs with different
    seeds compare. Stability: provisional."""
    seed: int | str = recipe.train.seed if train else "evaluation"
    return key_of(seed, number) if recipe.data.shuffle or not train else None


def pad_id_of(tokenizer: Tokenizer) -> int:
    """The id that padding has. Stability: provisional."""
    return next((number for number in (tokenizer.pad_id, tokenizer.eos_id) if number is not None), 0)


def order_settings(
    recipe: Recipe, tokenizer: Tokenizer, names: Sequence[str], weights: Sequence[float], digests: Sequence[str]
) -> dict[str, Any]:
    """What the order of samples depends on, by the words in which a difference is told; the number of epochs only where it decides when a source leaves
    the mixture. Stability: provisional."""
    data = recipe.data
    mixed = {f"{name} share": weight / sum(weights) for name, weight in zip(names, weights, strict=True)} | {"data.epochs": data.epochs}
    return {
        "order's version": VERSION,
        "tokenizer": tokenizer.fingerprint(),
        "data.packing": data.packing,
        "data.shuffle": data.shuffle,
        "data.held_out": 0.0 if data.evaluation else data.held_out,
        "train.seed": recipe.train.seed,
        "train.sequence_length": recipe.train.sequence_length,
        **{f"{name} documents": digest for name, digest in zip(names, digests, strict=True)},
        **(mixed if len(names) > 1 else {}),
    }


def changed_settings(saved: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """What an order depends on and is no longer what it was when it was saved, a line each; nothing where all is. Stability: provisional."""
    names = [name for name in dict.fromkeys([*saved, *now]) if saved.get(name) != now.get(name)]
    return "\n".join(f"  {name}: {saved.get(name, 'absent')} when saved, {now.get(name, 'absent')} now" for name in names)


def agree_on_order(run: Run) -> None:
    """Compare over all ranks what the order of samples depends on, in training and in evaluation, for loaders that say so (`depends_on`, JSON). A collective. Stability: provisional.

    Errors: DistributedError where ranks have other documents: each works out for itself what the others are given, so that samples would be seen twice and others never, and nobody would notice.
    """
    for part, what in (("data", "the data"), ("evaluation", "the data of evaluation")):
        found = getattr(run.parts.get(part), "depends_on", None)
        if found is None:
            continue
        try:
            run.parts["mesh"].world.agree(found, what)
        except DistributedError as error:
            raise DistributedError(
                f"{error} Documents, and which of their media can be used, must be the same wherever ranks run: look whether files differ by machine, and what is kept of them (data.cache)."
            ) from error


class StepLoader(abc.ABC):
    """See the module. `state` and `load_state` carry the position under the owner `data`. Stability: provisional.

    `streams` are the sources in sample order, `settings` what the order depends on (`order_settings`), kept as `depends_on`. A subclass says in `make_batches` what samples
    are, and may prepare several steps at once (`threads`).
    """

    threads = 1

    def __init__(
        self, recipe: Recipe, tokenizer: Tokenizer, names: Sequence[str], weights: Sequence[float], streams: Sequence[SampleStream],
        rank: int, ranks: int, train: bool, settings: Mapping[str, Any],
    ):  # fmt: skip
        if not 0 <= rank < ranks:
            raise UsageError(f"rank {rank} of {ranks} data-parallel ranks does not exist.")
        self.tokenizer, self.names = tokenizer, names
        self._rank, self._ranks, self._train = rank, ranks, train
        self._row, self._micro_batch, self._global_batch = recipe.train.sequence_length, recipe.train.micro_batch, recipe.train.global_batch
        self._weights = [weight / sum(weights) for weight in weights]
        self._epochs = recipe.data.epochs if train else 1
        self.depends_on = dict(settings)
        rates = [weight / stream.tokens_per_sample for weight, stream in zip(self._weights, streams, strict=True)]
        self._mixture = Mixture(rates, [stream.samples for stream in streams])
        self._all_streams = streams
        self.total = self._mixture.total
        if not train and self.total is not None:
            self.total = min(self.total, recipe.evaluation.batches * self._global_batch)
        self._prefetch = recipe.data.prefetch if train else 0
        self._pool: ThreadPoolExecutor | None = None
        self._pending: collections.deque[Future[list[Batch]]] = collections.deque()
        self.samples = self.steps = 0

    @abc.abstractmethod
    def make_batches(self, samples: Sequence[range]) -> list[Batch]:
        """For each range of global sample numbers a micro-batch; one row of padding for an empty one. Pure."""

    @abc.abstractmethod
    def facts(self) -> dict[str, Any]:
        """See `intarsia.contracts.Loader`."""

    def next_step(self) -> list[Batch] | None:
        """This rank's micro-batches of the next global step; None at the end of the data. Moves the position.

        Errors: what went wrong while the batches were made, in the background or here, with the source and sample named.
        """
        if self.samples == self.total:
            return None
        batches = self._prefetched() if self._prefetch else self.make_step(self.samples)
        self.samples, self.steps = self._after(self.samples), self.steps + 1
        return batches

    def _prefetched(self) -> list[Batch]:
        """The step at the position, made in the background, which is given the steps after it to make."""
        if self._pool is None:
            self._pool, self._ahead = ThreadPoolExecutor(self.threads, thread_name_prefix="intarsia-data"), self.samples
        while len(self._pending) <= self._prefetch and self._ahead != self.total:
            self._pending.append(self._pool.submit(self.make_step, self._ahead))
            self._ahead = self._after(self._ahead)
        try:
            return self._pending.popleft().result()
        except BaseException:
            self.close()
            raise

    def _after(self, position: int) -> int:
        """The position after the step at `position`."""
        return position + self._global_batch if self.total is None else min(position + self._global_batch, self.total)

    def make_step(self, position: int) -> list[Batch]:
        """This rank's micro-batches of the step that begins with global sample `position`. Pure."""
        count = self._after(position) - position
        start, stop = (position + count * edge // self._ranks for edge in (self._rank, self._rank + 1))
        largest = math.ceil(count / self._ranks)
        micro_batches = math.ceil(largest / self._micro_batch)
        edges = [start + (stop - start) * number // micro_batches for number in range(micro_batches + 1)]
        return self.make_batches([range(first, last) for first, last in itertools.pairwise(edges)])

    def reset(self, samples: int = 0, steps: int = 0) -> None:
        """Set the position, by default to the first sample: evaluation sees the same batches each time. Drops what was prepared for another one."""
        self.drop()
        self.samples, self.steps = samples, steps

    def close(self) -> None:
        """End what runs in the background. The loader may be used again."""
        self.drop()

    def drop(self) -> None:
        """End the preparation of further steps, and forget what is prepared."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        self._pool = None
        self._pending.clear()

    def consumed(self) -> list[tuple[float, float]]:
        """For each source the tokens and the epochs that were given out so far."""
        return [self._all_streams[number].consumed(count) for number, count in enumerate(self._mixture.counts(self.samples))]

    def state(self) -> list[StateItem]:
        """One replicated item: samples delivered, steps, and what the order of samples depends on. Prepared batches do not count."""
        epochs = [epochs for _, epochs in self.consumed()]
        value = {"samples": self.samples, "steps": self.steps, "epochs": epochs, "settings": self.depends_on}
        if self.samples == self.total and any(stream.cut_tokens for stream in self._all_streams):
            value["ended_after_epochs"] = self._epochs
        return [StateItem("data", "position", "replicated", value)]

    def load_state(self, values: Mapping[str, Any], missing_rank_state: bool = False) -> None:
        """Go on after the last delivered sample. Errors: CheckpointError for a missing or broken item; UsageError when the data or what
        orders it has changed, since then no position says what was seen."""
        if "position" not in values:
            raise CheckpointError(
                "data/position is missing from the checkpoint: it is not known which samples were seen. Start a new run from its weights."
            )
        value = values["position"]
        samples, steps, saved = value["samples"], value["steps"], value["settings"]
        if lines := changed_settings(saved, self.depends_on):
            raise UsageError(
                f"The position in the data cannot be taken up, since the data or its order has changed:\n{lines}\nRestore it, or start a new run from the checkpoint's weights."
            )
        ended = value.get("ended_after_epochs", self._epochs)
        if ended != self._epochs:
            raise UsageError(
                f"The checkpoint has seen the data's end after data.epochs={ended}, where the last row was cut short; with data.epochs={self._epochs} the "
                "tokens that would have filled it would never be seen. Keep data.epochs, or start a new run from the checkpoint's weights."
            )
        if self.total is not None and samples > self.total:
            raise UsageError(f"The checkpoint has seen {samples} samples but the data now ends after {self.total}. Raise data.epochs.")
        self.reset(samples, steps)
