"""`ringcomm doctor`: what this machine offers, and how a group of ringcomm runs on it."""
