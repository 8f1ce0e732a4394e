"""Weights of a trainer on a GPU: digests are those of the same bytes on a CPU, and generators on CPU and GPU take them through every transport (`collective` over gloo: trainer and generator share the GPU)."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from _weights import build, change, gathered, recipe_of
from intarsia import plugins
from intarsia.comm import SelfCommunicator
from intarsia.contracts import Box
from intarsia.layout import slices
from intarsia_rl.bases import WeightTransportConfig
from intarsia_rl.weights import digest
from intarsia_rl.weights.build import build_model, fill_initial
from intarsia_rl.weights.config import CollectiveConfig, SharedMemoryConfig, SocketConfig
from intarsia_rl.weights.fill import fill, own_tensors

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8, torch.float64])
@pytest.mark.parametrize("shape", [(3 * 2**20 + 5,), (1030, 2050), (7, 33, 129), ()])
def test_digests_are_the_cpus(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = (torch.randn(shape) * 100).to(dtype)
    draw = random.Random(0)
    boxes = [Box.whole(shape)]
    if shape:
        boxes += [
            Box(start, tuple(draw.randrange(1, n - s + 1) for s, n in zip(start, shape, strict=True)))
            for start in (tuple(draw.randrange(n) for n in shape) for _ in range(6))
        ]
    for box in boxes:
        expected = digest.partial(tensor[slices(box)], shape, box)
        assert torch.equal(digest.partial(tensor.cuda()[slices(box)], shape, box).cpu(), expected)


@pytest.mark.parametrize(
    "config", [SharedMemoryConfig(), SocketConfig(), CollectiveConfig()], ids=["shared_memory", "socket", "collective"]
)
@pytest.mark.parametrize("master", ["float32", "split"])
def test_a_push_from_a_gpu(tmp_path: Path, config: WeightTransportConfig, master: str) -> None:
    resolved = recipe_of("deepseek_v3/debug", "precision.compute=bfloat16", f"sharder.master={master}")
    recipe, loaded = resolved.recipe, plugins.current()
    run = build(resolved, SelfCommunicator("cuda:0"))
    transport = loaded.build(config, tmp_path)
    version = transport.publish(0, run.parts)
    drawn = build_model(recipe, loaded, "cpu", "bfloat16")
    fill_initial(drawn, recipe, loaded)
    for device in ("cpu", "cuda"):
        taken = build_model(recipe, loaded, device, "bfloat16")
        fill(taken, version, loaded)
        assert all(torch.equal(tensor.cpu(), own_tensors(drawn)[name]) for name, tensor in own_tensors(taken).items())
    change(run, 1)
    computed = gathered(run)
    taken = build_model(recipe, loaded, "cuda", "bfloat16")
    fill(taken, transport.publish(1, run.parts), loaded)
    assert computed and all(torch.equal(own_tensors(taken)[name], tensor) for name, tensor in computed.items())
    transport.close()
