"""`python -m ringcomm`."""

import sys

from ringcomm.cli import main

if __name__ == "__main__":
    sys.exit(main())
