"""One module per sub-command; see ringcomm.cli."""
