"""Weights from GPU to GPU over NCCL: a generator takes versions bit for bit on its own device, one that is killed in the middle of a transfer takes its group alone with it, and one GPU for both is refused.

    pytest -m gpu -s tests/gpu/test_rl_weights_nccl_gpu.py        (two GPUs of one host; about a minute, and most of it is starting processes)

prints how fast 2 GiB get to a generator as well.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from intarsia import plugins
from intarsia.comm import SelfCommunicator
from intarsia.contracts import Init, Regions
from intarsia.errors import UsageError
from intarsia.layout import Layout
from intarsia.mesh import Mesh
from intarsia.parameters import ParameterTable
from intarsia.plugins import current
from intarsia_rl.contracts import WeightVersion
from intarsia_rl.weights.collective import Collective
from intarsia_rl.weights.config import CollectiveConfig
from intarsia_rl.weights.fill import fill, own_tensors
from intarsia_rl.weights.pair import Pair
from intarsia_testing.weight_transport import Small, Trainer, published
from torch import Tensor, nn

GPUS = torch.cuda.device_count()
LONG_S = 120.0
ROWS, COLUMNS = 2**14, 2**16

pytestmark = pytest.mark.gpu
two_gpus = pytest.mark.skipif(GPUS < 2, reason="NCCL needs a GPU for each side")


class Wide(nn.Module):
    """One large matrix of 2 GiB in bfloat16 and a small vector."""

    def __init__(self, device: str = "meta") -> None:
        super().__init__()
        for name, shape in (("large", (ROWS, COLUMNS)), ("small", (5,))):
            setattr(self, name, nn.Parameter(torch.empty(shape, dtype=torch.bfloat16, device=device), requires_grad=False))

    def regions(self) -> Regions:
        """No blocks."""
        return Regions(blocks=())

    def inits(self) -> dict[str, Init]:
        """Never drawn."""
        return dict.fromkeys(("large", "small"), Init("zeros"))


class WideTrainer:
    """As the kit's `Trainer`, of one rank that has everything on a GPU."""

    def __init__(self) -> None:
        self.model, self.mesh = Wide(), Mesh({}, SelfCommunicator("cuda:0"))
        self.table = ParameterTable.from_model(self.model, "bfloat16", "bfloat16")
        self.table.mesh = self.mesh
        self.masters = dict(Wide("cuda:0").named_parameters())
        for info in self.table.values():
            info.layout = Layout.whole(info.shape)

    def train(self, step: int) -> None:
        for name, master in self.masters.items():
            master.copy_(values(name, step))

    def parameters(self) -> dict[str, Any]:
        return self.masters

    @property
    def parts(self) -> dict[str, Any]:
        return {"model": self.model, "parameters": self, "table": self.table, "mesh": self.mesh}


def values(name: str, step: int) -> Tensor:
    """The same on every GPU: whole numbers that bfloat16 has."""
    count = ROWS * COLUMNS if name == "large" else 5
    shape = (ROWS, COLUMNS) if name == "large" else (5,)
    whole = torch.arange(count, device="cuda:0", dtype=torch.int32)
    return ((whole * (step + 3)) % 251).to(torch.bfloat16).view(shape)


def take(folder: str, way: str) -> None:
    """The generator, which sees the second GPU alone: takes versions as they come, until it is told to die in the middle of one."""
    if way == "die":
        receive, count = Pair.receive, [0]

        def dies(pair: Pair, tensor: Tensor) -> None:
            count[0] += tensor.numel() > 1
            if count[0] == 8:
                os.kill(os.getpid(), signal.SIGKILL)
            receive(pair, tensor)

        Pair.receive = dies  # type: ignore[method-assign, assignment]
    backends: list[str] = []
    begin = Pair.__init__

    def noted(pair: Pair, backend: str, *rest: Any) -> None:
        backends.append(backend)
        begin(pair, backend, *rest)

    Pair.__init__ = noted  # type: ignore[method-assign, assignment]
    model, loaded, took = Wide("cuda:0"), plugins.current(), []
    for line in sys.stdin:
        version = WeightVersion(**json.loads(line))
        torch.cuda.synchronize()
        start = time.perf_counter()
        fill(model, version, loaded)
        torch.cuda.synchronize()
        took.append(time.perf_counter() - start)
        for name, tensor in own_tensors(model).items():
            assert torch.equal(tensor, values(name, version.version)), name
        print(json.dumps({"version": version.version, "backends": backends, "seconds": took[-1]}), flush=True)


def started(folder: Path, way: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "1", "INTARSIA_PROCESS": f"generator-{way}"}
    command = [sys.executable, __file__, str(folder), way]
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def told(process: subprocess.Popen[str], version: WeightVersion) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(dataclasses.asdict(version)) + "\n")
    process.stdin.flush()


@two_gpus
def test_from_gpu_to_gpu(tmp_path: Path) -> None:
    """A generator lives through all of it; another dies in the middle of version 1, and the trainer goes on to version 2 with the first one's group as it was."""
    transport, trainer = Collective(CollectiveConfig(backend="nccl", timeout_s=LONG_S), tmp_path), WideTrainer()
    lives, dies = started(tmp_path, "live"), started(tmp_path, "die")
    answers: list[dict[str, Any]] = []
    try:
        for step in range(4):
            trainer.train(step)
            version = transport.publish(step, trainer.parts)
            assert version is not None and version.location["servers"]
            if step == 1:
                told(dies, version)
                assert dies.wait(LONG_S) == -signal.SIGKILL
            told(lives, version)
            assert lives.stdout is not None
            answers.append(json.loads(lives.stdout.readline()))
            transport.retire(step - 1)
    finally:
        for process in (lives, dies):
            process.kill()
            process.wait()
        transport.close()
    assert [answer["version"] for answer in answers] == [0, 1, 2, 3]
    assert answers[-1]["backends"] == ["nccl"]
    # The matrix is read, copied in place, read back and compared.
    gigabytes = (ROWS * COLUMNS + 5) * 2 / 1e9
    print(
        f"\ncollective over NCCL: {gigabytes:.2f} GB in the model and verified in {[round(answer['seconds'], 4) for answer in answers]} s"
    )


def test_one_gpu_for_both_is_refused_by_name(tmp_path: Path) -> None:
    """NCCL cannot be between two processes of one GPU; `auto` takes gloo there."""
    transport = Collective(CollectiveConfig(backend="nccl"), tmp_path)
    trainer = Trainer(SelfCommunicator("cuda:0"))
    version = transport.publish(0, trainer.parts)
    assert version is not None
    try:
        with pytest.raises(UsageError, match="trainer and generator share one GPU"):
            fill(Small().to_empty(device="cuda:0"), version, current())
        with pytest.raises(UsageError, match="the generator has its tensors on the device 'cpu'"):
            fill(Small().to_empty(device="cpu"), version, current())
    finally:
        transport.close()
    transport = Collective(CollectiveConfig(), tmp_path)
    version = transport.publish(0, trainer.parts)
    assert version is not None
    for device in ("cuda:0", "cpu"):
        model = Small().to_empty(device=device)
        fill(model, version, current())
        assert all(torch.equal(tensor.cpu(), published(0)[name]) for name, tensor in own_tensors(model).items())
    transport.close()


if __name__ == "__main__":
    take(*sys.argv[1:])
