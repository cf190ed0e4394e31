"""Films of evaluations."""
