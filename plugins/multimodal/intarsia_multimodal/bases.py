"""The base of processors' settings. Torch-free. Stability: provisional."""

from intarsia_data.bases import ProcessorConfig

__all__ = ["ProcessorConfig"]
