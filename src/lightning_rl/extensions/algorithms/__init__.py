"""Optional algorithms, with their policies and replays."""
