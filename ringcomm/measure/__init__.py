"""Measuring on this machine, for `ringcomm tune`, `ringcomm doctor` and benchmarks/.

Forked ranks, contenders that take turns, verified operations, and what the machine did meanwhile.
`import ringcomm` does not import it.
"""
