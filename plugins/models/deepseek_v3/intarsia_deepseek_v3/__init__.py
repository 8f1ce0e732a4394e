"""DeepSeek-V3, Moonlight-16B and DeepSeek-V2-Lite: latent attention, mixtures of experts, multi-token prediction."""

__version__ = "0.1.0.dev0"
