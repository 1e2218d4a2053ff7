"""Every option, from the command line and from the ini file, and the error for each wrong value."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
from syrupy.assertion import SnapshotAssertion

from pytest_fa.catalog import variant
from pytest_fa.catalog.grammar import ARCH
from pytest_fa.catalog.suites import DEFAULT_SUITE, SUITES
from pytest_fa.errors import UsageProblem
from pytest_fa.feature import CaseRules, FeatureOptions, OptionRow, features
from pytest_fa.features.sanitize.plugin import TOOLS
from pytest_fa.features.truth.plugin import TruthOptions
from pytest_fa.options import options, values
from pytest_fa.options.flags import RUN_OPTIONS, all_options
from pytest_fa.options.options import Options

# Flag: what is given, the field that it fills, and what the field is then.  A relative path is below the root.
GIVEN: dict[str, tuple[str, str, Any]] = {
    "--fa-variant": ("one, ws_*,,two@X=1", "variants", ("one", "ws_*", "two@X=1")),
    "--fa-list": ("ws_p2,mask*", "listed", ("ws_p2", "mask*")),
    "--fa-kernels": ("mine,/elsewhere", "kernels", (Path("mine"), Path("/elsewhere"))),
    "--fa-suite": ("smoke,edge", "suites", ("smoke", "edge")),
    "--fa-case": ("*d64*,b1h8s512d64-fp16-seed0", "cases", ("*d64*", "b1h8s512d64-fp16-seed0")),
    "--fa-seeds": ("3,7", "seeds", (3, 7)),
    "--fa-dtype": ("bf16,fp16", "dtypes", ("bf16", "fp16")),
    "--fa-define": ("BLOCK_M=64,128", "defines", ("BLOCK_M=64,128",)),
    "--fa-allow-flag": ("-Xcompiler=-fdump-*", "allowed_flags", ("-Xcompiler=-fdump-*",)),
    "--fa-arch": ("sm_80,sm_90a", "arches", ("sm_80", "sm_90a")),
    "--fa-tolerance": ("absolute", "tolerance", "absolute"),
    "--fa-soak": ("1000", "soak", 1000),
    "--fa-watchdog": ("2.5", "watchdog_seconds", 2.5),
    "--fa-workload": ("mix.yaml", "workload.name", "mix.yaml"),
    "--fa-gate": ("0.95", "gate.ratio", 0.95),
    "--fa-gate-baseline": ("key:1a2b", "gate.baseline", "key:1a2b"),
    "--fa-gate-gpus": ("all", "gate.gpus", None),
    "--fa-bisect": ("true", "gate.bisects", True),
    "--fa-hunt": ("mine", "hunt.names", ("mine",)),
    "--fa-hunt-seconds": ("5", "hunt.seconds", 5.0),
    "--fa-hunt-seed": ("3", "hunt.seed", 3),
    "--fa-hunt-unclaimed": ("true", "hunt.unclaimed", True),
    "--fa-hunt-again": ("b1h1s1d64-fp16", "hunt.again", ("b1h1s1d64-fp16",)),
    "--fa-sweep": ("tuned", "sweep.name", "tuned"),
    "--fa-trials": ("20", "sweep.trials", 20),
    "--fa-study": ("sqlite:///study.db", "sweep.study", "sqlite:///study.db"),
    "--fa-sampler": ("nsga2", "sweep.sampler", "nsga2"),
    "--fa-truth": ("window.py:truth", "truth.text", "window.py:truth"),
    "--fa-baselines": ("all", "baselines", "all"),
    "--fa-watch": ("true", "watch", True),
    "--fa-selftest": ("true", "selftest", True),
    "--ncu": ("true", "ncu", True),
    "--ncu-set": ("stalls", "ncu.preset", "stalls"),
    "--ncu-strict": ("true", "ncu.strict", True),
    "--ncu-sudo": ("true", "ncu.sudo", True),
    "--fa-sanitize": ("racecheck, memcheck", "sanitize.tools", ("racecheck", "memcheck")),
    "--fa-static": ("true", "static", True),
    "--fa-require-gpu": ("true", "require_gpu", True),
    "--fa-clean": ("true", "clean", True),
    "--fa-cache": ("builds", "cache", Path("builds")),
    "--fa-no-build": ("true", "no_build", True),
    "--fa-save": ("true", "save", True),
    "--fa-html": ("report.html", "html.path", Path("report.html")),
    "--fa-shard": ("2/7", "shards.count", 7),
    "--fa-artifacts": ("out", "artifacts", Path("out")),
    "--fa-profiles": ("kept", "records_folder", Path("kept")),
}
FLAGS = [option.flag for option in all_options()]
ALLOWED_ONLY = {"--ncu-set": "full", "--fa-sanitize": "initcheck"}
# What an option asks for beside it.
NEEDS = {
    **{flag: ["--ncu"] for flag in ("--ncu-set", "--ncu-strict", "--ncu-sudo")},
    **{flag: ["--fa-gate=0.5"] for flag in ("--fa-gate-baseline", "--fa-gate-gpus", "--fa-bisect")},
    **{
        flag: ["--fa-hunt=mine"]
        for flag in ("--fa-hunt-seconds", "--fa-hunt-seed", "--fa-hunt-unclaimed", "--fa-hunt-again")
    },
    **{flag: ["--fa-sweep=tuned"] for flag in ("--fa-trials", "--fa-study", "--fa-sampler")},
}


def read(pytester: pytest.Pytester, *arguments: str) -> Options:
    """The options of a run in the test's own folder."""
    return options.read(pytester.parseconfig(*arguments))


def flat(given: Options) -> dict[str, Any]:
    """The fields of the options, and those of each used feature as `feature.field`."""
    ignored = ("parts", "rerun", "selection")
    values = {name: value for name, value in vars(given).items() if name not in ignored}
    for part in given.parts:
        values[part.feature] = True
        values |= {f"{part.feature}.{name}": value for name, value in vars(part).items()}
    return values


def assert_sets(field: str, expected: Any, before: Options, after: Options) -> None:
    """The field has its value, and no other field has changed, but those of a feature that was not used before."""
    values, old = flat(after), flat(before)
    feature = field.partition(".")[0]
    new = {name for name in values if name.partition(".")[0] == feature and feature not in old}
    others = {name for name in values.keys() | old.keys() if values.get(name) != old.get(name)} - new
    assert (values[field], others - {field}) == (expected, {"is_given"} - ({"is_given"} if before.is_given else set()))


def below(root: Path, value: Any) -> Any:
    """`value` with its relative paths below `root`."""
    if isinstance(value, tuple):
        return tuple(below(root, each) for each in value)
    return root / value if isinstance(value, Path) else value


def command_line(flag: str, value: str) -> str:
    """The option as a user types it; a switch has no value."""
    return flag if value == "true" else f"{flag}={value}"


def ini_of(**values: str) -> str:
    """An ini file with these keys."""
    return "[pytest]\n" + "".join(f"{key} = {value}\n" for key, value in values.items())


def key(flag: str) -> str:
    """The ini key of a flag."""
    return flag.removeprefix("--").replace("-", "_")


@pytest.fixture
def in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run in CI, where no run uses the times of an earlier one, whatever its options are."""
    monkeypatch.setenv("CI", "true")


@pytest.fixture
def on_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that a user has typed, also if these tests run in CI or in a process of pytest-xdist."""
    for name in ("CI", "PYTEST_XDIST_WORKER"):
        monkeypatch.delenv(name, raising=False)


def test_the_table_above_has_every_option() -> None:
    """These tests cover every option."""
    assert sorted(FLAGS) == sorted(GIVEN)


@pytest.mark.usefixtures("on_command_line")
def test_nothing_given_is_the_defaults(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without options a run has all candidates, the default suite and the default folders, and `is_given` is false."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(pytester.path / "caches"))
    root = pytester.path
    expected = Options(
        reuses_times=True,
        rootdir=root,
        variants=(),
        kernels=(),
        suites=("history",),
        cases=(),
        seeds=None,
        dtypes=(),
        defines=(),
        allowed_flags=(),
        arches=(),
        tolerance=None,
        soak=None,
        watchdog_seconds=None,
        baselines="needed",
        static=False,
        cache=root / "caches" / "pytest-fa",
        artifacts=root / "artifacts",
        records_folder=root / "profiles",
        clean=False,
        no_build=False,
        require_gpu=False,
        save=False,
        timing=True,
        rerun=("pytest",),
        is_given=False,
        parts=(TruthOptions(None, root, None),),
    )
    assert expected == read(pytester)


@pytest.mark.usefixtures("on_command_line")
@pytest.mark.parametrize(
    ("words", "plugin"),
    [
        ((), "pytest"),
        (("--fa-html=report.html",), "pytest"),
        (("--html=report.html",), "pytest_html"),
        (("-n", "2"), "xdist"),
        (("--tx=popen", "--dist=load"), "xdist"),
    ],
)
def test_a_page_or_several_processes_need_new_times(
    pytester: pytest.Pytester, words: tuple[str, ...], plugin: str
) -> None:
    """A usual run may use the times of baselines of an earlier run; with a page or with `-n`, none does."""
    pytest.importorskip(plugin)
    assert (not words) == read(pytester, *words).reuses_times


@pytest.mark.usefixtures("on_command_line")
def test_a_page_of_the_ini_file_needs_new_times(pytester: pytest.Pytester) -> None:
    """The page may also be in the ini file."""
    pytester.makeini(ini_of(fa_html="report.html"))
    assert not read(pytester).reuses_times


@pytest.mark.usefixtures("on_command_line")
@pytest.mark.parametrize("name", ["CI", "PYTEST_XDIST_WORKER"])
def test_ci_and_xdist_need_new_times(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """In CI, and in a process of pytest-xdist, no run uses the times of an earlier one."""
    monkeypatch.setenv(name, "gw0")
    assert not read(pytester).reuses_times


@pytest.mark.usefixtures("in_ci")
def test_the_defaults_need_no_pytest(pytester: pytest.Pytester) -> None:
    """`defaults` gives the options of a run without a command line."""
    assert read(pytester) == options.defaults(pytester.path)


@pytest.mark.usefixtures("in_ci")
@pytest.mark.parametrize("flag", FLAGS)
def test_an_option_is_read_from_the_command_line(pytester: pytest.Pytester, flag: str) -> None:
    """The flag sets its field and no other field."""
    value, field, expected = GIVEN[flag]
    beside = NEEDS.get(flag, [])
    before, after = read(pytester, *beside), read(pytester, *beside, command_line(flag, value))
    assert_sets(field, below(pytester.path, expected), before, after)


@pytest.mark.usefixtures("in_ci")
@pytest.mark.parametrize("flag", FLAGS)
def test_an_option_is_read_from_the_ini_file(pytester: pytest.Pytester, flag: str) -> None:
    """The ini key of the same name has the same effect as the flag."""
    value, field, expected = GIVEN[flag]
    beside = NEEDS.get(flag, [])
    before = read(pytester, *beside)
    pytester.makeini(ini_of(**{key(flag): value}))
    assert_sets(field, below(pytester.path, expected), before, read(pytester, *beside))


@pytest.mark.parametrize("flag", [flag for flag in FLAGS if GIVEN[flag][0] != "true"])
def test_the_command_line_comes_before_the_ini_file(pytester: pytest.Pytester, flag: str) -> None:
    """A flag overrides its ini key."""
    value, field, expected = GIVEN[flag]
    other = {"--fa-seeds": "5", "--fa-tolerance": "same_precision", "--fa-arch": "sm_89", **ALLOWED_ONLY}.get(
        flag, "other"
    )
    pytester.makeini(ini_of(**{key(flag): other}))
    given = (*NEEDS.get(flag, []), command_line(flag, value))
    assert below(pytester.path, expected) == flat(read(pytester, *given))[field]


GROUPS = {"fa-run": RUN_OPTIONS, **{f"fa-{feature.name}": feature.options for feature in features()}}


@pytest.mark.parametrize(
    ("name", "option"),
    [
        pytest.param("fa" if option.everyday else name, option, id=option.flag)
        for name, options in GROUPS.items()
        for option in options
    ],
)
def test_help_names_the_ini_key_and_its_default(pytester: pytest.Pytester, name: str, option: OptionRow) -> None:
    """`--help` shows each flag in the first group or in that of its feature, with its ini key and the key's default."""
    group = pytester.parseconfig()._parser.getgroup(name)
    (shown,) = [each for each in group.options if option.flag in each.names()]
    default = f", default {option.ini_default}" if option.ini_default else ""
    assert f"{option.help} (ini: {key(option.flag)}{default})" == shown.attrs()["help"]


# -- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1", (0,)), ("3", (0, 1, 2)), ("3,", (3,)), ("3,7", (3, 7)), (" 7 , 3 ", (7, 3)), ("", None), (",", None)],
)
def test_seeds_are_a_count_or_a_list(pytester: pytest.Pytester, text: str, expected: tuple[int, ...] | None) -> None:
    """A number N means seeds 0 to N-1; a list keeps its order; without a value the suite decides."""
    assert expected == read(pytester, f"--fa-seeds={text}").seeds


def test_definitions_add_up(pytester: pytest.Pytester) -> None:
    """`--fa-define` may be repeated; the ini key separates several defines by spaces."""
    expected = ("BLOCK_M=64,128", "BLOCK_N=32")
    given = read(pytester, "--fa-define=BLOCK_M=64,128", "--fa-define=BLOCK_N=32").defines
    pytester.makeini(ini_of(fa_define="BLOCK_M=64,128 BLOCK_N=32"))
    assert [expected, expected] == [given, read(pytester).defines]


@pytest.mark.parametrize(
    ("flag", "field"), [("--fa-cache", "cache"), ("--fa-artifacts", "artifacts"), ("--fa-profiles", "records_folder")]
)
def test_a_tilde_is_the_home_folder(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, flag: str, field: str
) -> None:
    """Every folder option expands `~`, because a shell does not expand it in `--flag=~/x`."""
    monkeypatch.setenv("HOME", str(pytester.path / "home"))
    assert pytester.path / "home" / "x" == getattr(read(pytester, f"{flag}=~/x"), field)


def test_folders_are_below_the_root_wherever_pytest_starts(pytester: pytest.Pytester) -> None:
    """A relative folder in the ini file is relative to the root folder, wherever pytest is started."""
    root = pytester.path
    pytester.makeini(ini_of(fa_artifacts="out", fa_kernels="mine"))
    inner = pytester.mkdir("inner")
    given = read(pytester, f"--rootdir={root}", str(inner))
    assert (root / "out", (root / "mine",)) == (given.artifacts, given.kernels)


@pytest.mark.parametrize("exists", [True, False])
def test_the_default_kernels_folder_may_be_missing(pytester: pytest.Pytester, *, exists: bool) -> None:
    """A project without the default kernels folder gets an empty tuple and no error."""
    if exists:
        pytester.mkdir("kernels")
    assert ((pytester.path / "kernels",) if exists else ()) == read(pytester).kernels


def test_a_kernels_folder_that_was_asked_for_stays(pytester: pytest.Pytester) -> None:
    """A missing folder that the user names is kept, so that the catalog can report it."""
    assert (pytester.path / "kernels",) == read(pytester, "--fa-kernels=kernels").kernels


@pytest.mark.parametrize(("base", "expected"), [("caches", "caches/pytest-fa"), ("", "home/.cache/pytest-fa")])
def test_the_cache_is_in_the_users_cache_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, base: str, expected: str
) -> None:
    """The cache is in XDG_CACHE_HOME if that is set, else in `~/.cache`."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / base) if base else "")
    assert tmp_path / expected == options.default_cache()


@pytest.mark.parametrize(
    ("arguments", "expected"), [((), True), (("--benchmark-disable",), False), (("-p", "no:benchmark"), True)]
)
def test_benchmark_disable_means_no_timing(
    pytester: pytest.Pytester, arguments: tuple[str, ...], *, expected: bool
) -> None:
    """pytest-benchmark's --benchmark-disable turns timing off; a run without that plugin is timed."""
    assert expected is read(pytester, *arguments).timing


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), ("pytest",)),
        (("--fa-variant=one", "--fa-suite=smoke", "--fa-save"), ("pytest",)),
        (
            ("--fa-tolerance=absolute", "--fa-kernels=a,b", "--fa-arch=sm_80", "--fa-cache=c"),
            ("pytest", "--fa-kernels=a,b", "--fa-arch=sm_80", "--fa-tolerance=absolute", "--fa-cache=c"),
        ),
        (("--pyargs", "pytest_fa.suite"), ("pytest", "--pyargs", "pytest_fa.suite")),
    ],
)
def test_the_repeat_command_keeps_what_decides(
    pytester: pytest.Pytester, arguments: tuple[str, ...], expected: tuple[str, ...]
) -> None:
    """A rerun command repeats the options that select the sources, build and check; the record adds the test's name."""
    assert expected == read(pytester, *arguments).rerun


def test_the_selection_is_kept_as_it_was_typed(pytester: pytest.Pytester) -> None:
    """The options that select cases are kept for proposed commands; those of the ini file apply there as they are."""
    pytester.makeini(ini_of(fa_suite="edge"))
    typed = ("--fa-case=*d64*", "--fa-seeds=3,", "--fa-dtype=bf16")
    assert typed == read(pytester, "--fa-dtype=bf16", "--fa-variant=one", "--fa-seeds=3,", "--fa-case=*d64*").selection


NO_ARCH = "is not an architecture; write sm_ and a number, then perhaps a or f, such as sm_80, sm_90a or sm_120f"

# -- wrong values -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flag", "value", "problem"),
    [
        ("--fa-seeds", "five", "--fa-seeds: 'five' is not a seed; give a count such as 5, or a list such as 3,7"),
        ("--fa-seeds", "3,x", "--fa-seeds: 'x' is not a seed; give a count such as 5, or a list such as 3,7"),
        ("--fa-seeds", "-1", "--fa-seeds: '-1' is not a seed; give a count such as 5, or a list such as 3,7"),
        ("--fa-seeds", "1.5", "--fa-seeds: '1.5' is not a seed; give a count such as 5, or a list such as 3,7"),
        ("--fa-seeds", "²", "--fa-seeds: '²' is not a seed; give a count such as 5, or a list such as 3,7"),
        (
            "--fa-arch",
            "sm_80,volta",
            f"--fa-arch: 'volta' {NO_ARCH}",
        ),
        ("--fa-arch", "90a", f"--fa-arch: '90a' {NO_ARCH}"),
        ("--fa-arch", "sm_90b", f"--fa-arch: 'sm_90b' {NO_ARCH}"),
        (
            "--fa-tolerance",
            "mesured",
            "--fa-tolerance: no 'mesured' (allowed: same_precision, absolute, fp8)",
        ),
        ("--fa-tolerance", "1e-3", "--fa-tolerance: no '1e-3' (allowed: same_precision, absolute, fp8)"),
        (
            "--fa-sanitize",
            "memchek",
            f"--fa-sanitize: no 'memchek'; did you mean 'memcheck'? (allowed: {', '.join(TOOLS)})",
        ),
    ],
)
@pytest.mark.parametrize("place", ["command line", "ini file"])
def test_a_wrong_value_is_named_with_what_is_allowed(
    pytester: pytest.Pytester, flag: str, value: str, problem: str, place: str
) -> None:
    """The message names the option, its value and the allowed values, for flags and ini keys alike."""
    pytester.makeini(ini_of(**{key(flag): value} if place == "ini file" else {}))
    with pytest.raises(UsageProblem) as raised:
        read(pytester, *([command_line(flag, value)] if place == "command line" else []))
    assert problem == str(raised.value)


def test_a_set_of_counters_needs_a_profiler(pytester: pytest.Pytester, snapshot: SnapshotAssertion) -> None:
    """`--ncu-set` without `--ncu` is an error, because it would do nothing."""
    with pytest.raises(UsageProblem) as error:
        read(pytester, "--ncu-set=full")
    assert snapshot == str(error.value)


def test_an_unknown_set_of_counters_is_named(pytester: pytest.Pytester, snapshot: SnapshotAssertion) -> None:
    """An unknown counter set gets a suggestion and the list of all sets."""
    with pytest.raises(UsageProblem) as error:
        read(pytester, "--ncu", "--ncu-set=stals")
    assert snapshot == str(error.value)


def test_a_sanitizer_must_be_named(pytester: pytest.Pytester) -> None:
    """An empty list of sanitizer tools is an error."""
    with pytest.raises(UsageProblem, match="--fa-sanitize: '' names no tool"):
        read(pytester, "--fa-sanitize=")


def test_some_tests_are_there_on_request(pytester: pytest.Pytester) -> None:
    """Tests of gates, profiles and sanitizers exist only with their option; with --fa-static only test_build exists."""
    names = ("test_build", "test_correct", "test_gate", "test_profile", "test_sanitize")
    given = ((), ("--ncu",), ("--fa-sanitize=memcheck", "--fa-gate=1"), ("--fa-static",))
    offered = [[name for name in names if read(pytester, *each).offers(name)] for each in given]
    plain = ["test_build", "test_correct"]
    assert [plain, [*plain, names[3]], [*plain, names[2], names[4]], ["test_build"]] == offered


def test_a_run_has_one_tolerance(pytester: pytest.Pytester) -> None:
    """Two policies are an error; none of them is ignored."""
    with pytest.raises(UsageProblem, match="--fa-tolerance"):
        read(pytester, "--fa-tolerance=absolute,absolute")


# -- what is written twice, so that reading the options costs no catalog -----------------------------------------------


def test_the_allowed_values_are_those_of_the_catalog() -> None:
    """The form of an architecture and the list of policies equal those of the catalog."""
    expected = ARCH, get_args(variant.Tolerance)
    assert expected == (values.ARCH, values.TOLERANCES)


def test_the_suites_are_those_of_the_catalog() -> None:
    """The help names every suite, and the default suite is the catalog's."""
    (option,) = [option for option in all_options() if option.flag == "--fa-suite"]
    expected = f"suites of cases to run: {', '.join(SUITES)}", DEFAULT_SUITE
    assert expected == (option.help, option.ini_default)


@pytest.mark.parametrize("name", ["PYTEST_FA_CACHE", "XDG_CACHE_HOME"])
def test_the_default_cache_is_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Compilers run in other folders, so a relative folder is taken from the current one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTEST_FA_CACHE", raising=False)
    monkeypatch.setenv(name, "kept")
    assert options.default_cache().is_relative_to(tmp_path / "kept")


def test_options_belong_to_a_feature() -> None:
    """The base class of the features' options has no instances, which would belong to no feature."""
    with pytest.raises(TypeError, match="define a subclass in the feature's plugin"):
        FeatureOptions()
    assert CaseRules() == FeatureOptions.case_rules
