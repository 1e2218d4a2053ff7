"""`python -m pytest_fa costs`: where the seconds of a run went."""
