"""Judge policies on tasks, episode by episode, and compare two of them."""
