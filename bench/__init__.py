"""Ours against the others, measured side by side."""
