"""`python -m pytest_fa compare A B`: what became faster, slower, wrong or right between two sets of records."""
