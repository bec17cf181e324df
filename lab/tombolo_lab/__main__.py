"""`python3 -m tombolo_lab`: the command `tombolo lab`."""

import sys

from tombolo_lab.cli import main

if __name__ == "__main__":
    sys.exit(main())
