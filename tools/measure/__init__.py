"""Measures again what the pages of this repository show, and says which of it is out of date."""
