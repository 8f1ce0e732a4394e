"""Settings of the renderer `template`. Torch-free."""

from __future__ import annotations

import chz
from intarsia_rl.bases import RendererConfig


@chz.chz(typecheck=True)
class TemplateConfig(RendererConfig):
    """Turns and tools as the chat template of the tokenizer `templated` has them."""
