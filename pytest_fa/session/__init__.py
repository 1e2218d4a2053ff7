"""One run in pytest's own process: its plan, its builds, its case runner and its records.  Imports no torch."""
