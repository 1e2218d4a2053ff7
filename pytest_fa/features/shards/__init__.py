"""`--fa-shard`, and `python -m pytest_fa records merge`: one run on several machines."""
