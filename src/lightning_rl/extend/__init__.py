"""Names for those who write algorithms, policies, envs, collectors and datasets, by role."""
