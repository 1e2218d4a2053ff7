"""How long it takes: device and call time, the clock that hands samples to pytest-benchmark."""
