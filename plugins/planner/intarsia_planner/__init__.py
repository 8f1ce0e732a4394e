"""What a run takes and how long it lasts, before it is started."""

__version__ = "0.1.0.dev0"
