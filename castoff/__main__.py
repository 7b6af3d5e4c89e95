"""`python -m castoff`, and the `castoff` command."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command line; Ctrl-C while it is still being imported ends with 130 too."""
    try:
        from castoff import cli

        return cli.main()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
