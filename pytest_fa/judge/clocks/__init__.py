"""The judge's clocks: period, call time, cold time, launch overhead, profiler time."""
