"""`python -m intarsia`, which is also what `torchrun -m intarsia` starts."""

import sys

from intarsia.cli import main

sys.exit(main())
