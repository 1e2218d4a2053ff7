"""Variants, cases and suites, and the plan that pairs them.  Imports neither torch nor pytest."""
