"""`python -m proxpo` is the command `proxpo`."""

import sys

from proxpo.cli import main

if __name__ == "__main__":
    sys.exit(main())
