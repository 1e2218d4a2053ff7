"""What the terminal shows of gates: the lines below the table, in a run of `--fa-gate` and at the end of a sweep."""

from __future__ import annotations

from pytest_fa.features.gate.gate_lines import gate_details, gate_lines
from pytest_fa.features.gate.gated import Gate
from pytest_fa.features.gate.noise import read_noise
from pytest_fa.plugin.terminal import Results
from pytest_fa.records.files import try_to_read
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.record import Record
from pytest_fa.table.failure import failure_text
from pytest_fa.table.layout import Style, TextLine

STYLES: dict[str, Style] = {"PASS": "green", "FAIL": "red"}


class GateReports:
    """The hooks that show the gates of a run."""

    def pytest_fa_details(self, record: Record) -> list[str]:
        """The lines of a gate that failed."""
        return gate_details(record)

    def pytest_fa_lines(self, results: Results) -> list[TextLine]:
        """The lines of each gate; for a gate without a verdict the whole text, which pytest does not show."""
        lines: list[TextLine] = []
        for record in results.records:
            if record.kind == "gate" and record.outcome == Outcome.INCONCLUSIVE:
                lines.append(TextLine(f"{record.id}: {failure_text(record, gate_details(record))}", "yellow"))
            elif gate := Gate.of(record):
                lines += [TextLine(line, STYLES.get(gate.verdict, "")) for line in gate_lines(record.variant, gate)]
        return lines

    def pytest_fa_file_lines(self, results: Results) -> list[TextLine]:
        """Why the GPU's noise cannot be read, if a gate used it."""
        gpu = next((record.environment.gpu for record in results.records if record.kind == "gate"), "")
        folder = results.options.records_folder
        problem = "" if gpu == "" else try_to_read(lambda: read_noise(folder, gpu))[1]
        return [TextLine(f"fa: {problem}", "yellow")] if problem else []
