"""What vLLM's plugin group `vllm.general_plugins` calls, in each of its processes. Imports neither vLLM nor torch before that call."""

from __future__ import annotations

from intarsia.plugins import Plugins, current, import_reference

from intarsia_vllm.folder import FORMAT, architecture

MODEL = "intarsia_vllm.model:IntarsiaForCausalLM"
ENGINE = ("intarsia_vllm.weights", "PublishedWeightsEngine")


def table(plugins: Plugins | None = None) -> dict[str, str]:
    """What each installed family is called in vLLM, and the class that serves it: `{architecture: "module:Class"}`."""
    return {architecture(name): MODEL for name in (plugins or current()).registry("model").names()}


def register() -> None:
    """Tell vLLM of every installed family, of the config format and load format `intarsia`, and of the weight transfer engine of that name."""
    from vllm import ModelRegistry
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.transformers_utils.config import register_config_parser

    from intarsia_vllm.loading import FolderParser, InitialLoader
    from intarsia_vllm.worker import end_with_parent

    end_with_parent()
    for name, reference in table().items():
        # The class and not its name: of a name vLLM would learn what it can do in a further process, which takes it ten seconds.
        ModelRegistry.register_model(name, import_reference(reference))
    register_config_parser(FORMAT)(FolderParser)
    register_model_loader(FORMAT)(InitialLoader)
    WeightTransferEngineFactory.register_engine(FORMAT, *ENGINE)
