"""`rl-cli check`: play an env, and run an iteration of a whole configuration."""
