"""`python -m ringcomm`."""

import sys

from _ringcomm.start import main

if __name__ == "__main__":
    sys.exit(main())
