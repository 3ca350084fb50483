"""Cross-entropy over plain or vocabulary-parallel logits, and fused with the output layer."""
