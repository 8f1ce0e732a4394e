"""Settings of the source and the loader `preferences`. Torch-free."""

from __future__ import annotations

import chz
from intarsia.config.bases import DataSourceConfig, LoaderConfig
from intarsia.errors import UsageError, did_you_mean

TOO_LONG = ("refuse", "skip")


@chz.chz(typecheck=True)
class PreferencesConfig(LoaderConfig):
    """Batches of pairs: each of train.global_batch samples is a pair, whose two documents are trained on together."""

    reference_steps: int | None = chz.field(
        default=None,
        doc="Steps whose pairs get log-probabilities of the reference, the run's initial weights, before the first step; none: train.steps. A run that is to be made longer later needs them for the later steps as well.",
    )
    too_long: str = chz.field(
        default="refuse", doc="Pairs with a document longer than train.sequence_length: refuse stops, skip leaves them out."
    )

    @chz.validate
    def _choices_exist(self) -> None:
        if self.too_long not in TOO_LONG:
            raise UsageError(f"data.loader.too_long is {self.too_long!r}. {did_you_mean(self.too_long, TOO_LONG)}")
        if self.reference_steps is not None and self.reference_steps < 0:
            raise UsageError(f"data.loader.reference_steps is {self.reference_steps}; it must be at least 0, or none.")


@chz.chz(typecheck=True)
class PreferenceFilesConfig(DataSourceConfig):
    """Files with one pair as a JSON object on each line, plain or .gz. The prompt and the answers are strings, lists of {role, content}, or lists of token ids."""

    paths: tuple[str, ...] = chz.field(doc="Files or globs (** goes into folders). Each must match something.")
    prompt: str = chz.field(
        default="prompt",
        doc="The field of what comes before. A record may lack it where both answers are whole conversations: what they have in common is the prompt then.",
    )
    chosen: str = chz.field(default="chosen", doc="The field of the answer that is preferred.")
    rejected: str = chz.field(default="rejected", doc="The field of the other one.")
    errors: str = chz.field(default="strict", doc="Bytes that are no UTF-8: strict stops, replace puts U+FFFD.")
