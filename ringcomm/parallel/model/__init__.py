"""What a model is, asked once for all systems."""
