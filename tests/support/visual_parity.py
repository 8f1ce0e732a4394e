"""Parity of a family that sees with its reference class: text, images, video, and rows that mix them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from intarsia import ops
from intarsia.parameters import persistent_buffers
from intarsia_eager.context import TrainContext
from intarsia_testing.parity import ParityTests
from torch import Tensor

from tests.support.visual_samples import BATCHES, Samples, make_samples


@pytest.mark.parametrize("batch", list(BATCHES))
class VisualParity(ParityTests):
    """As `ParityTests`, over each of the batches of `visual_samples`; errors are relative to the largest number of a tensor."""

    noise = 0.1

    @pytest.fixture(autouse=True)
    def _choose(self, batch: str) -> None:
        self.batch = batch

    def _samples(self, theirs: Any) -> Samples:
        vision = theirs.config.vision_config
        return make_samples(BATCHES[self.batch], vision.in_channels * vision.temporal_patch_size * vision.patch_size**2)

    def _run(self, theirs: Any, ours: Any) -> tuple[Any, Tensor, Tensor]:
        """Their result, our logits and our loss, of the same rows."""
        samples = self._samples(theirs)
        tokens_BS = samples.tokens_BS
        rows, length = tokens_BS.shape
        context = TrainContext(torch.arange(length).expand(rows, length), None, ((length,),) * rows, extra=samples.extra)
        result = theirs(input_ids=tokens_BS, labels=tokens_BS, **samples.theirs)
        hidden_BSD = ours.eval()(tokens_BS, context)
        labels_N = tokens_BS[:, 1:].flatten()
        loss = ops.cross_entropy(hidden_BSD[:, :-1].flatten(0, 1), ours.head_weight_VD, labels_N) / labels_N.numel()
        return result, ours.project(hidden_BSD), loss

    def test_logits_agree(self) -> None:
        """Ours with their weights gives their logits, and their loss."""
        theirs, ours, _ = self._both()
        with torch.no_grad():
            result, logits_BSV, loss = self._run(theirs, ours)
        error = float((logits_BSV - result.logits).abs().max() / result.logits.abs().max())
        print(f"\n{type(self).__name__} {self.batch}: logits {error:.1e}, loss {abs(float(loss / result.loss) - 1):.1e}", end=" ")
        assert error <= self.tolerance
        assert float(loss) == pytest.approx(float(result.loss), rel=self.tolerance)

    def test_gradients_agree(self) -> None:
        """The loss's gradients, carried over by the table, are theirs: none where there is none."""
        theirs, ours, table = self._both()
        result, _, loss = self._run(theirs, ours)
        result.loss.backward()
        loss.backward()
        absent = [name for name, parameter in theirs.named_parameters() if parameter.grad is None]
        assert bool(absent) == (self.batch == "text") and all(".visual." in name for name in absent)
        gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in theirs.named_parameters()}
        converted = self._convert(table, ours, self.as_files({**gradients, **persistent_buffers(theirs)}), "import", theirs)
        worst = {}
        for name, parameter in ours.named_parameters():
            if parameter.grad is None:
                assert name.startswith("visual.") and self.batch == "text", name
                continue
            # What a bias of keys does to all scores of a query alike has no effect: its gradient is what rounding leaves.
            scale = converted[name.replace(".wk.bias", ".wv.bias")].abs().max()
            assert scale > 0, name
            worst[name] = float((parameter.grad - converted[name]).abs().max() / scale)
        name = max(worst, key=lambda each: worst[each])
        print(f"\n{type(self).__name__} {self.batch}: gradients {worst[name]:.1e} ({name})", end=" ")
        assert worst[name] <= 20 * self.tolerance, (name, worst[name])
        if self.batch == "text":
            return
        assert all(parameter.grad is not None for parameter in ours.parameters())
