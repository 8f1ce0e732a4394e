"""`python -m intarsia`, which is also what `torchrun -m intarsia` starts."""

from intarsia.cli import run

run()
