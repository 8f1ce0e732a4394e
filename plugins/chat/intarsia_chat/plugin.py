"""The kinds "chat template" and "tool format", their first entries, the tokenizer `templated`, and the renderer `template`. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from intarsia.contracts import Entry
from intarsia.hookspecs import hookimpl

INTARSIA_API = 1


@hookimpl
def add_hookspecs() -> Sequence[str]:
    """The kinds that this distribution owns."""
    return ["intarsia_chat.hookspecs"]


@hookimpl
def offer_tokenizers() -> Sequence[Entry]:
    """The tokenizer."""
    return [
        Entry(
            name="templated",
            config="intarsia_chat.config:TemplatedConfig",
            target="intarsia_chat.tokenizer:build",
            doc="Another tokenizer, with conversations and tools as a chat template has them.",
        )
    ]


@hookimpl(optionalhook=True)
def offer_chat_templates() -> Sequence[Entry]:
    """The templates."""
    home = "intarsia_chat.templates"
    return [
        Entry(name="chatml", target=f"{home}:chatml", doc="Plain ChatML: what was said stays, reasoning too; tools as in `hermes`."),
        Entry(
            name="qwen3", target=f"{home}:qwen3", doc="Qwen3: reasoning before the user's last question is dropped; tools as in `hermes`."
        ),
        Entry(
            name="qwen3_5",
            target=f"{home}:qwen3_5",
            doc="Qwen3.5: the prompt opens the reasoning; earlier one is dropped; tools as in `qwen_xml`.",
        ),
        Entry(
            name="llama3", target=f"{home}:llama3", doc="Llama 3.1 to 3.3: no reasoning; one call is a whole turn, as in `json_message`."
        ),
    ]


@hookimpl(optionalhook=True)
def offer_tool_formats() -> Sequence[Entry]:
    """The formats."""
    home = "intarsia_chat.formats"
    return [
        Entry(name="hermes", target=f"{home}.hermes:Hermes", doc="A JSON object between <tool_call> and </tool_call>."),
        Entry(
            name="qwen_xml",
            target=f"{home}.qwen_xml:QwenXML",
            doc="<function=NAME> and <parameter=KEY> between <tool_call> and </tool_call>.",
        ),
        Entry(name="json_message", target=f"{home}.json_message:JSONMessage", doc="A turn that is one JSON object: name and parameters."),
    ]


@hookimpl(optionalhook=True)
def offer_renderers() -> Sequence[Entry]:
    """The renderer, where reinforcement learning is installed."""
    return [
        Entry(
            name="template",
            config="intarsia_chat.rl.config:TemplateConfig",
            target="intarsia_chat.rl.renderer:build",
            doc="Turns and tools as the chat template of the tokenizer `templated` has them.",
        )
    ]
