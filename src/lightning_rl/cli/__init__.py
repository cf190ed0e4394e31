"""The command line: what is typed, what is read, what is trusted, what is said."""
