"""Small inputs made after public bug reports: a report that once failed stays a test."""
