"""Renders records as tables, lines, Markdown and pictures."""
