"""Weight updates without materialized gradients, and fused with a reduction over ranks."""
