"""`python -m pytest_fa export`: records in the format of another tool."""
