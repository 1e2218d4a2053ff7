"""Record types, the files they are written to, and the machine and source they describe.  Does not import torch."""

from pytest_fa.records import earlier as _earlier  # noqa: F401  # adds the old names of fields to the record types
