"""How a run is described, saved, checked and built again."""
