"""The model class that vLLM runs: any family of this platform, as the family is.

vLLM's flat [T] tokens and positions become one row of documents, `project` makes the logits, and the mixers' caches are layers of vLLM's cache manager. Parameters keep their canonical names.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from intarsia import device as devices
from intarsia import ops
from intarsia.errors import PluginError, UsageError, did_you_mean
from intarsia.plugins import current, verify_child
from intarsia_generation.engine.build import make_plain
from intarsia_generation.engine.routes import has_routers
from intarsia_rl.weights import build
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context

from intarsia_vllm import folder
from intarsia_vllm.backend import CacheLayer, PagedMetadata
from intarsia_vllm.context import PagedContext, specs_of
from intarsia_vllm.worker import RouteStore, recording


class IntarsiaForCausalLM(nn.Module):
    """A family in vLLM (`vllm.model_executor.models.VllmModelForTextGeneration`). Stability: provisional.

    Built from the folder that `folder.write` made. It has no weights until `fill_initial` or an update gives it some, and refuses to compute anything before.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        settings = vllm_config.model_config
        parallel = vllm_config.parallel_config
        if parallel.tensor_parallel_size * parallel.pipeline_parallel_size > 1:
            raise UsageError(
                "Intarsia's models run in vLLM on one device each: set tensor_parallel_size and pipeline_parallel_size to 1, and start several generators."
            )
        self.plugins = current()
        verify_child(self.plugins)
        self.recipe, facts = folder.read(settings.model, self.plugins)
        self.initial, self.invariant = bool(facts.get("initial")), bool(facts.get("invariant"))
        place = torch.device(vllm_config.device_config.device)
        name = str(settings.dtype).removeprefix("torch.")
        self.choices = ops.select(dict(self.recipe.kernels), self.plugins, devices.capabilities(), name, invariant=self.invariant).choices
        self.model: Any = build.build_model(self.recipe, self.plugins, place, settings.dtype)
        if self.invariant:
            make_plain(self.model)
        self.specs = specs_of(self.model)
        # Not under the mixers' own names: vLLM reads a layer's number out of them.
        self.caches = {mixer: CacheLayer(vllm_config, f"mixer.{number}", spec) for number, (mixer, spec) in enumerate(self.specs.items())}
        self.version = -1
        self.failure: list[str] | None = None
        self.routes: RouteStore | None = None

    def attach(self, runner: Any) -> None:
        """Learn of the runner, which knows whose tokens are computed: a mixture of experts reports their routes by it."""
        if self.routes is None and has_routers(self.model):
            self.routes = RouteStore(runner)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """Prompts as embeddings are not served: a family enters by tokens."""
        raise UsageError("Intarsia's models take tokens, not embeddings: give prompts as token ids.")

    def forward(
        self, input_ids: Tensor, positions: Tensor, intermediate_tensors: Any = None, inputs_embeds: Tensor | None = None, **settings: Any
    ) -> Tensor:
        """Hidden states [T, D] of the new tokens of all requests."""
        if inputs_embeds is not None or input_ids is None:
            self.embed_input_ids(input_ids)
        metadata = self._metadata()
        used = len(input_ids) if metadata is None else metadata.starts[-1]  # vLLM may pad behind the last request
        context = PagedContext(positions[:used].long(), self.specs, self.caches, metadata, together=self.invariant)
        with ops.installed(self.choices), recording(self.routes if metadata is not None else None) as recorded:
            hidden_TD = self.model(input_ids[None, :used], context)[0]
        if recorded is not None and metadata is not None and self.routes is not None:
            self.routes.record(metadata, recorded)
        return hidden_TD if used == len(input_ids) else nn.functional.pad(hidden_TD, (0, 0, 0, len(input_ids) - used))

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Logits [N, V]."""
        with ops.installed(self.choices):
            return self.model.project(hidden_states[None])[0]

    def fill_initial(self) -> None:
        """Take the run's initial weights as version 0, where the folder asks for them."""
        if self.initial:
            build.fill_initial(self.model, self.recipe, self.plugins)
            self.version = 0

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Copy tensors by canonical name. UsageError for a name or a shape that the model does not have; returns the names."""
        targets = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        taken = set()
        with torch.no_grad():
            for name, tensor in weights:
                if name not in targets:
                    raise UsageError(f"The model has no parameter {name!r}. {did_you_mean(name, targets)}")
                if targets[name].shape != tensor.shape:
                    raise UsageError(f"{name} is {list(tensor.shape)}; the model's is {list(targets[name].shape)}.")
                targets[name].copy_(tensor)
                taken.add(name)
        return taken

    def _metadata(self) -> PagedMetadata | None:
        """This step's requests; None in a pass that vLLM makes to measure."""
        found: Any = get_forward_context().attn_metadata
        if found is None:
            return None
        groups = {id(each): each for each in (found if isinstance(found, dict) else found[0]).values()}
        if len(groups) > 1:
            raise PluginError("vLLM put this model's caches into several groups, which the integration does not expect.")
        return next(iter(groups.values()))
