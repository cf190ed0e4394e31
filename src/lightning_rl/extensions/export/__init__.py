"""Export a trained policy, and check that the export acts like the policy."""
