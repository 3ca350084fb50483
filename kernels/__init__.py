"""GPU kernels in Triton; installed as `ringcomm.kernels`. There are none yet."""
