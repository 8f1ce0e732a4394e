"""How tokens are chosen. Torch-free."""

from __future__ import annotations

import dataclasses
from typing import Any

from intarsia.errors import UsageError


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    """Settings of a generation. Stability: provisional.

    * `temperature` divides the logits; 0 takes the likeliest token (greedy).
    * Then, in this order: `top_k` keeps the k likeliest tokens, `top_p` the smallest set of likeliest ones whose probabilities sum to at least p,
      `min_p` those at least min_p times as likely as the likeliest. None, 1 and 0 keep all.
    * `stop` are texts that end a completion, and are left out of it; `ignore_eos` goes on after an end-of-text token.
    * `seed` with the prompt's tokens and the sample's number decides every draw: neither other prompts nor the batch matter.
    """

    max_tokens: int = 128
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    seed: int = 0
    samples: int = 1

    def __post_init__(self) -> None:
        wrong = {
            f"max_tokens is {self.max_tokens}; it must be at least 1": self.max_tokens < 1,
            **wrong_choices(self),
            f"samples is {self.samples}; it must be at least 1": self.samples < 1,
            "samples is above 1, but greedy decoding gives the same text each time: set a temperature": self.greedy and self.samples > 1,
        }
        found = [text for text, is_wrong in wrong.items() if is_wrong]
        if found:
            raise UsageError(f"Generation: {'; '.join(found)}.")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0


def wrong_choices(sampling: Any) -> dict[str, bool]:
    """What may be wrong with how tokens are chosen, and whether it is: of a `SamplingConfig`, and of the `Sampling` of a request (`intarsia_rl.contracts`)."""
    return {
        f"temperature is {sampling.temperature}; it must be a number from 0 on (0 is greedy)": not 0 <= sampling.temperature < float("inf"),
        f"top_k is {sampling.top_k}; it must be at least 1, or none for all": sampling.top_k is not None and sampling.top_k < 1,
        f"top_p is {sampling.top_p}; it must be above 0 and at most 1": not 0 < sampling.top_p <= 1,
        f"min_p is {sampling.min_p}; it must be from 0 to 1": not 0 <= sampling.min_p <= 1,
        "a stop text is empty": "" in sampling.stop,
    }
