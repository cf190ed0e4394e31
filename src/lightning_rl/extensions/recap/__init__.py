"""RECAP: label a dataset by a value function, and train a policy conditioned on the label."""
