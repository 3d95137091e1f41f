"""What needs a GPU; skipped without one. Nothing here has run on a GPU yet."""
