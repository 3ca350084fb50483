"""Cross-entropy over whole or vocab-parallel logits, and fused with the output layer."""
