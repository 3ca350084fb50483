"""The exit codes of everything that measures."""

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_WRONG_RESULTS = 3
EXIT_BEREFT = 4  # of a rank that has lost another, which says why itself
EXIT_INTERRUPTED = 130
