"""Measuring on this machine, for `ringcomm tune`, `ringcomm doctor` and benchmarks/."""
