"""The one loop: scheduling, stepping, emitting."""
