"""A server for one of several GPUs."""

from __future__ import annotations

import os

from pytest_fa.host.client import Workers
from tests.factories import PYTHON_SOURCE
from tests.worker_jobs import JobOfSource

SAY_WHAT_IS_VISIBLE = PYTHON_SOURCE.replace("import torch\n", "import os\n\nimport torch\n", 1).replace(
    "    scores =", "    raise ValueError(f\"sees {os.environ['CUDA_VISIBLE_DEVICES']}\")\n    scores =", 1
)


def test_its_processes_see_only_this_gpu(job_of_source: JobOfSource) -> None:
    """They see this GPU alone; the process that starts them is left as it is."""
    before = dict(os.environ)
    with Workers(gpu_uuid="GPU-7") as workers:
        assert "sees GPU-7" in workers.run(job_of_source(SAY_WHAT_IS_VISIBLE)).message
    assert dict(os.environ) == before
