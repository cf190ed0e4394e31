"""Interventions by a person, and the devices for them."""
