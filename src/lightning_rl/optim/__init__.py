"""Step down losses: what is minimised, the optimizer step, the books that are kept of it."""
