"""Whether a run's loader gives what its loss learns from. Torch-free but for what is called."""

from __future__ import annotations

from intarsia.contracts import Run
from intarsia.errors import UsageError
from intarsia.plugins import current

from intarsia_rl.algorithms.config import DPOConfig


def check_gives_pairs(run: Run) -> None:
    """UsageError, before a model is built, where the loss learns from pairs and the loader is one of documents. Other loaders' batches are looked at by the loss."""
    if not isinstance(run.recipe.loss, DPOConfig):
        return
    from intarsia_data.steps import StepLoader

    if isinstance(run.parts["data"], StepLoader):
        raise UsageError(
            f"The loss `dpo` learns from pairs of answers, and the loader (`{current().entry_of(run.recipe.data.loader).name}`) gives documents. Set data.loader=preferences, whose pairs are of text alone, or "
            "another loss."
        )
