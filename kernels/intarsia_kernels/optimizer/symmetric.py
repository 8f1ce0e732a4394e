"""Symmetric products of batches of matrices: several strategies, and the one that is fastest for a shape. B matrices, M rows and columns, K summed.

    vendor  a whole product by the BLAS library: twice the arithmetic, any shape
    rows    block rows of the lower triangle by the BLAS library, then one pass that mirrors
    tiles   tiles of the lower triangle in Triton, each stored twice; the only ones that can say what rounding loses

Which one a call takes is measured the first time its shape is seen on a device (a few milliseconds besides compilation), kept for the process, and listed by `choices()`.
A strategy that fails, or whose result differs from the vendor's, is not chosen and its reason is kept. While a CUDA graph is captured
nothing can be measured: an unseen shape then takes the first that can, so run a step once before capturing it.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from intarsia_kernels.optimizer import reference

TOLERANCE = 4e-3
"""Largest ||C - C0|| / ||C0|| between a strategy and the vendor's product of the same operands: both sum in float32 and round once to 16 bits."""

WARMUP, REPEAT = 2, 5


@dataclasses.dataclass(frozen=True)
class Strategy:
    """One way to compute `reference.symmetric_product`. `multiple` and `depth`: what M and K are multiples of."""

    name: str
    run: Callable[..., None]
    multiple: int = 1
    depth: int = 1
    needs_triton: bool = True
    loses: bool = False

    def refuses(self, x: Tensor, out_BMM: Tensor, transposed: bool, loses: bool = False) -> str | None:
        """Why it cannot take a call."""
        rows, depth = out_BMM.shape[-1], x.shape[1] if transposed else x.shape[2]
        if rows % self.multiple or depth % self.depth:
            return f"{rows} rows and a depth of {depth} are not multiples of {self.multiple} and {self.depth}"
        if loses and not self.loses:
            return "it cannot say what rounding loses"
        if not self.needs_triton:
            return None
        if x.dtype not in (torch.float16, torch.bfloat16):
            return f"it multiplies float16 and bfloat16, not {x.dtype}"
        if not (x.is_contiguous() and out_BMM.is_contiguous()):
            return "operands are not contiguous"
        has = torch.cuda.get_device_capability(x.device)
        if has < (9, 0):
            return f"the device has compute capability {has[0]}.{has[1]}"
        return None


@dataclasses.dataclass(frozen=True)
class Choice:
    """What was chosen for a shape: the strategy's name, milliseconds of each that ran, and why each other did not."""

    strategy: str
    milliseconds: dict[str, float]
    refused: dict[str, str]


Addends = Sequence[tuple[Tensor, float]]


def _vendor(
    x: Tensor, y: Tensor, out_BMM: Tensor, transposed: bool, alpha: float, addends: Addends, gamma: float, lost_BMM: Tensor | None,
    factors_B: Tensor | None = None, dropped: int = 0,
) -> None:  # fmt: skip
    left, right = (x.mT, y) if transposed else (x, y.mT)
    first, beta = addends[0] if addends else (out_BMM, 0.0)
    torch.baddbmm(first, left, right, beta=beta, alpha=alpha, out=out_BMM)
    _add_rest(out_BMM, addends, gamma, factors_B)


def _rows(
    x: Tensor,
    y: Tensor,
    out_BMM: Tensor,
    transposed: bool,
    alpha: float,
    addends: Addends,
    gamma: float,
    lost_BMM: Tensor | None,
    factors_B: Tensor | None = None,
    dropped: int = 0,
    *,
    bands: int,
) -> None:
    from intarsia_kernels.optimizer import tiles

    left, right = (x.mT, y) if transposed else (x, y.mT)
    height = out_BMM.shape[-1] // bands
    first, beta = addends[0] if addends else (out_BMM, 0.0)
    for start in range(0, out_BMM.shape[-1], height):
        part, add = (each[:, start : start + height, : start + height] for each in (out_BMM, first))
        band, strip = left[:, start : start + height], right[..., : start + height]
        torch.baddbmm(add, band, strip, beta=beta, alpha=alpha, out=part)
    tiles.mirror(out_BMM, height)
    _add_rest(out_BMM, addends, gamma, factors_B)


def _add_rest(out_BMM: Tensor, addends: Addends, gamma: float, factors_B: Tensor | None) -> None:
    for addend_BMM, beta in addends[1:]:
        out_BMM.add_(addend_BMM, alpha=beta)
    if gamma:
        out_BMM.diagonal(dim1=-2, dim2=-1).add_(gamma)
    if factors_B is not None:
        out_BMM.mul_(factors_B[:, None, None])


def _tiles(*arguments: Any, **settings: Any) -> None:
    from intarsia_kernels.optimizer import tiles

    tiles.product(*arguments, **settings)


STRATEGIES = {
    strategy.name: strategy
    for strategy in (
        Strategy("vendor", _vendor, needs_triton=False),
        Strategy("rows, 4 bands", functools.partial(_rows, bands=4), multiple=1024, depth=64),
        Strategy("rows, 8 bands", functools.partial(_rows, bands=8), multiple=2048, depth=64),
        Strategy("tiles of 128", functools.partial(_tiles, columns=128, stages=3, warps=4), multiple=128, depth=64, loses=True),
        Strategy("tiles of 256", functools.partial(_tiles, columns=256, stages=3, warps=8), multiple=256, depth=64, loses=True),
    )
}

_choices: dict[tuple[Any, ...], Choice] = {}


def choices() -> dict[tuple[Any, ...], Choice]:
    """What this process chose, by (device, B, M, K, dtype, transposed, addends, whether it says what is lost)."""
    return dict(_choices)


def can_say_what_is_lost(x: Tensor, rows: int, depth: int) -> bool:
    """Whether some strategy fills `lost_BMM` for contiguous matrices of `x`'s device and dtype."""
    if not x.is_cuda:
        return True
    out_BMM, of_x = x.new_empty(0, rows, rows), x.new_empty(0, rows, depth)
    return any(strategy.refuses(of_x, out_BMM, False, True) is None for strategy in STRATEGIES.values()) and has_triton()


@functools.cache
def has_triton() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def symmetric_product(
    x: Tensor,
    y: Tensor,
    out_BMM: Tensor,
    *,
    transposed: bool = False,
    alpha: float = 1.0,
    addends: Addends = (),
    gamma: float = 0.0,
    lost_BMM: Tensor | None = None,
    factors_B: Tensor | None = None,
    dropped: int = 0,
    strategy: str | None = None,
) -> None:
    """As `reference.symmetric_product`, by `strategy` or the fastest for the shape. Off CUDA the reference. `out_BMM` and `lost_BMM` are none of the operands, and
    there are two addends at most."""
    if not x.is_cuda:
        how = {"transposed": transposed, "alpha": alpha, "addends": addends, "gamma": gamma, "lost_BMM": lost_BMM}
        reference.symmetric_product(x, y, out_BMM, **how, factors_B=factors_B, dropped=dropped)  # type: ignore[arg-type]
        return
    arguments = (x, y, out_BMM, transposed, alpha, addends, gamma, lost_BMM, factors_B, dropped)
    if strategy is None:
        depth = x.shape[1 if transposed else 2]
        key = (x.device.index, *out_BMM.shape[:2], depth, x.dtype, transposed, len(addends), lost_BMM is not None)
        chosen = _choices.get(key)
        if chosen is None and not torch.cuda.is_current_stream_capturing():
            chosen = _choices[key] = _measure(arguments)
        strategy = chosen.strategy if chosen else _unmeasured(arguments)
    STRATEGIES[strategy].run(*arguments)


def _unmeasured(arguments: tuple[Any, ...]) -> str:
    """The first strategy that takes a call."""
    x, _, out_BMM, transposed, _, _, _, lost_BMM = arguments[:8]
    return next(name for name, strategy in STRATEGIES.items() if strategy.refuses(x, out_BMM, transposed, lost_BMM is not None) is None)


def _measure(arguments: tuple[Any, ...]) -> Choice:
    """Try every strategy on the call itself."""
    x, _, out_BMM, transposed, _, _, _, lost_BMM = arguments[:8]
    _vendor(*arguments)
    expected_BMM = out_BMM.clone()
    size = float(torch.linalg.vector_norm(expected_BMM, dtype=torch.float32))
    took: dict[str, float] = {}
    refused: dict[str, str] = {}
    for name, strategy in STRATEGIES.items():
        reason = strategy.refuses(x, out_BMM, transposed, lost_BMM is not None)
        if reason is None:
            try:
                out_BMM.fill_(float("nan"))
                strategy.run(*arguments)
                difference = float(torch.linalg.vector_norm(out_BMM - expected_BMM, dtype=torch.float32))
                if difference <= TOLERANCE * size:
                    took[name] = milliseconds(lambda strategy=strategy: strategy.run(*arguments))  # type: ignore[misc]
                else:
                    reason = f"its result differs by {difference / max(size, 1e-30):.1e} of the vendor's norm"
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
        if reason is not None:
            refused[name] = reason
    return Choice(min(took, key=took.__getitem__) if took else _unmeasured(arguments), took, refused)


def milliseconds(call: Callable[[], None], warmup: int = WARMUP, repeat: int = REPEAT) -> float:
    """Median of one call on the device, by events."""
    for _ in range(warmup):
        call()
    marks = []
    for _ in range(repeat):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        marks.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in marks)
