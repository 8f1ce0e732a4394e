"""Qwen3 gives the logits, the loss, the balance loss and the gradients of transformers' Qwen3ForCausalLM and Qwen3MoeForCausalLM."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from intarsia import logical, ops
from intarsia_testing.parity import ParityTests

pytestmark = pytest.mark.parity

SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    "attn_implementation": "eager",
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
}


def dense(**changes: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**{**SIZES, **changes}))


def sparse(**changes: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**{**SIZES, **EXPERTS, **changes}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("mlp.gate.weight"):  # The constructor leaves it at zero.
                parameter.normal_(std=0.3)
    return model


class Parity(ParityTests):
    entry = "intarsia-qwen3:qwen3"


class TestDense(Parity):
    def reference(self):
        return dense()


class TestTiedAndStretched(Parity):
    tokens = 200

    def reference(self):
        yarn = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 64}
        return dense(tie_word_embeddings=True, rope_parameters=yarn)


class TestExperts(Parity):
    """As transformers has them in memory: gate and up of all experts in one tensor."""

    test_export_gives_their_weights_back = None  # type: ignore[assignment]  # Export writes experts apart: see below.

    def reference(self):
        return sparse()


class TestExpertsApart(Parity):
    """As files have them; one layer is dense, and weights are not normalised."""

    def reference(self):
        return sparse(norm_topk_prob=False, num_hidden_layers=3, mlp_only_layers=[1])

    def as_files(self, tensors):
        out = {}
        for name, tensor in tensors.items():
            base = name.rpartition("experts.")[0] + "experts."
            if name.endswith("experts.gate_up_proj"):
                for e, both in enumerate(tensor):
                    out[f"{base}{e}.gate_proj.weight"], out[f"{base}{e}.up_proj.weight"] = both.chunk(2)
            elif name.endswith("experts.down_proj"):
                out |= {f"{base}{e}.down_proj.weight": one for e, one in enumerate(tensor)}
            else:
                out[name] = tensor
        return out


class TestBalanceLoss(Parity):
    """With router logits requested: the loss of all layers together, padding left out, and every gradient of the sum of both losses."""

    COEFFICIENT = 0.5

    def reference(self):
        return sparse(num_hidden_layers=3, router_aux_loss_coef=self.COEFFICIENT)

    test_logits_agree = test_export_gives_their_weights_back = None  # type: ignore[assignment]
    test_greedy_tokens_agree = test_folders_go_round = None  # type: ignore[assignment]

    @pytest.mark.parametrize("padding", [0, 7])
    def test_gradients_agree(self, padding: int) -> None:
        theirs, ours, table = self._both()
        ours.train()
        tokens_BS = self._tokens(theirs)
        mask_BS = torch.ones_like(tokens_BS)
        mask_BS[1, self.tokens - padding :] = 0
        labels_BS = torch.where(mask_BS.bool(), tokens_BS, -100)
        result = theirs(input_ids=tokens_BS, attention_mask=mask_BS, labels=labels_BS, output_router_logits=True)
        result.loss.backward()

        context = self._context(tokens_BS)
        if padding:
            context.extra = {"padding_BS": ~mask_BS.bool()}
        count = int(mask_BS.sum())
        # The trainer divides sums over tokens by the number of trained ones; theirs has the loss's mean over those, and the balance loss's over all that are no padding.
        with logical.micro_batch(1 / count) as sums:
            hidden_BSD = ours(tokens_BS, context)
            labels_N = labels_BS[:, 1:].flatten()
            loss = ops.cross_entropy(hidden_BSD[:, :-1].flatten(0, 1), ours.head_weight_VD, labels_N) / (labels_N != -100).sum()
            loss.backward()
        balance = sums["moe.joint_loss"].item() / count
        assert balance == pytest.approx(self.COEFFICIENT * result.aux_loss.item(), rel=1e-6)
        assert loss.item() + balance == pytest.approx(result.loss.item(), rel=1e-6)
        gradients = self._convert(table, ours, {name: each.grad for name, each in theirs.named_parameters()}, "import", theirs)
        errors = {n: float((p.grad - gradients[n]).abs().max() / gradients[n].abs().max()) for n, p in ours.named_parameters()}
        assert max(errors.values()) < 1e-5, max(errors.items(), key=lambda each: each[1])
