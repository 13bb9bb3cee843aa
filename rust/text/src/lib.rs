//! Token ids to text, incrementally.
