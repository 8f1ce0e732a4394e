"""Parity of a family with its reference class, such as one of transformers, on a tiny random model.

    class TestMine(ParityTests):
        entry = "my-distribution:mine"

        def reference(self):
            return MineForCausalLM(MineConfig(...))

The weights go through the family's HFTable. Logits, loss and every gradient must agree, greedy tokens with caches, and what is exported and read again, by them and by us. Each difference is in
the table at the end of the run; where logits differ, the first layer that does is named.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from intarsia import ops
from intarsia.contracts import ModelEntry
from intarsia.parameters import persistent_buffers
from intarsia.plugins import current, import_reference
from intarsia_eager.context import TrainContext
from torch import Tensor, nn

from intarsia_testing.parity_samples import Samples, text_samples
from intarsia_testing.parity_table import PARITY, measured
from intarsia_testing.promise import keep


class ParityTests:
    """Set `entry`, override `reference`. `tolerance` bounds differences of logits, relative to the largest logit, and of the loss; `gradient_tolerance` those of a gradient, relative to its largest
    number (0: 20 times as much); `tokens` is the length of rows of text.

    `batches` are names of inputs, for each of which everything is compared: override `samples` to make others than random text. `greedy_tokens` are compared behind each row, of which `chunk` tokens
    are read at a time. `family` stands in the table (default: the reference's class). Stability: provisional.
    """

    entry: ClassVar[str] = ""
    family: ClassVar[str] = ""
    tolerance: ClassVar[float] = 1e-5
    gradient_tolerance: ClassVar[float] = 0.0
    tokens: ClassVar[int] = 48
    noise: ClassVar[float] = 0.05
    batches: ClassVar[Sequence[str]] = ("text",)
    greedy_tokens: ClassVar[int] = 64
    chunk: ClassVar[int] = 32
    _request: Any = None

    # ------------------------------------------------------------ what a family says

    def reference(self) -> nn.Module:
        """A tiny random model of the reference class, float32, with `attn_implementation="eager"`."""
        raise NotImplementedError

    def as_files(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Their tensors (weights, gradients), named in memory, as their files have them. Override where the reference class fuses what its files hold apart."""
        return dict(tensors)

    def samples(self, theirs: Any, batch: str) -> Samples:
        """The rows of a batch, for both sides: `intarsia_testing.parity_samples` makes some with images and video."""
        return Samples(self._tokens(theirs))

    def run_theirs(self, theirs: Any, samples: Samples) -> Any:
        """Their result, which has `logits` [B, S, V] and `loss`, the mean over all tokens but the first of each row."""
        return theirs(input_ids=samples.tokens_BS, labels=samples.tokens_BS, **samples.theirs)

    def greedy_theirs(self, theirs: Any, samples: Samples) -> tuple[Tensor, Tensor]:
        """Their next `greedy_tokens` tokens [B, N] with a cache, and the logits [B, N, V] that they are the largest of."""
        from intarsia_testing.parity_greedy import their_greedy

        return their_greedy(theirs, samples, self.greedy_tokens)

    def reload(self, theirs: Any, folder: Path) -> Any:
        """Their class, read strictly from a folder of config.json and model.safetensors."""
        model, notes = type(theirs).from_pretrained(folder, attn_implementation="eager", output_loading_info=True, dtype=torch.float32)
        wrong = {kind: sorted(notes[kind]) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") if notes[kind]}
        keep("parity", not wrong, f"{type(theirs).__name__} does not take the exported folder: {wrong}.")
        return model.eval()

    def gradient_scale(self, name: str, gradients: Mapping[str, Tensor]) -> float:
        """What the error of our parameter's gradient is relative to: the largest number of theirs. Override for parameters whose gradient is zero but for rounding."""
        return float(gradients[name].abs().max())

    # ------------------------------------------------------------ both sides

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Each test once for each batch."""
        if "batch" in metafunc.fixturenames:
            metafunc.parametrize("batch", self.batches)

    @pytest.fixture(autouse=True)
    def _reports(self, request: pytest.FixtureRequest) -> None:
        self._request = request

    def _measured(self, theirs: Any, batch: str, what: str, error: float, allowed: float, note: str = "") -> None:
        """A row for the table, carried by the test's report."""
        if self._request is None:
            return
        node = self._request.node
        params = getattr(getattr(node, "callspec", None), "params", {})
        inputs = "-".join([batch, *(str(value) for name, value in params.items() if name != "batch")])
        family = f"{self.family or type(theirs).__name__} {type(self).__name__}"
        node.user_properties.append((PARITY, measured(family, inputs, what, error, allowed, note)))

    def _reference(self) -> Any:
        torch.manual_seed(0)
        model = self.reference().float().eval()
        with torch.no_grad():
            for parameter in model.parameters():  # so that norms are not all ones and biases not all zero
                parameter.add_(self.noise * torch.randn_like(parameter))
            for buffer in persistent_buffers(model).values():
                if buffer.is_floating_point():
                    buffer.add_(self.noise * torch.randn_like(buffer))
        return model

    def _both(self) -> tuple[Any, Any, Any]:
        """The reference, ours with its weights, and the table."""
        entry = current().registry("model").find(self.entry)
        assert isinstance(entry, ModelEntry)
        keep("parity", entry.hf, f"{entry.full_name} names no Hugging Face table (`hf`).")
        table = import_reference(entry.hf or "")
        theirs = self._reference()
        ours: Any = current().build(import_reference(table.config_to_ours)(theirs.config.to_dict()))
        tensors = self._convert(table, ours, self.as_files(theirs.state_dict()), "import", theirs)
        with torch.no_grad():
            for name, parameter in {**dict(ours.named_parameters()), **persistent_buffers(ours)}.items():
                keep(
                    "parity",
                    tensors[name].shape == parameter.shape,
                    f"{name} is {tuple(parameter.shape)}, the table gives {tuple(tensors[name].shape)}.",
                )
                parameter.copy_(tensors[name])
        return theirs, ours, table

    def _facts(self, table: Any, ours: Any, theirs: Any) -> dict[str, Any]:
        """What the rules' functions are told of this model."""
        from intarsia_huggingface.rules import experts_of, whole_numbers

        sizes = whole_numbers(theirs.config.to_dict())
        return {
            "sizes": sizes,
            "experts": experts_of(table, sizes),
            "aliases": {other: canonical for canonical, *others in ours.regions().ties for other in others},
            "names": {name for name, _ in ours.named_parameters(remove_duplicate=False)} | set(persistent_buffers(ours)),
        }

    def _convert(self, table: Any, ours: Any, tensors: Any, direction: Any, theirs: Any) -> dict[str, Tensor]:
        from intarsia_huggingface.rules import apply_rules

        shapes = {name: tuple(parameter.shape) for name, parameter in ours.named_parameters()}
        layers = len(ours.regions().blocks)
        return apply_rules(table, tensors, layers, direction, shapes=shapes, **self._facts(table, ours, theirs))

    def _tokens(self, theirs: Any) -> Tensor:
        return text_samples(theirs.config.get_text_config().vocab_size, self.tokens).tokens_BS

    def _context(self, tokens_BS: Tensor, extra: Mapping[str, Any] | None = None) -> TrainContext:
        rows, tokens = tokens_BS.shape
        return TrainContext(torch.arange(tokens).expand(rows, tokens), None, ((tokens,),) * rows, extra=extra)

    def _run_ours(self, ours: Any, samples: Samples) -> tuple[Tensor, Tensor]:
        """Our logits and loss."""
        tokens_BS = samples.tokens_BS
        hidden_BSD = ours.eval()(tokens_BS, self._context(tokens_BS, samples.extra))
        labels_N = tokens_BS[:, 1:].flatten()
        loss = ops.cross_entropy(hidden_BSD[:, :-1].flatten(0, 1), ours.head_weight_VD, labels_N) / labels_N.numel()
        return ours.project(hidden_BSD), loss

    def first_difference(self, theirs: Any, ours: Any, table: Any, samples: Samples) -> str:
        """In words: the first layer whose output is not theirs."""
        from intarsia_huggingface.rules import choose, expand

        from intarsia_testing.parity_layers import counterparts, differences, first_layer, recorded

        facts = self._facts(table, ours, theirs)
        blocks = ours.regions().blocks
        rows = choose(expand(table, len(blocks), **facts), set(self.as_files(theirs.state_dict())))
        names = counterparts([row for row in rows if row.op != "copy"], ours, theirs)
        with torch.no_grad(), recorded(theirs, list(names.values())) as others, recorded(ours, list(names)) as mine:
            self.run_theirs(theirs, samples)
            self._run_ours(ours, samples)
        return first_layer(differences(mine, others, names, samples.order_N), blocks, self.tolerance)

    # ------------------------------------------------------------ what is compared

    def test_logits_agree(self, batch: str) -> None:
        """Ours with their weights gives their logits, and their loss."""
        theirs, ours, table = self._both()
        samples = self.samples(theirs, batch)
        with torch.no_grad():
            result = self.run_theirs(theirs, samples)
            logits_BSV, loss = self._run_ours(ours, samples)
        error = float((logits_BSV - result.logits).abs().max() / result.logits.abs().max())
        loss_error = abs(float(loss) - float(result.loss)) / abs(float(result.loss))
        self._measured(theirs, batch, "logits", error, self.tolerance)
        self._measured(theirs, batch, "loss", loss_error, self.tolerance)
        if not error <= self.tolerance:
            where = self.first_difference(theirs, ours, table, samples)
            keep("parity", False, f"logits differ by {error:.2e} relative; {self.tolerance:.0e} is allowed. {where}")
        keep("parity", loss_error <= self.tolerance, f"the loss is {float(loss):.7f} and theirs {float(result.loss):.7f}.")

    def test_gradients_agree(self, batch: str) -> None:
        """The loss's gradients, carried over by the table, are theirs; where theirs has none, ours has none or zeros."""
        theirs, ours, table = self._both()
        samples = self.samples(theirs, batch)
        self.run_theirs(theirs, samples).loss.backward()
        self._run_ours(ours, samples)[1].backward()
        given = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in theirs.named_parameters()}
        gradients = self._convert(table, ours, self.as_files({**given, **persistent_buffers(theirs)}), "import", theirs)
        is_whole = all(parameter.grad is not None for parameter in theirs.parameters())
        idle = [name for name, gradient in gradients.items() if is_whole and not bool(gradient.any())]
        keep("parity", not idle, f"these rows do not test {idle[:3]}: their gradients are zeros. Give `samples` that use them.")
        errors = {}
        for name, parameter in ours.named_parameters():
            found = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            difference = float((found - gradients[name]).abs().max())
            errors[name] = difference / max(self.gradient_scale(name, gradients), 1e-12)
        worst = max(errors, key=lambda name: errors[name])
        allowed = self.gradient_tolerance or 20 * self.tolerance
        self._measured(theirs, batch, "gradients", errors[worst], allowed)
        wrong = [name for name, error in errors.items() if not error <= allowed]
        keep("parity", not wrong, f"the gradient of {worst} differs by {errors[worst]:.2e} relative ({len(wrong)} of {len(errors)} do).")

    def test_greedy_tokens_agree(self, batch: str) -> None:
        """The next tokens of both sides, each with its caches: equal, or tied within what rounding explains."""
        from intarsia_testing.parity_greedy import compare, our_greedy

        theirs, ours, _ = self._both()
        samples = self.samples(theirs, batch)
        with torch.no_grad():
            tokens_BN, theirs_BNV = self.greedy_theirs(theirs, samples)
            count = tokens_BN.shape[1]
            keep("parity", count == self.greedy_tokens, f"theirs ended after {count} tokens, and {self.greedy_tokens} were asked for.")
            found = compare(tokens_BN, theirs_BNV, our_greedy(ours.eval(), samples, tokens_BN, self.chunk), self.tolerance)
        note = f"{found.tokens - found.ties} of {found.tokens}, margin {found.margin:.0e}"
        self._measured(theirs, batch, "greedy", found.error, self.tolerance, note)
        keep("parity", not found.wrong, f"{found.wrong}.")
        keep("parity", found.error <= self.tolerance, f"logits of greedy tokens differ by {found.error:.2e} relative.")

    def test_export_gives_their_weights_back(self) -> None:
        """Export after import is the identity."""
        theirs, ours, table = self._both()
        exported = self._convert(table, ours, {**dict(ours.named_parameters()), **persistent_buffers(ours)}, "export", theirs)
        state = self.as_files(theirs.state_dict())
        changed = [name for name, tensor in exported.items() if not torch.equal(tensor, state[name])]
        keep("parity", not changed, f"export after import changes {changed[:3]}.")
        tied = bool(getattr(theirs.config, "tie_word_embeddings", False))
        missing = [name for name in self.as_files(dict(theirs.named_parameters())) if name not in exported]
        keep("parity", not missing, f"export leaves out {missing[:3]} (tied: {tied}).")

    def test_folders_go_round(self) -> None:
        """Their class takes an exported folder strictly and gives its logits again; and we, reading it, ours, bit for bit."""
        from intarsia.checkpoint import open_weights
        from intarsia_generation.source import fill

        theirs, ours, table = self._both()
        batch = self.batches[0]
        samples = self.samples(theirs, batch)
        with tempfile.TemporaryDirectory() as place, torch.no_grad():
            folder = Path(place)
            self._write(table, ours, theirs, folder)
            expected_BSV = self.run_theirs(theirs, samples).logits
            found_BSV = self.run_theirs(self.reload(theirs, folder), samples).logits
            again: Any = fill(open_weights(folder), current(), torch.device("cpu"), torch.float32)
            error = float((found_BSV - expected_BSV).abs().max() / expected_BSV.abs().max())
            self._measured(theirs, batch, "export", error, self.tolerance)
            keep("parity", error <= self.tolerance, f"logits of {type(theirs).__name__} after export differ by {error:.2e} relative.")
            same = torch.equal(self._run_ours(again, samples)[0], self._run_ours(ours, samples)[0])
            keep("parity", same, "our logits after export and import are others.")

    def _write(self, table: Any, ours: Any, theirs: Any, folder: Path) -> None:
        """The model as a folder of theirs, by the table alone."""
        from intarsia_huggingface.safetensors_file import Head, write_file

        tensors = self._convert(table, ours, {**dict(ours.named_parameters()), **persistent_buffers(ours)}, "export", theirs)
        heads = [Head(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor in tensors.items()]
        write_file(folder / "model.safetensors", heads, lambda name: [tensors[name].detach()])
        (folder / "config.json").write_text(json.dumps(import_reference(table.config_to_theirs)(ours.config)))
