"""GPU kernels in Triton; installed as `ringcomm.kernels`. Importing them imports triton."""
