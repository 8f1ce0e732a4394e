"""Our mixers' caches as layers of vLLM: what its scheduler and its cache manager ask of an attention layer, and reading and writing the blocks.

vLLM owns the blocks: which tokens of which request lie where, what is shared, what is dropped. Attention itself is `ops.attention`, called by the context.

Shape suffixes: T new tokens of all requests, E entries (kept tokens of all requests, one behind another), N blocks, P tokens in a block, K heads and W width of an entry.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from intarsia.contracts import MixerSpec
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImplBase,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec


@dataclasses.dataclass(eq=False)
class PagedMetadata(AttentionMetadata):
    """One step's requests. Request r has the new tokens `starts[r]` to `starts[r + 1]`, and with them `lengths[r]` tokens in all; its blocks are `blocks_RN[r]`."""

    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    slots_T: Tensor
    blocks_RN: Tensor
    block: int

    @property
    def counts(self) -> tuple[int, ...]:
        """New tokens of each request."""
        return tuple(end - start for start, end in zip(self.starts, self.starts[1:], strict=False))

    @functools.cached_property
    def places_E(self) -> tuple[Tensor, Tensor]:
        """Block and offset of every entry, request after request."""
        device = self.blocks_RN.device
        positions_E = torch.cat([torch.arange(length, device=device) for length in self.lengths])
        requests_E = torch.repeat_interleave(torch.arange(len(self.lengths), device=device), torch.tensor(self.lengths, device=device))
        return self.blocks_RN[requests_E, positions_E // self.block].long(), positions_E % self.block


class PagedBuilder(AttentionMetadataBuilder[PagedMetadata]):
    """Makes a step's metadata of what vLLM knows of it."""

    def __init__(self, kv_cache_spec: KVCacheSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False) -> PagedMetadata:
        """One for all layers of a group of caches."""
        common = common_attn_metadata
        requests, tokens = common.num_reqs, common.num_actual_tokens
        return PagedMetadata(
            starts=tuple(common.query_start_loc_cpu[: requests + 1].tolist()),
            lengths=tuple(common.seq_lens[:requests].tolist()),
            slots_T=common.slot_mapping[:tokens].long(),
            blocks_RN=common.block_table_tensor[:requests],
            block=self.kv_cache_spec.block_size,
        )


class PagedBackend(AttentionBackend):
    """Names the builder. There is no implementation in vLLM's sense: the context attends."""

    supported_dtypes = [torch.float32, torch.bfloat16, torch.float16]  # noqa: RUF012 - as vLLM declares it

    @staticmethod
    def get_name() -> str:
        """vLLM's name for backends that are not its own."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[AttentionImplBase[Any]]:
        """None."""
        raise NotImplementedError("Attention of Intarsia's models is an operator of theirs, not a layer of vLLM.")

    @staticmethod
    def get_builder_cls() -> type[PagedBuilder]:
        """The builder."""
        return PagedBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: KVCacheSpec | None = None) -> list[int | MultipleOf]:
        """Any."""
        return [MultipleOf(1)]


class CacheLayer(nn.Module, AttentionLayerBase):
    """The cache of one mixer in vLLM: of softmax attention keys and values side by side, of a latent one head of its width.

    A window does not bound it: vLLM keeps all blocks of a request, and the mask leaves out what lies before.
    """

    def __init__(self, vllm_config: VllmConfig, name: str, spec: MixerSpec) -> None:
        super().__init__()
        self.name = name
        self.widths = tuple(cache.shape[-1] for cache in spec.caches)
        self.heads = spec.caches[0].shape[0] if spec.kind == "softmax" else 1
        self.dtype = getattr(torch, spec.caches[0].dtype)
        self.kv_cache = torch.tensor([])
        vllm_config.compilation_config.static_forward_context[name] = self

    def get_attn_backend(self) -> type[AttentionBackend]:
        """Ours."""
        return PagedBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        """So many bytes for each token."""
        key, *value = self.widths
        return FullAttentionSpec(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=self.heads,
            head_size=key,
            head_size_v=value[0] if value else 0,
            dtype=self.dtype,
        )

    def exchange(self, new_TKW: Tensor, metadata: PagedMetadata) -> Tensor:
        """Keep the new tokens' entries [T, K, W]; returns all entries of all requests, [E, K, W]."""
        cache_NKPW = self.kv_cache
        cache_NKPW[metadata.slots_T // metadata.block, :, metadata.slots_T % metadata.block] = new_TKW.to(cache_NKPW.dtype)
        blocks_E, offsets_E = metadata.places_E
        return cache_NKPW[blocks_E, :, offsets_E]
