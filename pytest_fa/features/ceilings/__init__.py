"""`python -m pytest_fa ceilings`: measures the peak rates of a GPU."""
