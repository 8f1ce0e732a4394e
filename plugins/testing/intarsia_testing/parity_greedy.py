"""Greedy tokens of both sides, each with its own caches.

Ours is given their tokens as it goes on. Where it would have chosen the same ones at every step, it writes the same text by itself; where it would not, both sides' logits say whether that is a tie that
rounding decides, or an error. Shape suffixes: B rows, N tokens, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from intarsia_generation import CacheContext
from intarsia_generation.prompts import prefill
from torch import Tensor

from intarsia_testing.parity_samples import Samples


@dataclasses.dataclass(frozen=True)
class Greedy:
    """`error` is the largest difference of logits, relative to their largest number; `margin` the least distance of their chosen token's logit from the next one's, likewise; `ties` at how many
    places the sides chose differently within what rounding explains, `wrong` in words where they did beyond it (empty: nowhere)."""

    tokens: int
    error: float
    margin: float
    ties: int
    wrong: str


def their_greedy(model: Any, samples: Samples, count: int) -> tuple[Tensor, Tensor]:
    """Tokens [B, N] and logits [B, N, V] of a reference class of transformers, by its own `generate`."""
    result = model.generate(
        samples.tokens_BS,
        attention_mask=torch.ones_like(samples.tokens_BS),
        max_new_tokens=count,
        do_sample=False,
        use_cache=True,
        output_logits=True,
        return_dict_in_generate=True,
        pad_token_id=0,
        eos_token_id=None,
        **samples.theirs,
    )
    return result.sequences[:, samples.tokens_BS.shape[1] :], torch.stack(result.logits, 1).float()


def our_greedy(model: Any, samples: Samples, tokens_BN: Tensor, chunk: int) -> Tensor:
    """Our logits [B, N, V] behind the rows and each of these tokens but the last, with caches; the rows are read `chunk` tokens at a time."""
    context = CacheContext(model, len(tokens_BN), samples.tokens_BS.device, chunk)
    logits = [prefill(model, context, samples.inputs())]
    for place in range(tokens_BN.shape[1] - 1):
        context.begin([1] * len(tokens_BN))
        logits.append(model.project(model(tokens_BN[:, place : place + 1], context))[:, -1])
    return torch.stack(logits, 1)


def compare(tokens_BN: Tensor, theirs_BNV: Tensor, ours_BNV: Tensor, tolerance: float) -> Greedy:
    """Their tokens and both sides' logits. Two tokens tie where their logits are no further apart than twice what logits may differ by."""
    scale = float(theirs_BNV.abs().max())
    error = float((ours_BNV - theirs_BNV).abs().max()) / scale
    best_BN2 = theirs_BNV.topk(2, dim=-1).values
    margin = float((best_BN2[..., 0] - best_BN2[..., 1]).min()) / scale
    chosen_BN = ours_BNV.argmax(-1)
    apart_BN = (theirs_BNV.amax(-1) - theirs_BNV.gather(-1, chosen_BN[..., None])[..., 0]) / scale
    differs_BN = chosen_BN != tokens_BN
    wrong_BN = differs_BN & ~(apart_BN <= 2 * tolerance)
    wrong = ""
    if bool(wrong_BN.any()):
        row, place = (int(each[0]) for each in wrong_BN.nonzero(as_tuple=True))
        wrong = (
            f"token {place + 1} of row {row} is {int(chosen_BN[row, place])}, and theirs {int(tokens_BN[row, place])}, whose logit is {float(apart_BN[row, place]):.1e} higher (relative); logits "
            f"differ by at most {error:.1e}"
        )
    return Greedy(tokens_BN.numel(), error, margin, int((differs_BN & ~wrong_BN).sum()), wrong)
