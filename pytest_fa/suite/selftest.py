"""The file of `pytest --fa-selftest`, whose test the self-test adds."""
