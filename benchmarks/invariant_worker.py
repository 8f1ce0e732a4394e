"""A trainer and an embedded generator of one recipe in a process of their own, told what to do by `invariant_gpu.py`: a JSON line for each order on stdin, and `@` with a JSON line for each answer on stdout.

Batch-invariant or as usual. Rows hold one document each. Random ids stand in for text, and weights are what the recipe's seed draws.
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import json
import os
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from intarsia import device as devices
from intarsia import logical, ops
from intarsia.comm import SelfCommunicator
from intarsia.config import Resolved, resolve
from intarsia.contracts import Batch, Run
from intarsia.layout import slices
from intarsia.mesh import check_mesh
from intarsia.plugins import current
from intarsia.train.build import build_engine, build_mesh, build_model, build_optimizer, build_parameters, choose_kernels
from intarsia.train.built import DATA_AXES, Built
from intarsia.train.state import Progress
from intarsia.train.step import Flags, train_step
from intarsia_data.batches import Row, stack
from intarsia_eager.config import CrossEntropyConfig
from intarsia_eager.engine import EagerEngine
from intarsia_generation.engine.build import make_plain
from intarsia_generation.engine.engine import Engine, Sizes
from intarsia_generation.engine.request import Job
from intarsia_generation.engine.static import Graphs
from intarsia_rl.contracts import Request, Sample, Sampling, Segment, WeightVersion
from intarsia_rl.invariant.check import kernel_problems
from intarsia_rl.packing import Packing, Weighed, micro_batches
from intarsia_rl.weights import digest
from intarsia_rl.weights.build import build_model as build_generators_model
from intarsia_rl.weights.config import SharedMemoryConfig
from intarsia_rl.weights.fill import fill, forget, own_tensors
from intarsia_rl.weights.held import Held
from invariant_probe import probe

PROMPT = 16
"""Tokens of a prompt; what follows them is trained on."""
SLOW_PUSH_S = 4.0
"""A push through shared memory that takes longer is the last of its kind: weights are copied on the device from then on."""


class Feed:
    """A loader of what it is given."""

    batches: Sequence[Batch] = ()

    def next_step(self) -> list[Batch]:
        """The step's micro-batches."""
        return list(self.batches)


class Worker:
    """See the module. `rows`: of how many a forward pass of the loop has."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments, self.plugins = arguments, current()
        transforms = ["batch_invariant"] if arguments.invariant else []
        self.resolved: Resolved = resolve(arguments.recipe, arguments.settings, transforms)
        self.recipe = self.resolved.recipe
        self.device, self.dtype = devices.select(self.recipe.train.device), self.recipe.precision.compute
        if arguments.threads:
            torch.set_num_threads(arguments.threads)
        logical.reset()
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        choose_kernels(self.resolved, self.plugins)
        self.built = self._trainer()
        self.usual_engine = (self.built.engine, self.built.loss)
        loss = self.plugins.build(CrossEntropyConfig(chunk=2048))
        self.other_engine = (EagerEngine(self.built.model, loss), loss)
        self.selections: dict[str, ops.Selection] = {}
        self.model = build_generators_model(self.recipe, self.plugins, self.device, self.dtype)
        if arguments.invariant:
            make_plain(self.model)
        self.transport = self.plugins.build(SharedMemoryConfig(), tempfile.mkdtemp())
        self.pushed = 0
        self.copies = False
        self.first_masters: dict[str, torch.Tensor] = {}
        self.version = -1
        self.engine: Engine | None = None
        self.ended: dict[str, Any] = {}
        self.arrivals = itertools.count()

    def _trainer(self) -> Built:
        """The run as `intarsia train` builds it, but for data and checkpoints."""
        world = SelfCommunicator(self.device)
        run = Run(self.recipe, Path(tempfile.mkdtemp()), 0, 1)
        built = Built(run, self.resolved, self.plugins, self.plugins.hooks, world, self.device)
        built.progress = Progress(run)
        run.parts["mesh"] = build_mesh(built, check_mesh(self.recipe.mesh, 1))
        built.data = built.mesh.comm(*DATA_AXES)
        built.loader = Feed()  # type: ignore[assignment]
        run.parts["model"] = build_model(built)
        run.parts["parameters"] = build_parameters(built)
        run.parts["optimizer"] = build_optimizer(built)
        run.parts["engine"] = build_engine(built)
        return built

    # ------------------------------------------------------------ facts

    def facts(self, **_: Any) -> dict[str, Any]:
        """What is in force."""
        try:
            import triton

            version = triton.__version__
        except ImportError:
            version = None
        chosen = {name: op.choice.kernel for name, op in ops.operators().items()}
        return {
            "device": devices.describe(self.device),
            "torch": torch.__version__,
            "triton": version,
            "kernels": chosen,
            "compile": self.recipe.compile.mode,
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "problems": self._problems(chosen),
        }

    def _problems(self, chosen: Mapping[str, str]) -> list[str]:
        return kernel_problems(chosen, self.device.type, self.dtype, os.environ) if self.arguments.invariant else []

    def memory(self, **_: Any) -> dict[str, Any]:
        """Peak so far, and reset."""
        found = {"peak_bytes": devices.peak_memory(self.device)}
        if self.device.type == "cuda":
            found["reserved_bytes"] = torch.cuda.memory_reserved(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        return found

    def kernels(self, *, kernels: Mapping[str, str], **_: Any) -> dict[str, Any]:
        """Put others in force, in trainer and generator: by operator, over the recipe's."""
        selection = self._selection(kernels)
        ops.install(selection)
        if self.engine is not None:
            self.engine.choices = dict(selection.choices)
        return {name: choice.kernel for name, choice in selection.choices.items() if name in kernels}

    def _selection(self, kernels: Mapping[str, str]) -> ops.Selection:
        """As a generator chooses, and a trainer whose blocks are not compiled."""
        key = json.dumps(kernels, sort_keys=True)
        if key not in self.selections:
            wanted = {**self.recipe.kernels, **kernels}
            made = ops.select(wanted, self.plugins, devices.capabilities(), self.dtype, invariant=self.arguments.invariant)
            self.selections[key] = made
        return self.selections[key]

    # ------------------------------------------------------------ weights

    def push(self, **_: Any) -> dict[str, Any]:
        """The trainer's weights to the generator, as the next version."""
        start = time.perf_counter()
        self.version += 1
        if self.copies:
            self._copy()
            weights = WeightVersion(self.version, "copies", {}, {}, {}, {})
        else:
            published = self.transport.publish(self.version, self.built.run.parts)
            assert published is not None
            weights = published
        published_s = time.perf_counter() - start
        if self.engine is None:
            self._fill(weights)
        else:
            self.engine.update(weights)
        self._wait()
        taken = time.perf_counter() - start
        how = "copies" if self.copies else "shared_memory"
        if not self.copies:
            self.transport.retire(self.version)
            self.pushed += 1
            self.copies = taken > SLOW_PUSH_S or self.pushed >= self.arguments.pushes
        return {"push_s": taken, "publish_s": published_s, "push_by": how}

    def _fill(self, weights: WeightVersion) -> None:
        if weights.transport != "copies":
            fill(self.model, weights, self.plugins)

    @torch.no_grad()
    def _copy(self) -> None:
        forget(self.model)
        own = own_tensors(self.model)
        for piece in Held(self.built.run.parts).pieces():
            own[piece.name][slices(piece.box)].copy_(piece.values)

    def reset(self, **_: Any) -> dict[str, Any]:
        """The weights that the trainer began with, and an optimizer that has done nothing."""
        masters = self.built.sharded.masters()
        if self.first_masters:
            with torch.no_grad():
                for name, value in masters.items():
                    value.copy_(self.first_masters[name])
            self.built.sharded.load_masters(masters)
            self.built.sharded.after_update()
        else:
            self.first_masters = {name: value.detach().cpu().clone() for name, value in masters.items()}
        self.built.run.parts["optimizer"] = build_optimizer(self.built)
        return self.digest()

    def digest(self, **_: Any) -> dict[str, Any]:
        """Of the masters."""
        sums = [digest.partial(value, value.shape) for value in self.built.sharded.masters().values()]
        totals = torch.stack(sums).tolist()
        return {"weights": digest.text([value for pair in totals for value in pair], "masters", (len(totals),))}

    # ------------------------------------------------------------ the loop

    def loop(self, *, steps: int, rows: int, row: int, decoded: int, tell: Callable[[dict[str, Any]], None], **_: Any) -> dict[str, Any]:
        """Push, generate, train, `steps` times. A row's first tokens are a prompt, the last `decoded` are chosen one at a time, those between are forced, and scored as prompts are read."""
        found = []
        self._engine(rows, row)
        for _ in range(steps):
            step = self.push()
            start = time.perf_counter()
            results = self._generated(rows, row, decoded)
            step["generate_s"] = time.perf_counter() - start
            samples, advantages = self._samples(results, decoded)
            step |= {"advantages": [round(value, 4) for value in advantages]} | self._trained(samples, row, decoded)
            step |= self.digest()
            found.append(step)
            tell(step)
        return {
            "steps": len(found),
            "largest_gap": max(step["gap"] for step in found),
            "tokens": sum(step["gap_tokens"] for step in found),
            "differing": sum(step["differing"] for step in found),
            "weights": found[-1]["weights"],
        }

    def _trained(self, samples: list[Weighed], row: int, decoded: int) -> dict[str, Any]:
        """One optimizer step on the samples, and how far the trainer's log-probabilities are from the generator's."""
        packing = Packing(row, self.recipe.train.micro_batch, 0)
        self._loader.batches = micro_batches(samples, packing, 0, 1, self.version)
        loss: Any = self.built.loss
        loss.reset_gap()
        start = time.perf_counter()
        result = train_step(self.built, lambda: Flags())
        self._wait()
        assert result is not None and loss.gap is not None
        gaps = [self._gaps(*seen, row, decoded) for seen in loss.seen]
        return {
            "train_s": time.perf_counter() - start,
            "loss": result[0].loss,
            "gradient_norm": result[0].gradient_norm,
            "gap": float(loss.gap),
            "gap_tokens": int(loss.gap_tokens),
            "differing": sum(gap["differing"] for gap in gaps),
            "gap_scored": max(gap["scored"] for gap in gaps),
            "gap_decoded": max(gap["decoded"] for gap in gaps),
        }

    @property
    def _loader(self) -> Feed:
        return self.built.loader  # type: ignore[return-value]

    @staticmethod
    def _gaps(batch: Batch, where_N: torch.Tensor, log_probs_N: torch.Tensor, row: int, decoded: int) -> dict[str, Any]:
        old_N = batch.extra["old_log_probs_BS"].flatten()[where_N]
        gaps_N, is_decoded_N = (log_probs_N - old_N).abs(), where_N % row >= row - 1 - decoded
        split = {"scored": gaps_N[~is_decoded_N], "decoded": gaps_N[is_decoded_N]}
        return {"differing": int((gaps_N != 0).sum())} | {name: float(part.max()) if part.numel() else 0.0 for name, part in split.items()}

    def _samples(self, results: Mapping[str, Any], decoded: int) -> tuple[list[Weighed], list[float]]:
        """A group of samples, rewarded by how many of the chosen tokens are even."""
        algorithm: Any = self.built.loss.algorithm  # type: ignore[attr-defined]
        samples = []
        for number, (name, (prompt, result)) in enumerate(results.items()):
            tokens = (*prompt, *result.tokens)
            before = len(prompt)
            segment = Segment(
                tokens,
                (False,) * before + (True,) * len(result.tokens),
                (0.0,) * before + result.log_probs,
                (-1,) * before + result.versions,
            )
            reward = sum(token % 2 == 0 for token in result.tokens[-decoded:]) / decoded
            samples.append(Sample(name, 0, number, "even", (segment,), reward=reward))
        advantages = algorithm.advantages(samples)
        made = [
            Weighed(sample, advantage, algorithm.token_weight(sample), algorithm.count(sample))
            for sample, advantage in zip(samples, advantages, strict=True)
        ]
        return made, advantages

    # ------------------------------------------------------------ steps for their time

    def step(self, *, rows: int, row: int, micro_batch: int, loss: str, repeats: int = 1, **_: Any) -> dict[str, Any]:
        """Seconds of whole training steps on random rows."""
        self._loader.batches = self._random_batches(rows, row, micro_batch, loss)
        self.built.engine, self.built.loss = self.other_engine if loss == "cross_entropy" else self.usual_engine
        seconds = []
        try:
            for _ in range(repeats):
                if loss == "policy":
                    self.built.loss.reset_gap()  # type: ignore[attr-defined]
                self._wait()
                start = time.perf_counter()
                train_step(self.built, lambda: Flags())
                self._wait()
                seconds.append(time.perf_counter() - start)
        finally:
            self.built.engine, self.built.loss = self.usual_engine
        return {"seconds": seconds}

    @functools.cache  # noqa: B019  (one worker lives as long as its process)
    def _random_batches(self, rows: int, row: int, micro_batch: int, loss: str) -> list[Batch]:
        drawn = random.Random(7)
        texts = [[drawn.randrange(self.recipe.model.vocab_size) for _ in range(row)] for _ in range(rows)]
        if loss == "cross_entropy":
            import numpy

            made = [Row(numpy.array(t), numpy.array([*t[1:], -100]), numpy.array([row]), row, n) for n, t in enumerate(texts)]
            return [stack(made[first : first + micro_batch], row) for first in range(0, rows, micro_batch)]
        guess = -float(torch.tensor(float(self.recipe.model.vocab_size)).log())
        samples = []
        for number, text in enumerate(texts):
            trained = (False,) * PROMPT + (True,) * (row - PROMPT)
            versions = (-1,) * PROMPT + (0,) * (row - PROMPT)
            segment = Segment(tuple(text), trained, tuple(guess * each for each in trained), versions)
            sample = Sample(str(number), 0, number, "even", (segment,))
            samples.append(Weighed(sample, 1.0 if number % 2 else -1.0, 1.0 / (row - PROMPT), 1))
        return micro_batches(samples, Packing(row, micro_batch, 0), 0, 1, 0)

    def free_trainer(self, **_: Any) -> dict[str, Any]:
        """Give back what the trainer occupies: only the generator is used from here on."""
        self._loader.batches = ()
        Worker._random_batches.cache_clear()
        self.usual_engine = self.other_engine = None  # type: ignore[assignment]
        self.transport.close()
        self.first_masters = {}
        self.built = self.transport = None  # type: ignore[assignment]
        if self.recipe.compile.mode != "none":
            torch.compiler.reset()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return self.memory()

    # ------------------------------------------------------------ the generator

    def _engine(
        self, sequences: int, longest: int, kernels: Mapping[str, str] | None = None, budget: int = 8192, graphs: Graphs = "off"
    ) -> Engine:
        """A new engine. `budget`: most tokens of a step. `graphs`: steps of decoding as CUDA graphs."""
        self.engine = None
        blocks = sequences * -(-longest // 16) + 1
        selection = self._selection(kernels) if kernels is not None else None
        choices = {name: op.choice for name, op in ops.operators().items()} if selection is None else selection.choices
        sizes = Sizes(16, blocks, sequences, max(budget, sequences + 1), longest, prefix_cache=False)
        self.engine = Engine(self.model, self.device, sizes, self._fill, choices=choices, invariant=self.arguments.invariant, graphs=graphs)
        if self.version >= 0:
            self.engine.begin(self.version)
        return self.engine

    def _add(self, name: str, prompt: Sequence[int], forced: Sequence[int], chosen: int, seed: int) -> None:
        assert self.engine is not None
        request = Request(name, tuple(prompt), Sampling(len(forced) + chosen, seed=seed), tuple(forced))
        self.engine.add(Job(request, next(self.arrivals), None, functools.partial(self.ended.__setitem__, name)))

    def _generated(self, rows: int, row: int, decoded: int) -> dict[str, tuple[list[int], Any]]:
        """A completion for each row, with its prompt."""
        assert self.engine is not None
        self.ended, prompts = {}, {}
        for number in range(rows):
            drawn = random.Random(f"{self.version}/{number}")
            text = [drawn.randrange(self.recipe.model.vocab_size) for _ in range(row - decoded)]
            prompts[f"{self.version}-{number}"] = text[:PROMPT]
            self._add(f"{self.version}-{number}", text[:PROMPT], text[PROMPT:], decoded, 1000 * self.version + number)
        while self.engine.step():
            pass
        for result in self.ended.values():
            if isinstance(result, BaseException):
                raise result
        return {name: (prompt, self.ended[name]) for name, prompt in prompts.items()}

    def decode_setup(
        self, *, batch: int, context: int, steps: int, kernels: Mapping[str, str], graphs: Graphs = "off", **_: Any
    ) -> dict[str, Any]:
        """Requests that have read about `context` tokens, each its own, and go on for `steps` more at least. Those that have read theirs first are up to some tens of tokens ahead."""
        start = time.perf_counter()
        slack = min(40, context // 2)
        engine = self._engine(batch, context + steps + 9, kernels, graphs=graphs)
        self.ended = {}
        for number in range(batch):
            drawn = random.Random(f"decode {number}")
            prompt = [drawn.randrange(self.recipe.model.vocab_size) for _ in range(context - slack)]
            self._add(str(number), prompt, (), slack + steps + 8, number)
        while not self.ended and any(not job.log_probs for job in engine.jobs):
            engine.step()
        self._wait()
        return {
            "prefill_s": time.perf_counter() - start,
            "tokens": [min(lengths := [len(job.tokens) for job in engine.jobs]), max(lengths)],
        }

    def decode(self, *, steps: int, kernels: Mapping[str, str] | None = None, **_: Any) -> dict[str, Any]:
        """Milliseconds of steps that give every request its next token."""
        assert self.engine is not None
        if kernels is not None:
            self.engine.choices = dict(self._selection(kernels).choices)
        found = []
        for _ in range(steps):
            self._wait()
            start = time.perf_counter()
            more = self.engine.step()
            self._wait()
            if not more:
                break
            found.append(1e3 * (time.perf_counter() - start))
        bad = [str(result) for result in self.ended.values() if isinstance(result, BaseException)]
        if bad:
            raise RuntimeError(bad[0])
        return {"ms": found, "sequences": len(self.engine.jobs), "graphs": self.engine.stats(False).graphs}

    def generate(
        self, *, batch: int, prompt: int, tokens: int, kernels: Mapping[str, str], rounds: int = 2, graphs: Graphs = "off", **_: Any
    ) -> dict[str, Any]:
        """Tokens per second of `batch` requests, the best of the rounds after one that warms up. Reading prompts counts as time; their tokens do not count."""
        engine = self._engine(batch, prompt + tokens, kernels, graphs=graphs)
        seconds = []
        for number in range(rounds + 1):
            self.ended = {}
            for each in range(batch):
                drawn = random.Random(f"{number}/{each}")
                self._add(f"{number}-{each}", [drawn.randrange(self.recipe.model.vocab_size) for _ in range(prompt)], (), tokens, each)
            start = time.perf_counter()
            while engine.step():
                pass
            self._wait()
            seconds.append(time.perf_counter() - start)
        made = sum(len(result.tokens) for result in self.ended.values())
        assert made == batch * tokens, f"{made} tokens were generated"
        return {"tokens_per_s": batch * tokens / min(seconds[1:]), "seconds": seconds}

    def probe(self, *, rows: int, row: int, **_: Any) -> dict[str, Any]:
        """The operators by themselves; see `invariant_probe`."""
        return probe(self.recipe.model, self.device, self.dtype, rows, row)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def tell(what: str, value: Any) -> None:
    """One line to whoever gives orders."""
    print(f"@{json.dumps({'what': what, 'value': value})}", flush=True)


def main() -> None:
    """Build, then obey."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("recipe")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="PATH=VALUE")
    parser.add_argument("--invariant", action="store_true")
    parser.add_argument("--threads", type=int)
    parser.add_argument(
        "--pushes", type=int, default=4, help="How many pushes go through shared memory; then weights are copied on the device."
    )
    start = time.perf_counter()
    worker = Worker(parser.parse_args())
    tell("ready", {**worker.facts(), "build_s": round(time.perf_counter() - start, 2)})
    for line in sys.stdin:
        order = json.loads(line)
        try:
            tell("done", getattr(worker, order.pop("do"))(tell=functools.partial(tell, "progress"), **order))
        except Exception as error:  # the next order may still be obeyed
            traceback.print_exc()
            tell("failed", f"{type(error).__name__}: {error}"[:2000])


if __name__ == "__main__":
    main()
