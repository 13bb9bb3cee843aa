"""Files and batches: stored on disk, worked off in the background, safe against a kill."""
