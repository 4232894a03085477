"""Everything that depends on history, changed only by committed transactions."""
