"""One run, as pytest's own process sees it: what was asked for, the builds, the case runner, the records.  No torch."""
