"""Fail when a source file has grown past the size where it stops being readable.

Run as a script by `make lint`; `test_packaging.py` does not depend on it.
"""

import subprocess
import sys
from pathlib import Path

LIMITS = {".py": 500, ".rs": 800}


def main() -> int:
    """Print every file above its limit; return their number."""
    names = subprocess.run(
        ["git", "ls-files", "*.py", "*.rs"], check=True, capture_output=True, text=True
    ).stdout.split()
    too_long = 0
    for name in names:
        lines = len(Path(name).read_text().splitlines())
        limit = LIMITS[Path(name).suffix]
        if lines > limit:
            print(f"{name} has {lines} lines, limit is {limit}: split it by responsibility")
            too_long += 1
    return too_long


if __name__ == "__main__":
    sys.exit(main())
