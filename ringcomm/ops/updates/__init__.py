"""Updates of weights: by gradients that are never whole, and inside a reduction over ranks."""
