"""Decoder architectures."""
