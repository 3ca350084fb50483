"""GPU kernels in Triton; installed as `ringcomm.kernels`. Importing them imports triton.

Their names have no folder: `ringcomm.kernels.cross_entropy` is losses/cross_entropy.py.
"""

__path__ += [f"{__path__[0]}/{folder}" for folder in ("losses", "updates")]
