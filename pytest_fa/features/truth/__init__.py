"""Judging against a function of the user's, in place of this package's attention."""
