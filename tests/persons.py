"""Persons who follow a function."""

from lightning_rl import InterventionDecision, InterventionSource


class ScriptedSource(InterventionSource):
    """A person who takes over as a function says.

    Args:
        poll: returns from (source, observation) the arguments of a decision: an action or None, and the event if any.
            It reads `episode` (from 0) and `in_charge`.
    """

    def __init__(self, poll):
        self.script, self.episode, self.in_charge = poll, -1, False

    def reset(self, seed):
        self.episode += 1

    def take_charge(self):
        self.in_charge = True

    def poll(self, observation):
        return InterventionDecision(*self.script(self, observation))
