"""Tests of the gate on data with a known true ratio."""
