"""The chat templates of this distribution. Their texts are the .jinja files beside, which run under `transformers` as well."""

from __future__ import annotations

from importlib import resources

from intarsia_chat.contracts import ChatTemplate

IM = ("<|im_start|>", "<|im_end|>")


def _text(name: str) -> str:
    return resources.files(__name__).joinpath(f"{name}.jinja").read_text(encoding="utf-8")


def chatml() -> ChatTemplate:
    """Plain ChatML. What was said stays as it was, so that a conversation only grows."""
    return ChatTemplate("chatml", _text("chatml"), IM, ("<|endoftext|>",), "hermes")


def qwen3() -> ChatTemplate:
    """Qwen3."""
    return ChatTemplate("qwen3", _text("qwen3"), IM, ("<|endoftext|>",), "hermes")


def qwen3_5() -> ChatTemplate:
    """Qwen3.5, whose prompts open the reasoning (thinking=false: and close it)."""
    return ChatTemplate("qwen3_5", _text("qwen3_5"), IM, ("<|endoftext|>",), "qwen_xml")


def llama3() -> ChatTemplate:
    """Llama 3.1 to 3.3."""
    special = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
    return ChatTemplate("llama3", _text("llama3"), special, ("<|eom_id|>", "<|end_of_text|>"), "json_message")
