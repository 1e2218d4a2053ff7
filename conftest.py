"""Nothing is needed here: pytest finds pytest-fa through its entry point.  Fixtures and hooks of your own go below."""
