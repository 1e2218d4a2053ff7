"""Tests of sweeps on recorded times: the search, its shared study, and its end."""
