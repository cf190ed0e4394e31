"""The same steps by compiled graphs: all that is about a machine."""
