"""The range of each kind of figure in a record.  A line with a figure outside its range is refused when it is read.

The ranges are much wider than anything that can be measured.  Within them, sums, squares and ratios of figures neither
overflow nor divide by zero.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

Us = Annotated[float, msgspec.Meta(ge=0, lt=1e12)]  # microseconds; 1e12 us are 11 days
PositiveUs = Annotated[float, msgspec.Meta(ge=1e-6, lt=1e12)]  # a time that others are divided by; 1e-6 us are 1 ps
SignedUs = Annotated[float, msgspec.Meta(gt=-1e12, lt=1e12)]  # the difference of two times
Seconds = Annotated[float, msgspec.Meta(ge=0, lt=1e9)]
Rate = Annotated[float, msgspec.Meta(ge=1e-9, lt=1e12)]  # GB/s or TFLOP/s
LogRatio = Annotated[float, msgspec.Meta(ge=-100, le=100)]  # of two times
Real = Annotated[float, msgspec.Meta(gt=-1e100, lt=1e100)]  # errors, also those of wrong outputs, and counters
Natural = Annotated[int, msgspec.Meta(ge=0, le=2**53)]  # counts and bytes; each of them is exact as a float
Whole = Annotated[int, msgspec.Meta(ge=-(2**53), le=2**53)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=1000)]
