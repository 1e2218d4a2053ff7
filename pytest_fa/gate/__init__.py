"""Is it faster than the baseline by a ratio: intervals over processes, two looks, a verdict of three.  No torch."""
