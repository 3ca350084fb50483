"""What a model is, asked once: names, owners, memory, parts, equal starts and refusals."""
