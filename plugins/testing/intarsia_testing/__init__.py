"""The conformance kit: a pytest plugin and one class for each contract, which say in words which promise of the contract a plugin breaks.

    from intarsia_testing import StorageConformance

    class TestBucket(StorageConformance):
        entry = "acme-bucket:bucket"

Importing the package imports no torch: each class is imported when it is asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from intarsia_testing.base import Conformance
    from intarsia_testing.checkpoint_backend import CheckpointBackendConformance
    from intarsia_testing.data_source import DataSourceConformance
    from intarsia_testing.dispatcher import DispatcherConformance
    from intarsia_testing.environment import EnvironmentConformance
    from intarsia_testing.generator import GeneratorConformance
    from intarsia_testing.kernel import KernelConformance
    from intarsia_testing.model import ModelConformance
    from intarsia_testing.optimizer import OptimizerConformance
    from intarsia_testing.parity import ParityTests
    from intarsia_testing.pipeline_schedule import PipelineScheduleConformance
    from intarsia_testing.placement import PlacementConformance
    from intarsia_testing.processor import ProcessorConformance
    from intarsia_testing.role import RoleConformance
    from intarsia_testing.sandbox import SandboxConformance
    from intarsia_testing.storage import StorageConformance
    from intarsia_testing.transport import TransportConformance
    from intarsia_testing.weight_transport import WeightTransportConformance

__version__ = "0.1.0.dev0"

__all__ = [
    "CheckpointBackendConformance",
    "Conformance",
    "DataSourceConformance",
    "DispatcherConformance",
    "EnvironmentConformance",
    "GeneratorConformance",
    "KernelConformance",
    "ModelConformance",
    "OptimizerConformance",
    "ParityTests",
    "PipelineScheduleConformance",
    "PlacementConformance",
    "ProcessorConformance",
    "RoleConformance",
    "SandboxConformance",
    "StorageConformance",
    "TransportConformance",
    "WeightTransportConformance",
]

_MODULES = {
    "CheckpointBackendConformance": "checkpoint_backend",
    "Conformance": "base",
    "DataSourceConformance": "data_source",
    "DispatcherConformance": "dispatcher",
    "EnvironmentConformance": "environment",
    "GeneratorConformance": "generator",
    "KernelConformance": "kernel",
    "ModelConformance": "model",
    "OptimizerConformance": "optimizer",
    "ParityTests": "parity",
    "PipelineScheduleConformance": "pipeline_schedule",
    "PlacementConformance": "placement",
    "ProcessorConformance": "processor",
    "RoleConformance": "role",
    "SandboxConformance": "sandbox",
    "StorageConformance": "storage",
    "TransportConformance": "transport",
    "WeightTransportConformance": "weight_transport",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
