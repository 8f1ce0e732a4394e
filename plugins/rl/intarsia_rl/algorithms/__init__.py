"""What rewards mean, and the losses. Config and algorithm modules import no torch."""
