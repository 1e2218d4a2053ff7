"""`python -m pytest_fa new`: writes the folder of a new variant."""
