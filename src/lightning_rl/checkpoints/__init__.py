"""Save runs, check checkpoints, and rebuild policies from them."""
