"""`ringcomm doctor`: what this machine offers, and what ringcomm makes of it."""
