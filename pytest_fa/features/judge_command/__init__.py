"""`python -m pytest_fa judge`: one variant, judged and gated under a configuration of its own; one document."""
