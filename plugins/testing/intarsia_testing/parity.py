"""Parity of a family with its reference class in transformers, on a tiny random model.

    class TestMine(ParityTests):
        entry = "my-distribution:mine"

        def reference(self):
            return MineForCausalLM(MineConfig(...))

The weights go through the family's HFTable in memory; logits must agree within `tolerance`, the loss likewise, and again after export.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from intarsia import ops
from intarsia.contracts import ModelEntry
from intarsia.parameters import persistent_buffers
from intarsia.plugins import current, import_reference
from intarsia_eager.context import TrainContext
from torch import Tensor, nn

from intarsia_testing.promise import keep


class ParityTests:
    """Set `entry`, override `reference`. `tolerance` bounds the absolute difference of logits, whose size is about 1; `tokens` the sequence length."""

    entry: ClassVar[str] = ""
    tolerance: ClassVar[float] = 1e-5
    tokens: ClassVar[int] = 48
    noise: ClassVar[float] = 0.05

    def reference(self) -> nn.Module:
        """A tiny random model of the reference class, float32, with `attn_implementation="eager"`."""
        raise NotImplementedError

    def as_files(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Their tensors (weights, gradients), named in memory, as their files have them. Override where the reference class fuses what its files hold apart."""
        return dict(tensors)

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

    def _convert(self, table: Any, ours: Any, tensors: Any, direction: Any, theirs: Any) -> dict[str, Tensor]:
        from intarsia_huggingface.rules import apply_rules, experts_of, whole_numbers

        aliases = {other: canonical for canonical, *others in ours.regions().ties for other in others}
        sizes = whole_numbers(theirs.config.to_dict())
        shapes = {name: tuple(parameter.shape) for name, parameter in ours.named_parameters()}
        experts = experts_of(table, sizes)
        layers = len(ours.regions().blocks)
        names = {name for name, _ in ours.named_parameters(remove_duplicate=False)} | set(persistent_buffers(ours))
        return apply_rules(table, tensors, layers, direction, sizes=sizes, aliases=aliases, shapes=shapes, experts=experts, names=names)

    def _tokens(self, theirs: Any) -> Tensor:
        return torch.randint(0, theirs.config.vocab_size, (2, self.tokens), generator=torch.Generator().manual_seed(1))

    def _context(self, tokens_BS: Tensor) -> TrainContext:
        rows, tokens = tokens_BS.shape
        return TrainContext(torch.arange(tokens).expand(rows, tokens), None, ((tokens,),) * rows)

    def test_logits_agree(self) -> None:
        """Ours with their weights gives their logits, and their loss."""
        theirs, ours, _ = self._both()
        tokens_BS = self._tokens(theirs)
        with torch.no_grad():
            result = theirs(input_ids=tokens_BS, labels=tokens_BS)
            hidden_BSD = ours(tokens_BS, self._context(tokens_BS))
            error = float((ours.project(hidden_BSD) - result.logits).abs().max())
            keep("parity", error <= self.tolerance, f"logits differ by {error:.2e}; {self.tolerance:.0e} is allowed.")
            labels_N = tokens_BS[:, 1:].flatten()
            loss = ops.cross_entropy(hidden_BSD[:, :-1].flatten(0, 1), ours.head_weight_VD, labels_N) / labels_N.numel()
        keep(
            "parity",
            abs(float(loss) - float(result.loss)) <= self.tolerance,
            f"the loss is {float(loss):.7f} and theirs {float(result.loss):.7f}.",
        )

    def test_gradients_agree(self) -> None:
        """The loss's gradients, carried over by the table, are theirs."""
        theirs, ours, table = self._both()
        tokens_BS = self._tokens(theirs)
        theirs(input_ids=tokens_BS, labels=tokens_BS).loss.backward()
        hidden_BSD, labels_N = ours(tokens_BS, self._context(tokens_BS)), tokens_BS[:, 1:].flatten()
        (ops.cross_entropy(hidden_BSD[:, :-1].flatten(0, 1), ours.head_weight_VD, labels_N) / labels_N.numel()).backward()
        gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
        converted = self._convert(table, ours, self.as_files({**gradients, **persistent_buffers(theirs)}), "import", theirs)
        for name, parameter in ours.named_parameters():
            error = float((parameter.grad - converted[name]).abs().max() / converted[name].abs().max().clamp_min(1e-12))
            keep("parity", error <= 20 * self.tolerance, f"the gradient of {name} differs by {error:.2e} relative.")

    def test_export_gives_their_weights_back(self) -> None:
        """Export after import is the identity, and their class takes it strictly."""
        theirs, ours, table = self._both()
        exported = self._convert(table, ours, {**dict(ours.named_parameters()), **persistent_buffers(ours)}, "export", theirs)
        state = self.as_files(theirs.state_dict())
        changed = [name for name, tensor in exported.items() if not torch.equal(tensor, state[name])]
        keep("parity", not changed, f"export after import changes {changed[:3]}.")
        tied = bool(getattr(theirs.config, "tie_word_embeddings", False))
        missing = [name for name in self.as_files(dict(theirs.named_parameters())) if name not in exported]
        keep("parity", not missing, f"export leaves out {missing[:3]} (tied: {tied}).")
