"""Rendering of records: tables, lines, Markdown, pictures.  The last layer before pytest's side."""
