"""One module per kind of operation that `ringcomm bench` measures; see ringcomm.cli."""
