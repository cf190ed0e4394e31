"""The command line: parse options, check settings and checkpoints, print help and reports."""
