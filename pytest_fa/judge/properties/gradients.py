"""Properties of gradients alone."""

from __future__ import annotations

from pytest_fa.attention.backward import DOUT
from pytest_fa.judge.properties.gradient_data import PROFILES
from pytest_fa.judge.subject import PropertySubject


def hard_gradients(subject: PropertySubject) -> None:
    """Gradients are right on data that reveal numerical shortcuts of a backward pass (`gradient_data`)."""
    inputs = subject.inputs()
    for name, profile in PROFILES.items():
        data, dout = profile(inputs, inputs.extra[DOUT])
        changed = data._replace(extra={**data.extra, DOUT: dout})
        subject.require_right("hard_gradients", subject.call(changed), changed, f" ({name})")
