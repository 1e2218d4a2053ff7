"""The C interfaces of CUDA sources: what a source exports, and the file that binds it to Python."""

from __future__ import annotations

from typing import NamedTuple

from pytest_fa.catalog.variant import Variant


class Interface(NamedTuple):
    """The names of an interface: its functions, the struct of their arguments, and the files."""

    entry: str
    workspace: str
    args: str
    header: str
    binding: str

    @property
    def entry_line(self) -> str:
        """How a source defines the function that launches its kernels."""
        return f"FA_EXPORT int {self.entry}(const {self.args}* args, cudaStream_t stream) {{ ... }}"

    @property
    def workspace_line(self) -> str:
        """How a source defines the function that says how large a workspace is."""
        return f"FA_EXPORT size_t {self.workspace}(const {self.args}* args) {{ ... }}"

    @property
    def include_line(self) -> str:
        """How a source includes the interface."""
        return f'#include "{self.header}"'


FORWARD = Interface("fa_forward", "fa_workspace_bytes", "FaForwardArgs", "fa_forward.h", "binding.cpp")
BACKWARD = Interface(
    "fa_backward", "fa_backward_workspace_bytes", "FaBackwardArgs", "fa_backward.h", "backward_binding.cpp"
)
INTERFACES = (FORWARD, BACKWARD)


def interface_of(variant: Variant) -> Interface:
    """The interface of a CUDA variant."""
    return BACKWARD if variant.computes == "gradients" else FORWARD
