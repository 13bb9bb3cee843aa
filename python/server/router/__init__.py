"""The command `engine-router`: settings for the proxy in `rust/router`, which does the work."""
