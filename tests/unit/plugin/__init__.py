"""Tests of the plugin's own functions, without a run of pytest."""
