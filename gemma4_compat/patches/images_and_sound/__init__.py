"""Images and sound."""
