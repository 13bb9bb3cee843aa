"""`python -m trunkline`: the server."""

import sys

from trunkline.server.cli import main

if __name__ == "__main__":
    sys.exit(main())
