"""The version: setup.py reads it from here, and so does everybody else."""

__version__ = "0.1.0"
