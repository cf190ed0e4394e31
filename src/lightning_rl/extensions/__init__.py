"""Extensions: each may be deleted, and the core works without it."""
