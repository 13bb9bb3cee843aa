"""Trunkline: an LLM serving engine."""
