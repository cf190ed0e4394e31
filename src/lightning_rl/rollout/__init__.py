"""The data contract: rollouts, sequences and structured actions."""
