"""Real robots: a process that owns the robot, an env, a leader arm, and a stand-in for tests."""
