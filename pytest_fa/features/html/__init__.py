"""The report of a set of records: one HTML file without scripts, which opens offline."""
