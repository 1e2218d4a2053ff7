"""The commands of `python -m pytest_fa`: new, doctor, judge, report, compare, export, bundle and others."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_fa.errors import FaError, UsageProblem

if TYPE_CHECKING:
    from pytest_fa.features.shards.merge import MergedRun


def main(arguments: list[str]) -> int:
    """Run one command; return its exit status, or 2 after one line on stderr if it fails."""
    try:
        if arguments[:1] == ["judge"]:
            _forget_current_folder()
            from pytest_fa.features.judge_command.judge_command import main as judge_main  # noqa: PLC0415  # it imports pytest

            return judge_main(arguments[1:])
        if arguments[:1] == ["bundle"]:
            from pytest_fa.features.bundle.commands import main as bundle_main  # noqa: PLC0415

            return bundle_main(arguments[1:])
        options = (_doctor_parser() if arguments[:1] == ["doctor"] else _parser()).parse_args(arguments)
        return int(options.run(options) or 0)
    except (FaError, OSError, ImportError) as problem:
        sys.stderr.write(f"pytest_fa: {problem}\n")
        return 2


def _forget_current_folder() -> None:
    """Import no module from the current folder, where Python's option -m looks first: it may be a stranger's."""
    if not sys.flags.safe_path and sys.path[0] == str(Path.cwd()):
        del sys.path[0]


def _doctor_parser() -> argparse.ArgumentParser:
    """The parser of `doctor` alone, which imports no dependency, because one may be missing."""
    parser = argparse.ArgumentParser(prog="python -m pytest_fa")
    _add_doctor(parser.add_subparsers(required=True))
    return parser


def _add_doctor(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    doctor = commands.add_parser("doctor", help="list what this machine has for a run, what it lacks, and what to do")
    doctor.add_argument("--kernels", type=Path, default=Path("kernels"))
    doctor.add_argument("--cache", type=Path, help="the folder of --fa-cache")
    doctor.add_argument("--profiles", type=Path, default=Path("profiles"))
    doctor.set_defaults(run=_doctor)


def _parser() -> argparse.ArgumentParser:
    from pytest_fa.features.new.new import KINDS  # noqa: PLC0415  # it imports the catalog, which `doctor` does without

    parser = argparse.ArgumentParser(prog="python -m pytest_fa", description=__doc__)
    commands = parser.add_subparsers(required=True)

    new = commands.add_parser("new", help="write the folder of a new variant, which is correct but slow")
    new.add_argument("name")
    new.add_argument("--kind", choices=KINDS, default=KINDS[0])
    new.add_argument("--kernels", type=Path, default=Path("kernels"))
    new.set_defaults(run=_new)
    _add_doctor(commands)

    judge_help = "judge and gate one variant; the exit status says the verdict (`judge --help` lists the options)"
    commands.add_parser("judge", help=judge_help)
    commands.add_parser("bundle", help="make, verify or replay a bundle")

    _add_report(commands.add_parser("report", help="write one HTML file about records, which opens offline"))

    _add_compare(commands.add_parser("compare", help="say what changed between two sets of records"))

    _add_export(commands.add_parser("export", help="write records in the format of another tool"))

    _add_records(commands.add_parser("records", help="join the records of a run that was split with --fa-shard"))

    _add_sweep(commands.add_parser("sweep", help="show the trials and the end of a --fa-sweep"))

    ceilings = commands.add_parser("ceilings", help="measure this GPU's peak rates, and save them in profiles/<gpu>/")
    ceilings.add_argument("--profiles", type=Path, default=Path("profiles"))
    ceilings.set_defaults(run=_ceilings)

    noise = commands.add_parser("noise", help="measure the spread of times between processes, and save it there too")
    noise.add_argument("--profiles", type=Path, default=Path("profiles"))
    noise.add_argument("--processes", type=int, default=24, help="12 or more, about 10 s each")
    noise.set_defaults(run=_noise)

    _add_serve(commands.add_parser("serve", help="keep torch imported for the next runs, until idle or --stop"))
    return parser


def _add_serve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--idle-minutes", type=float, default=30.0, help="end after so long without a run; default: 30")
    parser.add_argument("--stop", action="store_true", help="end the server that runs now")
    parser.set_defaults(run=_serve)


def _serve(options: argparse.Namespace) -> int:
    from pytest_fa.host.fork_server import child_environment  # noqa: PLC0415
    from pytest_fa.host.resident import end_resident, resident_path, serve_command  # noqa: PLC0415

    if not options.stop:
        serve_command(child_environment(), options.idle_minutes)
    path = resident_path()
    has_ended = path is not None and end_resident(path)
    sys.stdout.write("the server has ended\n" if has_ended else "no server runs\n")
    return int(not has_ended)


def _add_compare(parser: argparse.ArgumentParser) -> None:
    side = "a record file, a folder of them, a bundle, or a git revision (its profiles/; REVISION:FOLDER for another)"
    parser.add_argument("a", metavar="A", help=side)
    parser.add_argument("b", metavar="B", help="the same, to compare with A")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON object")
    form.add_argument("--markdown", action="store_true", help="print Markdown")
    parser.add_argument("--all", action="store_true", help="also list rows that did not change or that one side lacks")
    parser.add_argument("--fail-on", default="", metavar="VERDICT[,...]", help="exit with 1 if a row has this verdict")
    parser.add_argument("--profiles", type=Path, default=Path("profiles"), help="where noise.json of a GPU is")
    parser.set_defaults(run=_compare)


def _compare(options: argparse.Namespace) -> int:
    from pytest_fa.features.compare.compare import compare, process_sd_of, require_verdicts  # noqa: PLC0415
    from pytest_fa.features.compare.comparison import comparison_markdown, comparison_text  # noqa: PLC0415
    from pytest_fa.features.compare.sides import read_side  # noqa: PLC0415
    from pytest_fa.records.record import to_json  # noqa: PLC0415

    failing = require_verdicts(options.fail_on)
    sides = [read_side(word, Path.cwd()) for word in (options.a, options.b)]
    comparison = compare(sides[0], sides[1], lambda gpu: process_sd_of(options.profiles, gpu))
    if options.json:
        text = to_json(comparison).decode()
    elif options.markdown:
        text = comparison_markdown(comparison, with_all=options.all)
    else:
        text = comparison_text(comparison, with_all=options.all)
    sys.stdout.write(f"{text}\n")
    return int(any(row.verdict in failing for row in comparison.rows))


def _add_report(parser: argparse.ArgumentParser) -> None:
    forms = "record files, folders of them, bundles, or git revisions"
    parser.add_argument("records", metavar="RECORDS", nargs="+", help=forms)
    parser.add_argument("-o", "--output", type=Path, default=Path("report.html"), help="default: report.html")
    parser.add_argument(
        "--profiles", type=Path, default=Path("profiles"), help="where a GPU's peak rates and noise are"
    )
    parser.set_defaults(run=_report)


def _report(options: argparse.Namespace) -> None:
    from pytest_fa.features.compare.sides import read_sides  # noqa: PLC0415
    from pytest_fa.features.html.machine import PageFacts  # noqa: PLC0415
    from pytest_fa.features.html.render import write_report  # noqa: PLC0415

    if not options.output.parent.is_dir():
        raise UsageProblem(f"-o {options.output}: there is no folder {options.output.parent}; make it, or name another")
    side = read_sides(options.records, Path.cwd())
    write_report(options.output, side.records, PageFacts(side.name, options.profiles, complaints=side.complaints))
    for complaint in side.complaints:
        sys.stderr.write(f"pytest_fa: {complaint}\n")
    kilobytes = options.output.stat().st_size / 1000
    sys.stdout.write(f"{options.output}: {len(side.records)} records, {kilobytes:.0f} KB\n")


def _add_export(parser: argparse.ArgumentParser) -> None:
    from pytest_fa.features.export.export_formats import EXPORTS  # noqa: PLC0415

    parser.add_argument("records", help="a record file, a folder of them, a bundle, or a git revision")
    parser.add_argument("--format", choices=sorted(EXPORTS), required=True)
    parser.add_argument("-o", "--output", type=Path, help="the file to write; without it, stdout")
    parser.set_defaults(run=_export)


def _export(options: argparse.Namespace) -> None:
    from pytest_fa.features.compare.sides import read_side  # noqa: PLC0415
    from pytest_fa.features.export.export_formats import EXPORTS  # noqa: PLC0415

    side = read_side(options.records, Path.cwd())
    content = EXPORTS[options.format](side.records)
    for complaint in side.complaints:
        sys.stderr.write(f"pytest_fa: {complaint}\n")
    if options.output is None:
        sys.stdout.buffer.write(content)
    else:
        options.output.write_bytes(content)


def _add_records(parser: argparse.ArgumentParser) -> None:
    merge = parser.add_subparsers(required=True).add_parser("merge", help="join the shards of one run into one file")
    merge.add_argument("folders", metavar="DIR", nargs="+", type=Path, help="the artifacts of the shards")
    merge.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="the record file to write")
    merge.set_defaults(run=_merge)


def _merge(options: argparse.Namespace) -> int:
    """Exit with the status of the whole run, or with 1 and no file if anything is missing, doubled or mixed."""
    from pytest_fa.features.shards.merge import merge_shards, read_shards, write_merged  # noqa: PLC0415

    merged = merge_shards(read_shards(options.folders))
    for problem in merged.problems:
        sys.stderr.write(f"{problem}\n")
    if not merged.is_complete:
        sys.stderr.write(f"not merged: {len(merged.problems)} problems\n")
        return 1
    write_merged(options.output, merged)
    outcomes = ", ".join(f"{count} {outcome}" for outcome, count in sorted(merged.outcomes.items()))
    sys.stdout.write(
        f"{options.output}: {len(merged.records)} records of {merged.shards} shards{_on(merged)}; tests: {outcomes}\n"
    )
    return merged.exit_status


def _on(merged: MergedRun) -> str:
    """The numbers of GPUs and machines, if the records have them."""
    machines = [record.machine for record in merged.records if record.machine]
    gpus, hosts = ({getattr(each, name) for each in machines} - {None} for name in ("gpu_hash", "host_hash"))
    return f" from {len(gpus)} GPUs of {len(hosts)} machines" if gpus else ""


def _add_sweep(parser: argparse.ArgumentParser) -> None:
    show = parser.add_subparsers(required=True).add_parser("show", help="print the history, the defines and the end")
    show.add_argument("study", metavar="STUDY", help="the journal file, or the URL of the database, of --fa-study")
    show.add_argument("--name", help="one of several studies; default: the last one")
    show.add_argument("--svg", type=Path, metavar="FILE", help="also draw the history and the values")
    show.set_defaults(run=_show_sweep)


def _show_sweep(options: argparse.Namespace) -> None:
    from pytest_fa.features.sweep.read_study import read_study  # noqa: PLC0415
    from pytest_fa.features.sweep.sweep_lines import show_lines  # noqa: PLC0415
    from pytest_fa.features.sweep.sweep_picture import draw_sweep  # noqa: PLC0415
    from pytest_fa.records.text import printable  # noqa: PLC0415

    study = read_study(options.study, options.name)
    for line in show_lines(study):
        sys.stdout.write(f"{printable(line)}\n")
    if options.svg:
        draw_sweep(study.facts, study.trials, study.end, options.svg)
        sys.stdout.write(f"{options.svg}\n")


def _doctor(options: argparse.Namespace) -> int:
    from pytest_fa.features.doctor.doctor import examine, verdict_of  # noqa: PLC0415
    from pytest_fa.features.doctor.finding import Places  # noqa: PLC0415
    from pytest_fa.options.options import default_cache  # noqa: PLC0415

    places = Places(Path(), options.kernels, options.cache or default_cache(), options.profiles)
    findings = []
    for finding in examine(places):
        findings.append(finding)
        sys.stdout.write(f"{finding.line}\n")
        sys.stdout.flush()
    status, sentence = verdict_of(findings)
    sys.stdout.write(f"{sentence}\n")
    return status


def _new(options: argparse.Namespace) -> None:
    from pytest_fa.features.new.new import write_variant  # noqa: PLC0415

    folder = write_variant(options.name, options.kind, options.kernels)
    option = "" if options.kernels == Path("kernels") else f" --fa-kernels={shlex.quote(str(options.kernels))}"
    sys.stdout.write(f"{folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}\n")
    sys.stdout.write(f"next: pytest --pyargs pytest_fa.suite{option} --fa-variant={options.name}\n")


def _ceilings(options: argparse.Namespace) -> None:
    from pytest_fa.features.ceilings.judge_side.measure_ceilings import measure_ceilings  # noqa: PLC0415  # torch, only for this command
    from pytest_fa.host.timing_lock import timing_lock  # noqa: PLC0415
    from pytest_fa.records.ceilings import write_ceilings  # noqa: PLC0415

    with timing_lock():
        measured = measure_ceilings(Path())
    path = write_ceilings(measured, options.profiles)
    rates = ", ".join(f"{name} {rate:.0f} TFLOP/s" for name, rate in measured.matmul_tflops.items())
    sys.stdout.write(f"{measured.environment.gpu}: copy {measured.copy_gb_per_s:.0f} GB/s, {rates}, ")
    sys.stdout.write(f"empty launch {measured.empty_launch_us:.2f} us\n{path}\n")


def _noise(options: argparse.Namespace) -> None:
    from pytest_fa.features.gate.measure_noise import measure_noise  # noqa: PLC0415
    from pytest_fa.features.gate.noise import write_noise  # noqa: PLC0415
    from pytest_fa.features.gate.noise_table import noise_rows  # noqa: PLC0415

    noise = measure_noise(Path(), options.processes, lambda text: sys.stderr.write(f"\r{text}"))
    path = write_noise(noise, options.profiles)
    sys.stderr.write("\n")
    for row in noise_rows(noise):
        sys.stdout.write(
            f"{row.shape_id}  {row.candidate} / {row.baseline}: processes {100 * row.process_sd:.2f} %, "
            f"blocks {100 * row.block_sd:.2f} %, PASS or FAIL in {row.decided} of {row.groups} simulated gates\n"
        )
    sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
