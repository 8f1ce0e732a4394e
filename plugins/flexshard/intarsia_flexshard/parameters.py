"""The model's own parameters: who reads them, what takes their place, and what must be true of them before."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from intarsia.errors import PluginError, UsageError
from intarsia.parameters import ParameterInfo, ParameterTable
from torch import nn

from intarsia_flexshard.assign import BucketSpec, names_here
from intarsia_flexshard.quantised import Owner

# What a parameter in the ring is marked with: its bucket's name.
MARK = "_flexshard_bucket"


def check_torch() -> None:
    """Refuse a torch whose autograd cannot be asked what it is doing. UsageError names what is missing."""
    missing = [name for name in ("_current_graph_task_id", "_will_engine_execute_node") if not hasattr(torch._C, name)]
    if missing:
        raise UsageError(
            f"FlexShard follows backward passes by torch._C.{' and torch._C.'.join(missing)}, which torch {torch.__version__} lacks. Use torch 2.11 to 2.15, or "
            "sharder=whole."
        )


def check_fresh(model: nn.Module) -> None:
    """Raise UsageError where a parameter lives in a bucket already: the model, a part of it or one around it was sharded."""
    for name, parameter in model.named_parameters():
        if hasattr(parameter, MARK):
            raise UsageError(
                f"{type(model).__name__} is sharded already, wholly or in part: {name!r} is in the bucket {getattr(parameter, MARK)!r}. A model is sharded once, "
                "from its root; give parts of it buckets of their own (sharder.buckets), or build it anew."
            )
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise UsageError(
                f"Parameter {name!r} has hooks of its own, which sharding would lose with the tensor that it replaces. Register them on the sharded model's parameters: "
                "there they see this rank's gradients, before the sum over ranks."
            )


def take_place(module: nn.Module, attribute: str, whole: nn.Parameter, bucket: str, shape: Sequence[int]) -> None:
    """Make `whole`, which will have `shape`, the module's parameter. What was set on the old one as Python attributes stays. Raises PluginError where
    the old one has another shape: cuts before the sharder did not leave what they say."""
    if getattr(module, attribute) is whole:  # A module that has several names comes by each of them.
        return
    before = tuple(getattr(module, attribute).shape)
    if before != tuple(shape):
        raise PluginError(
            f"{type(module).__name__}.{attribute} has the shape {before}, but what tensor and expert parallelism leave of it on this rank is {tuple(shape)} "
            f"(bucket {bucket!r}). Whoever writes ParameterInfo.outer gives the module a parameter of the local shape."
        )
    whole.__dict__.update(getattr(module, attribute).__dict__)
    setattr(whole, MARK, bucket)
    setattr(module, attribute, whole)


def readers_of(info: ParameterInfo, modules: Mapping[str, nn.Module]) -> list[Owner]:
    """The modules that have the parameter, and what they call it."""
    places = [name.rpartition(".") for name in names_here(info)]
    return [(modules[owner], attribute) for owner, _, attribute in places]


def read_in_forward(table: ParameterTable, modules: Mapping[str, nn.Module], outside: Collection[str]) -> dict[str, list[Owner]]:
    """By parameter who reads it; nobody where it is also read `outside` of forward."""
    return {info.name: [] if set(names_here(info)) & set(outside) else readers_of(info, modules) for info in table.values()}


def running(modules: Mapping[str, nn.Module]) -> list[str]:
    """The names of the modules that have a forward of their own: containers have none."""
    return [name for name, module in modules.items() if not isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.ParameterList))]


def check_masters(is_split: bool, table: ParameterTable, specs: Sequence[BucketSpec]) -> None:
    """Raise UsageError where masters cannot be split as asked, or halves that are not there would be moved."""
    if not is_split:
        if any(spec.offload == "low" for spec in specs):
            raise UsageError(
                "offload=low moves the low halves of split masters, and there are none. Set sharder.master=split, or offload=none."
            )
        return
    if table.dtype != "float32" or any(spec.compute != "bfloat16" for spec in specs):
        raise UsageError(
            f"sharder.master=split keeps float32 masters as bfloat16 and 16 more bits, but precision.master is {table.dtype} and precision.compute "
            f"{sorted({spec.compute for spec in specs})}. Set precision.master=float32 precision.compute=bfloat16, or sharder.master=float32."
        )
    if not hasattr(torch.Tensor, "grad_dtype"):
        raise UsageError(
            f"sharder.master=split needs gradients of another dtype than their tensor's, which torch {torch.__version__} lacks."
        )
