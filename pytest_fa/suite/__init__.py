"""The shipped tests, which `pytest --pyargs pytest_fa.suite` runs."""
