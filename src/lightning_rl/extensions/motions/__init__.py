"""Reference motions: a robot learns to move as a recording does."""
