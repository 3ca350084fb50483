"""Measuring: ranks that are forked or joined, backends in turn, records, the machine around them.

The command `ringcomm` and the scripts in benchmarks/ share it. Nothing here is needed to
communicate, and `import ringcomm` does not import it.
"""
