"""Run mypy over every first-party package, one call. Run: python tools/typecheck.py [mypy options]"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    """Collect the packages that requirements.txt installs and hand them to mypy."""
    folders = [ROOT / line.split()[1] for line in (ROOT / "requirements.txt").read_text().splitlines() if line.startswith("-e")]
    packages = sorted(init.parent.name for folder in folders for init in folder.glob("*/__init__.py"))
    command = [sys.executable, "-m", "mypy", *sys.argv[1:]]
    for package in packages:
        command += ["-p", package]
    return subprocess.call(command, cwd=ROOT)


if __name__ == "__main__":
    sys.exit(main())
