"""What must not import torch, and so is outside of the package: entry points and options."""
