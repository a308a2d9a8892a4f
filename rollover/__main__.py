"""``python -m rollover``."""

import sys

from rollover.cli import main

if __name__ == "__main__":
    sys.exit(main())
