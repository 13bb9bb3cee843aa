"""Constraints on what a model may write: from a request's field to the mask of a step."""
