"""Run policies that others trained, in other simulators, and see why they fall."""
