"""Measure times: period, call time, cold time, launch overhead, profiler time, paired timing, a GPU's ceilings."""
