"""The shipped tests: `pytest --pyargs pytest_fa.suite`."""
