"""The table of a run, its answer, and its failures, as the terminal shows them."""
