"""Entry point of `python -m parallelize`, the command line."""

from __future__ import annotations

import sys

from parallelize.cli.main import main

__all__ = ()

if __name__ == "__main__":
    sys.exit(main())
