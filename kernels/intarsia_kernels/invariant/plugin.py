"""Kernels of the batch-invariant mode. They run when they are named, as `intarsia_rl`'s transform `batch_invariant` does. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from intarsia.contracts import KernelEntry
from intarsia.hookspecs import hookimpl

INTARSIA_API = 1

_HERE = "intarsia_kernels.invariant"
_BOUNDS = {"*@float32": 2e-5, "*@bfloat16": 2e-2}
_LINEAR = {**_BOUNDS, "bias_O@bfloat16": 5e-2}


def _tiled(op: str, module: str, doc: str, bounds: Mapping[str, float] = _BOUNDS) -> KernelEntry:
    """One for the CPU."""
    return KernelEntry(
        name=f"{op}/tiled",
        op=op,
        target=f"{_HERE}.{module}:{op}",
        doc=doc,
        needs=("cpu",),
        dtypes=("float32", "bfloat16"),
        bounds=bounds,
        invariant=True,
    )


def _gpu(
    name: str,
    target: str,
    doc: str,
    needs: Sequence[str] = (),
    dtypes: Sequence[str] = ("bfloat16",),
    bounds: Mapping[str, float] = _BOUNDS,
) -> KernelEntry:
    """One for a GPU."""
    return KernelEntry(
        name=name,
        op=name.partition("/")[0],
        target=f"{_HERE}.{target}",
        doc=doc,
        needs=("cuda", *needs),
        dtypes=tuple(dtypes),
        bounds=bounds,
        invariant=True,
    )


@hookimpl
def offer_kernels() -> Sequence[KernelEntry]:
    """For every operator whose reference depends on the batch: on a CPU, and on a GPU."""
    triton, wide = ("triton",), ("float32", "bfloat16")
    return [
        _tiled("linear", "linear", "Products of 16 rows, or one that was seen to give their bits.", _LINEAR),
        _tiled("attention", "attention", "Tiles of 16 queries and 32 keys at absolute positions in the document, softmax in float32."),
        _tiled("swiglu", "pointwise", "By the exponential, which is one function wherever an element lies."),
        _tiled("cross_entropy", "losses", "The sum of log-probabilities that are each independent of the batch."),
        _tiled("grouped_linear", "experts", "Each group by itself, in products of 16 rows."),
        _tiled("router_linear", "experts", "In float32, in products of 16 rows."),
        _tiled("router_sigmoid", "pointwise", "By the exponential, which is one function wherever an element lies."),
        _tiled("sigmoid_gate", "pointwise", "By the exponential, which is one function wherever an element lies."),
        _gpu(
            "linear/unsplit", "unsplit:linear", "cuBLAS without a workspace, which cannot split sums; needs CUBLAS_WORKSPACE_CONFIG=:0:0."
        ),
        _gpu(
            "linear/ascending",
            "ascending:linear",
            "Triton tiles that sum in ascending order, for many rows and for few.",
            triton,
            wide,
            _LINEAR,
        ),
        _gpu(
            "attention/blocks",
            "blocks:attention",
            "Triton: blocks of 64 keys at absolute positions, for training and decoding.",
            triton,
            wide,
        ),
        _gpu(
            "attention/blocks_flash",
            "blocks:attention_by_flash",
            "The same blocks, with the same bits; gradients of whole rows by torch's flash attention, held to one order of sums.",
            ("triton", "varlen"),
        ),
        _gpu(
            "attention/unsplit", "unsplit:attention", "Variable-length flash attention, told of 2 queries where there is one.", ("varlen",)
        ),
        _gpu("rope/fused", "rotate:rope", "Triton: all heads of a token in one pass, forward and backward.", triton, wide),
        _gpu("cross_entropy/by_linear", "losses:cross_entropy", "Logits by what is in force for linear, a token's part by its row alone."),
        _gpu("router_linear/ascending", "ascending:router_linear", "Float32 Triton tiles that sum in ascending order.", triton, wide),
    ]
