"""Tool calls: what clients may ask for, how models write them, and how output is held to it."""
