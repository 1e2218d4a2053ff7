"""The gate, with known truth."""
