"""Text → tokens and loss mask → the target's features on disk."""
