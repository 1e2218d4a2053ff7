"""The selection of variants by --fa-variant, -k and node ids, and their companions."""

from __future__ import annotations

import pytest

from pytest_fa.catalog.claims import LENGTHS
from pytest_fa.catalog.properties import GRADIENTS_ONLY, PROMISED, PROPERTIES
from pytest_fa.records.log import save_records
from pytest_fa.records.record import Environment
from tests.factories import PYTHON_MANIFEST, record, speed
from tests.projects import CASE, COMPANIONS, ONE_CASE, PRETEND_GPU, SHAPE, NewProject, Project, variants_of
from tests.tiers import nightly_after

FILE = "pytest_fa.suite.test_attention"
OTHER_SHAPE = "b1h4s128d64-fp16"


@pytest.fixture(scope="module")
def trio(new_project: NewProject) -> Project:
    """Two candidates for the CPU, one that is compiled, and one variant that is no candidate."""
    project = new_project("trio")
    project.python_variant("alpha")
    project.python_variant("beta")
    project.cuda_variant("zero")
    project.python_variant("without_max", manifest=PYTHON_MANIFEST + "role: ablation\n")
    return project


@pytest.fixture(scope="module")
def default_ids(trio: Project) -> list[str]:
    """The tests on one case if no variant is selected."""
    return trio.ids(ONE_CASE)


def test_default_checks_candidates(default_ids: list[str]) -> None:
    """Without --fa-variant every candidate is checked, and no variant of another role."""
    assert variants_of(default_ids, "test_correct") == ["alpha", "beta", "zero"]


def test_default_times_companions_last(default_ids: list[str]) -> None:
    """Without --fa-variant every candidate is timed, and after them `noop` and the SDPA backends."""
    assert variants_of(default_ids, "test_speed") == ["alpha", "beta", "zero", *COMPANIONS]


def test_default_builds_what_needs_a_compiler(default_ids: list[str]) -> None:
    """test_build runs over the selected variants that are compiled, without the companions."""
    assert variants_of(default_ids, "test_build") == ["zero"]


@pytest.mark.parametrize(
    ("names", "checked"),
    nightly_after(
        3,
        [
            ("alpha", ["alpha"]),
            ("beta,alpha", ["beta", "alpha"]),
            ("*a", ["alpha", "beta"]),
            ("[az]*,beta", ["alpha", "zero", "beta"]),
            ("zero@BLOCK=32", ["zero@BLOCK=32"]),
            ("without_max", ["without_max"]),
            ("sdpa_math", ["sdpa_math"]),
            ("noop", []),
        ],
    ),
)
def test_named_variants_are_checked(trio: Project, names: str, checked: list[str]) -> None:
    """--fa-variant accepts names, globs and definitions of any role; `noop` is not checked."""
    assert variants_of(trio.ids(ONE_CASE, f"--fa-variant={names}"), "test_correct") == checked


def test_named_variant_keeps_companions(trio: Project) -> None:
    """A selected candidate is timed together with every companion."""
    ids = trio.ids(ONE_CASE, "--fa-variant=alpha")
    assert ids == [f"test_correct[alpha-{CASE}]", *(f"test_speed[{name}-{SHAPE}]" for name in ("alpha", *COMPANIONS))]


OF_ATTENTION = {*PROPERTIES} - PROMISED - GRADIENTS_ONLY
OF_ZERO = 1 + 12 + len(LENGTHS) + len(OF_ATTENTION)  # its build, the suite `history`, claims, properties


def test_definition_reaches_the_build(trio: Project) -> None:
    """A variant with another definition is built under its own name."""
    ids = trio.ids(ONE_CASE, "--fa-variant=zero@BLOCK=32", "-k", "test_build")
    assert ids == ["test_build[zero@BLOCK=32]"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["--fa-variant=zero"],
            f"{OF_ZERO + 4 * len(['zero', *COMPANIONS])} tests collected",
        ),
        ([ONE_CASE, "--fa-variant=alpha"], "8/10 tests collected (2 deselected)"),
    ],
    ids=["compiled", "python"],
)
def test_other_candidates_are_not_collected(trio: Project, arguments: list[str], expected: str) -> None:
    """Only selected variants have tests.  A test function without any (test_build, test_property) is deselected."""
    assert trio.collect(*arguments).all_lines[-1].split(" in ")[0] == expected


def test_a_node_id_of_another_candidate_is_not_found(trio: Project) -> None:
    """A node id of a candidate that `--fa-variant` does not select is an error that names the node id."""
    node = f"{FILE}::test_correct[beta-{CASE}]"
    result = trio.run_here("--collect-only", "-q", "--pyargs", "--fa-variant=alpha", node)
    assert (result.ret, "not found" in result.text) == (pytest.ExitCode.USAGE_ERROR, True)


@pytest.mark.parametrize(
    ("names", "complaint"),
    [
        ("alhpa", "--fa-variant: no variant 'alhpa'; did you mean 'alpha'? (see --fa-list)"),
        ("qqqqqq", "--fa-variant: no variant 'qqqqqq' (see --fa-list)"),
        ("q*", "--fa-variant: no variant 'q*' (see --fa-list)"),
        ("alpha,gone", "--fa-variant: no variant 'gone' (see --fa-list)"),
        ("zero@BLOK=32", "zero has no definition 'BLOK'; did you mean 'BLOCK'? (it has: BLOCK)"),
        ("alpha@BLOCK=32", "alpha has no definition 'BLOCK' (it has: none)"),
        ("zero@BLOCK", "--fa-variant=zero@BLOCK: 'BLOCK' is malformed; the form is NAME=VALUE"),
    ],
)
def test_unknown_name_is_a_usage_error(trio: Project, names: str, complaint: str) -> None:
    """An unknown name is a usage error of one line that quotes it."""
    result = trio.collect(f"--fa-variant={names}")
    assert (result.ret, result.all_lines) == (pytest.ExitCode.USAGE_ERROR, [f"ERROR: {complaint}"])


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--fa-variants=alpha"], "--fa-variants: there is no such option; did you mean '--fa-variant'?"),
        (["--fa-varient", "alpha"], "--fa-varient: there is no such option; did you mean '--fa-variant'?"),
        (
            ["--fa-variant=alpha", "--ncu-preset=full"],
            "--ncu-preset: there is no such option; did you mean '--ncu-set'?",
        ),
        (["--fa-variant=alpha", "--fa-qqqqqqqqqq"], "--fa-qqqqqqqqqq: there is no such option"),
    ],
)
def test_a_misspelt_option_is_a_usage_error(trio: Project, words: list[str], complaint: str) -> None:
    """An option that looks like one of this plugin's is answered with one line, and the nearest one if there is one."""
    assert trio.complaint(*words) == [f"ERROR: {complaint} (see pytest --help)"]


def test_an_option_of_another_plugin_is_no_misspelt_one(project: Project) -> None:
    """An option of a conftest.py may begin like those of this plugin; a wrong one of others is pytest's own error."""
    project.write("conftest.py", "def pytest_addoption(parser):\n    parser.addoption('--fa-variants-of-mine')\n")
    project.write("test_a.py", "def test_a():\n    pass\n")
    assert project.run("--fa-variants-of-mine=1").outcomes == {"test_a": "passed"}
    assert "unrecognized arguments: --colect" in project.run("--colect").text


def test_keyword_narrows_to_one_variant(trio: Project) -> None:
    """`-k alpha` selects only the tests of alpha, without companions."""
    assert trio.ids(ONE_CASE, "-k", "alpha") == [f"test_correct[alpha-{CASE}]", f"test_speed[alpha-{SHAPE}]"]


def test_keyword_keeps_companions_of_its_shapes(trio: Project) -> None:
    """`-k` with a shape keeps the companions at that shape."""
    ids = trio.ids("--fa-variant=alpha", "-k", f"test_speed and {OTHER_SHAPE}")
    assert ids == [f"test_speed[{name}-{OTHER_SHAPE}]" for name in ("alpha", *COMPANIONS)]


@pytest.mark.parametrize(
    ("nodes", "kept"),
    [
        ([f"test_speed[sdpa_math-{SHAPE}]"], []),
        ([f"test_speed[alpha-{SHAPE}]"], [f"test_speed[alpha-{SHAPE}]"]),
        (
            [f"test_speed[alpha-{SHAPE}]", f"test_speed[sdpa_math-{SHAPE}]", f"test_speed[sdpa_math-{OTHER_SHAPE}]"],
            [f"test_speed[alpha-{SHAPE}]", f"test_speed[sdpa_math-{SHAPE}]"],
        ),
    ],
    ids=["companion alone", "candidate alone", "companions of two shapes"],
)
def test_node_ids_drop_companions_without_candidates(trio: Project, nodes: list[str], kept: list[str]) -> None:
    """A companion selected by its node id stays only if a candidate is selected at the same shape."""
    result = trio.run("--collect-only", "-q", "--pyargs", *(f"{FILE}::{node}" for node in nodes))
    expected = pytest.ExitCode.OK if kept else pytest.ExitCode.NO_TESTS_COLLECTED
    assert (result.ret, result.ids) == (expected, kept)


def test_a_gpu_leaves_out_the_baselines_of_the_cpu(new_project: NewProject) -> None:
    """On a GPU, a variant that runs there is timed beside baselines on the GPU, not beside sdpa_flash_cpu."""
    project = new_project("on_gpu")
    project.write("conftest.py", PRETEND_GPU)
    project.python_variant("alpha")
    expected = [name for name in ("alpha", *COMPANIONS) if name != "sdpa_flash_cpu"]
    assert variants_of(project.ids(ONE_CASE), "test_speed") == expected


# For an inner conftest.py: the environment of the pretended GPU, as records have it.
PRETEND_ENVIRONMENT = """\
import msgspec
import pytest_fa.session.record_factory
from pytest_fa.records.environment import read_environment

HERE = msgspec.structs.replace(read_environment(), gpu=GPU.name, driver=GPU.driver, torch="2.11.0")
pytest_fa.session.record_factory.read_environment = lambda: HERE
"""


@pytest.mark.parametrize(
    ("words", "slow"),
    nightly_after(
        1,
        [
            ((), []),
            (("--fa-baselines=needed",), []),
            (("--fa-baselines=all",), ["sdpa_math"]),
            (("--benchmark-sort=name",), ["sdpa_math"]),
        ],
    ),
)
def test_slow_baselines_are_left_out(project: Project, words: tuple[str, ...], slow: list[str]) -> None:
    """On a GPU, baselines that its records show to be slow are deselected, unless an option asks for all."""
    project.write("conftest.py", PRETEND_GPU + PRETEND_ENVIRONMENT)
    project.python_variant("alpha")
    here = Environment("Pretended GPU", "9.0", "1.0", "13.0", "2.11.0", "3.12.1", "Linux 6", "a CPU", "0.1.0")
    times = {"sdpa_cudnn": 9.0, "sdpa_math": 90.0}
    save_records(
        [record(name, CASE, "speed", role="baseline", speed=speed(us), environment=here) for name, us in times.items()],
        project.folder / "profiles",
    )
    timed = variants_of(project.ids(ONE_CASE, *words), "test_speed")
    assert timed == ["alpha", "noop", "sdpa_flash", "sdpa_cudnn", "sdpa_efficient", *slow]
