"""Speculative decoding: drafters and the verify rule."""
