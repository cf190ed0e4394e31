"""A folder of a user: each file extends lightning_rl by one part, on its public names alone."""
