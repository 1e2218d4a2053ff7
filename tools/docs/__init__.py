"""The generator of this repository's own tables and pictures."""
