"""`variant.yaml`: all keys are read, members override the folder's keys, and errors are reported in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from pytest_fa.catalog.manifest import read_manifest
from pytest_fa.catalog.variant import Call, Constant, Entry, InstructionLimit, Limits, Supports, Variant
from pytest_fa.errors import ManifestError
from tests.factories import WriteVariant

REQUIRED = "step: a step\nbecause: a reason\nexpect: an outcome\n"

FULL = """\
step: two stages
parent: one_stage
because: loads wait for products
expect: twice as fast
role: ablation
entry: {kind: cuda, source: main.cu}
arch: [sm_80, sm_90a]
supports:
  dtype: [fp16, bf16]
  head_dim: [64, 128]
  causal: [none, top_left]
  layout: [bhsd, bshd]
  device: [cuda, cpu]
  grouped_heads: true
  seq_q_multiple_of: 64
  seq_k_multiple_of: 32
  seq_k_min: 32
instantiations: [fp16-d64, bf16-d128]
defines: {BLOCK_M: 64, MODE: fast}
flags: [-lineinfo, --use_fast_math]
rounds: [q, p]
limits:
  registers_per_thread: 168
  spill_bytes: 0
  stack_bytes: 16
  smem_bytes_per_block: 232448
  advisories: 1
  instructions: {HGMMA: {min: 1}, LDL: {max: 0}}
tolerance: absolute
"""

MEMBERS = """\
step: two stages
because: loads wait for products
expect: twice as fast
parent: one_stage
supports: {dtype: [fp16, bf16], causal: [none, top_left]}
limits: {spill_bytes: 0, stack_bytes: 0}
defines: {BLOCK_M: 64, STAGES: 2}
rounds: [p]
variants:
  plain: {}
  other:
    step: three stages
    because: two were not enough
    expect: a little faster
    parent: plain
    role: ablation
    defines: {STAGES: 3, EXTRA: on}
    supports: {dtype: [bf16], seq_q_multiple_of: 64}
    limits: {stack_bytes: 32}
    rounds: []
"""


def read(folder: Path) -> list[Variant]:
    """Return the variants of one folder under `kernels`."""
    return read_manifest(folder / "variant.yaml", folder.parent)


def problem_of(folder: Path) -> str:
    """Return the message for a wrong manifest, without the path that it starts with."""
    with pytest.raises(ManifestError) as problem:
        read(folder)
    path = f"{folder / 'variant.yaml'}: "
    assert path == str(problem.value)[: len(path)]
    return str(problem.value)[len(path) :]


def test_three_lines_define_a_variant(write_variant: WriteVariant) -> None:
    """A manifest with only its three texts is a candidate: `kernel.cu`, all architectures, fp16, head_dim 64."""
    folder = write_variant("thing", manifest=REQUIRED, **{"kernel.cu": ""})
    expected = Variant(
        name="thing",
        folder=str(folder),
        root=str(folder.parent),
        role="candidate",
        entry=Entry(kind="cuda", source="kernel.cu"),
        arch=("sm_80", "sm_89", "sm_90a"),
        supports=Supports(
            dtype=("fp16",),
            head_dim=(64,),
            causal=("none",),
            layout=("bhsd",),
            device=("cuda",),
            grouped_heads=False,
            seq_q_multiple_of=1,
            seq_k_multiple_of=1,
            seq_k_min=1,
        ),
        instantiations=(("fp16", 64),),
        defines={},
        flags=(),
        rounds=(),
        limits=Limits(),
        tolerance="same_precision",
        step="a step",
        parent=None,
        because="a reason",
        expect="an outcome",
        any_arch=True,
    )
    assert [expected] == read(folder)


def test_every_key_is_read(write_variant: WriteVariant) -> None:
    """Each key of a manifest sets its field of the variant."""
    folder = write_variant("thing", manifest=FULL, **{"main.cu": ""})
    expected = Variant(
        name="thing",
        folder=str(folder),
        root=str(folder.parent),
        role="ablation",
        entry=Entry(kind="cuda", source="main.cu"),
        arch=("sm_80", "sm_90a"),
        supports=Supports(
            dtype=("fp16", "bf16"),
            head_dim=(64, 128),
            causal=("none", "top_left"),
            layout=("bhsd", "bshd"),
            device=("cuda", "cpu"),
            grouped_heads=True,
            seq_q_multiple_of=64,
            seq_k_multiple_of=32,
            seq_k_min=32,
        ),
        instantiations=(("fp16", 64), ("bf16", 128)),
        defines={"BLOCK_M": 64, "MODE": "fast"},
        flags=("-lineinfo", "--use_fast_math"),
        rounds=("q", "p"),
        limits=Limits(
            registers_per_thread=168,
            spill_bytes=0,
            stack_bytes=16,
            smem_bytes_per_block=232448,
            advisories=1,
            instructions={"HGMMA": InstructionLimit(min=1, max=None), "LDL": InstructionLimit(min=0, max=0)},
        ),
        tolerance="absolute",
        step="two stages",
        parent="one_stage",
        because="loads wait for products",
        expect="twice as fast",
    )
    assert [expected] == read(folder)


def test_every_supported_pair_is_compiled_by_default(write_variant: WriteVariant) -> None:
    """Without `instantiations`, all pairs of a supported dtype and head_dim are compiled."""
    text = REQUIRED + "supports: {dtype: [fp16, bf16], head_dim: [64, 128]}"
    (variant,) = read(write_variant("thing", manifest=text, **{"kernel.cu": ""}))
    expected = ("fp16", 64), ("fp16", 128), ("bf16", 64), ("bf16", 128)
    assert expected == variant.instantiations


def test_a_python_entry_has_no_architectures(write_variant: WriteVariant) -> None:
    """A Python callable is not compiled, and needs no source file next to its manifest."""
    text = REQUIRED + 'entry: {kind: python, target: "package.module:function", context: "module:pin"}'
    (variant,) = read(write_variant("thing", manifest=text))
    entry = Entry(kind="python", target="package.module:function", context="module:pin")
    assert (entry, ()) == (variant.entry, variant.arch)


# -- members ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("source", "expected"), [("kernel.cu", ("sm_80", "sm_90a")), ("kernel.cpp", ("host",))])
def test_a_torch_entry_is_for_the_gpu_or_for_the_host(
    write_variant: WriteVariant, source: str, expected: tuple[str, ...]
) -> None:
    """CUDA sources are compiled for the manifest's architectures, C++ sources for the host; `call` is read."""
    text = REQUIRED + (
        "arch: [sm_80, sm_90a]\n"
        f"entry: {{kind: torch, sources: [{source}], include: [.], cflags: [-g], ldflags: [-lm], "
        "target: library::forward, call: {arguments: [q, k, v, 1.5e-3, true, ~, {constant: q}], "
        "keywords: {scale: scale}, layout: bshd, contiguous: true, returns: 0}}\nsupports: {layout: [bshd]}\n"
    )
    (variant,) = read(write_variant("thing", manifest=text, **{source: ""}))
    call = Call(
        ("q", "k", "v", 0.0015, True, None, Constant("q")), {"scale": "scale"}, "bshd", contiguous=True, returns=0
    )
    entry = Entry(
        kind="torch",
        sources=(source,),
        include=(".",),
        cflags=("-g",),
        ldflags=("-lm",),
        target="library::forward",
        call=call,
    )
    assert (entry, expected) == (variant.entry, variant.arch)


def test_members_replace_the_folder_variant(write_variant: WriteVariant) -> None:
    """A folder with `variants` defines these, in the manifest's order, and none with the folder's name."""
    folder = write_variant("thing", manifest=MEMBERS, **{"kernel.cu": ""})
    assert [variant.name for variant in read(folder)] == ["plain", "other"]


def test_a_folder_of_members_may_have_a_name_with_spaces(write_variant: WriteVariant) -> None:
    """The folder of members need not have the form of a variant's name."""
    folder = write_variant("Two Stages", manifest=MEMBERS, **{"kernel.cu": ""})
    assert len(read(folder)) == len(("plain", "other"))


@pytest.mark.parametrize(
    ("field", "plain", "other"),
    [
        ("step", "two stages", "three stages"),
        ("because", "loads wait for products", "two were not enough"),
        ("expect", "twice as fast", "a little faster"),
        ("parent", "one_stage", "plain"),
        ("role", "candidate", "ablation"),
        ("defines", {"BLOCK_M": 64, "STAGES": 2}, {"BLOCK_M": 64, "STAGES": 3, "EXTRA": "on"}),
        ("rounds", ("p",), ()),
        (
            "supports",
            Supports(dtype=("fp16", "bf16"), causal=("none", "top_left")),
            Supports(dtype=("bf16",), causal=("none", "top_left"), seq_q_multiple_of=64),
        ),
        ("limits", Limits(spill_bytes=0, stack_bytes=0), Limits(spill_bytes=0, stack_bytes=32)),
        ("instantiations", (("fp16", 64), ("bf16", 64)), (("bf16", 64),)),
    ],
)
def test_a_member_overrides_keys_of_the_folder(
    write_variant: WriteVariant, field: str, plain: object, other: object
) -> None:
    """An empty member has the folder's keys; other members override some of them and keep the rest."""
    first, second = read(write_variant("thing", manifest=MEMBERS, **{"kernel.cu": ""}))
    assert (plain, other) == (getattr(first, field), getattr(second, field))


def test_members_may_share_a_target_and_differ_in_context(write_variant: WriteVariant) -> None:
    """A member's `target` and `context` override those of the folder's entry."""
    text = REQUIRED + (
        'entry: {kind: python, target: "module:one", context: "module:pin"}\n'
        'variants: {a: {target: "module:two"}, b: {context: "module:free"}}'
    )
    expected = [("module:two", "module:pin"), ("module:one", "module:free")]
    variants = read(write_variant("thing", manifest=text))
    assert expected == [(each.entry.target, each.entry.context) for each in variants]


CALLS = """\
entry: {target: "module:one", call: {arguments: [q, k, v]}}
variants:
  plain: {}
  masked: {call: {keywords: {hidden: WORD}}, supports: {mask: true}, conventions: {mask_true: hides}}
"""


def test_members_may_be_called_in_other_ways(write_variant: WriteVariant) -> None:
    """A member's `call` replaces that of the folder's entry."""
    variants = read(write_variant("thing", manifest=CALLS.replace("WORD", "attn_mask")))
    expected = [("plain", Call()), ("masked", Call(keywords={"hidden": "attn_mask"}))]
    assert expected == [(each.name, each.entry.call) for each in variants]


def test_a_wrong_word_in_the_call_of_a_member_is_named(write_variant: WriteVariant) -> None:
    """The message has the keyword and what is allowed."""
    with pytest.raises(ManifestError, match=r"variants\[...\].call.keywords.hidden is 'masks'; allowed: q, k, v, "):
        read(write_variant("thing", manifest=CALLS.replace("WORD", "masks")))


# -- what is wrong ----------------------------------------------------------------------------------------------------


TORCH = "entry: {kind: torch, sources: [kernel.cu], target: forward"


@pytest.mark.parametrize(
    "text",
    [
        "rol: probe",
        "xyz: 1",
        "entry: {kin: cuda}",
        TORCH + ", call: {layouts: bhsd}}",
        "supports: {dtypes: [fp16]}",
        "limits: {spills: 0}",
        "limits: {instructions: {LDL: {maxi: 0}}}",
        "variants: {a: {roles: probe}}",
        "variants: {a: {supports: {causl: [none]}}}",
        "suppressions: {racecheck: {mos: 1, because: x}}",
    ],
)
def test_an_unknown_key_is_refused_with_the_allowed_ones(
    write_variant: WriteVariant, text: str, snapshot: SnapshotAssertion
) -> None:
    """The message names the key, its place, the closest known key and all known keys."""
    assert snapshot == problem_of(write_variant("thing", manifest=REQUIRED + text, **{"kernel.cu": ""}))


@pytest.mark.parametrize(
    "text",
    [
        "role: candidat",
        "tolerance: loose",
        "entry: {kind: tarch}",
        "variants: {a: {role: x}}",
        TORCH + ", call: {layout: sbhd}}",
        TORCH + ", call: {arguments: [q, k, v, {const: 1}]}}",
        TORCH + ", call: {arguments: [q, k, v, skale]}}",
        "arch: [sm_80, ampere]",
        "arch: [sm_90b]",
        "rounds: [q, x]",
        "supports: {dtype: [fp16, fp8]}",
        "supports: {causal: [causal]}",
        "variants: {a: {rounds: [x]}}",
    ],
)
def test_an_unknown_value_is_refused_with_the_allowed_ones(
    write_variant: WriteVariant, text: str, snapshot: SnapshotAssertion
) -> None:
    """The message names the key, the value found and all allowed values, also for items of lists."""
    assert snapshot == problem_of(write_variant("thing", manifest=REQUIRED + text, **{"kernel.cu": ""}))


@pytest.mark.parametrize(
    "text",
    [
        "supports: {dtype: fp16}",
        "supports: {grouped_heads: 1}",
        "supports: {seq_q_multiple_of: 0}",
        "supports: {seq_k_min: -1}",
        "limits: {spill_bytes: -1}",
        "limits: {instructions: {LDL: {max: -1}}}",
        "instantiations: [fp16d64]",
        "defines: {X: true}",
        "defines: {X: 1.5}",
        "defines: {X: 1, Y: 2.5}",
        "supports: {dtype: 'fp16, bf16'}",
        "supports: {dtype: []}",
        "supports: {head_dim: 64}",
        "supports: {head_dim: 64.0}",
        "supports: {dtype: }",
        "arch: sm_90a",
        "entry: entry",
        "entry: entry.py",
        "entry: mine.cu",
        "entry: [1]",
        "omits: 3",
        "role: 3",
        "cases: " + "x" * 100,
        f"limits: {{spill_bytes: [{10**30}]}}",
        "variants: {a: {supports: {seq_k_min: 1}}, b: {supports: {seq_k_min: -1}}}",
        'entry: {target: "entry.py:forward"}',
        'entry: {target: "m:f", context: "pin.py:pin"}',
        "flags: -lineinfo",
        "variants: [a]",
        "variants: {a: }",
        "entry: {source: other.cu}",
        "entry: {kind: python}",
        "entry: {kind: python, target: module.function}",
        'entry: {kind: python, target: "module:f", context: "pin it"}',
        "entry: {kind: torch, target: f}",
        "entry: {kind: torch, sources: [gone.cpp], target: f}",
        "entry: {kind: torch, sources: [variant.yaml], target: f}",
        "entry: {include: ['a$b']}",
        'entry: {target: "m:f", include: [.]}',
        "entry: {kind: torch, sources: [kernel.cu], target: a.b}",
        "entry: {kind: cuda, sources: [kernel.cu]}",
        "entry: {call: {}}",
        TORCH + ", call: {arguments: [q, k]}}",
        TORCH + ", call: {layout: bshd, contiguous: true}}",
        "entry: {kind: torch, sources: [kernel.cu, kernel.cu], target: f}",
        TORCH + ", call: {arguments: [q, k, v, out], returns: 0}}",
        TORCH + ", call: {}}\nsupports: {causal: [none, top_left]}",
        TORCH + ", call: {keywords: {c: causal}}}\nsupports: {causal: [top_left, bottom_right]}",
        'variants: {a: {target: ""}}\nentry: {kind: python, target: "m:f"}',
        "supports: {any_head_dim: true}",
        'role: candidate\nentry: {target: "m:f"}\nsupports: {any_head_dim: true}',
    ],
)
def test_a_wrong_value_is_refused_with_its_key(
    write_variant: WriteVariant, text: str, snapshot: SnapshotAssertion
) -> None:
    """The message names the key and what is expected; no value is converted silently."""
    assert snapshot == problem_of(write_variant("thing", manifest=REQUIRED + text, **{"kernel.cu": ""}))


@pytest.mark.parametrize("text", ["", "# nothing yet", "{}"])
def test_no_key_is_required(write_variant: WriteVariant, text: str) -> None:
    """An empty manifest is a CUDA candidate in kernel.cu with every default, and any architecture can be selected."""
    (variant,) = read(write_variant("thing", manifest=text, **{"kernel.cu": ""}))
    assert ("", "", "", "candidate") == (variant.step, variant.because, variant.expect, variant.role)
    assert (Entry(), ("sm_80", "sm_89", "sm_90a"), True) == (variant.entry, variant.arch, variant.any_arch)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ('entry: {target: "module:f"}', "python"),
        ("entry: {sources: [kernel.cu], target: f}", "torch"),
        ("entry: {source: kernel.cu}", "cuda"),
    ],
)
def test_the_kind_of_an_entry_follows_from_its_keys(write_variant: WriteVariant, text: str, kind: str) -> None:
    """Without `kind`, an entry with sources is an extension, one with a target alone is a Python function."""
    (variant,) = read(write_variant("thing", manifest=text, **{"kernel.cu": ""}))
    assert kind == variant.entry.kind


@pytest.mark.parametrize(
    ("files", "more"),
    [
        ({"mine.cu": ""}, "; for mine.cu write `entry: {source: mine.cu}`"),
        ({"mine.py": ""}, '; for mine.py write `entry: {target: "mine:FUNCTION"}`'),
        ({"mine.py": "", "mine.cu": ""}, "; for mine.cu write `entry: {source: mine.cu}`"),
        ({"a.cu": "", "b.cu": ""}, ""),
        ({}, ""),
    ],
)
def test_a_source_of_another_name_is_suggested(write_variant: WriteVariant, files: dict[str, str], more: str) -> None:
    """If kernel.cu is missing and the folder has one other source, the message has the line to write for it."""
    problem = problem_of(write_variant("thing", manifest="", **files))
    assert f"entry.source is 'kernel.cu'; that file does not exist{more}" == problem


@pytest.mark.parametrize(("text", "shown"), [("- step", '["step"]'), ("step", "'step'")])
def test_a_manifest_is_a_mapping(write_variant: WriteVariant, text: str, shown: str) -> None:
    """A file that is not a mapping is refused, with its content and an example."""
    problem = f"the manifest is {shown}; write keys and values, such as `supports: {{dtype: [fp16]}}`"
    assert problem == problem_of(write_variant("thing", manifest=text))


@pytest.mark.parametrize("name", ["Thing", "2_stages", "two-stages", "two stages"])
def test_a_variant_name_must_be_a_lowercase_word(write_variant: WriteVariant, name: str) -> None:
    """A folder name with other characters is refused, and the message quotes it."""
    folder = write_variant(name, manifest=REQUIRED, **{"kernel.cu": ""})
    assert repr(name) in problem_of(folder)


@pytest.mark.parametrize(
    ("text", "name"),
    [("{Bad: {}}", "Bad"), ("{a: {}, 2x: {}}", "2x")],
)
def test_a_member_name_must_be_a_lowercase_word(write_variant: WriteVariant, text: str, name: str) -> None:
    """A member name with other characters is refused, and the message names `variants` and quotes it."""
    problem = problem_of(write_variant("thing", manifest=f"{REQUIRED}variants: {text}", **{"kernel.cu": ""}))
    assert problem.startswith("variants")
    assert repr(name) in problem


@pytest.mark.parametrize("name", ["block", "BLOCK-M", "2BLOCK"])
def test_a_definition_must_be_an_uppercase_word(write_variant: WriteVariant, name: str) -> None:
    """A definition's name with other characters is refused, and the message names `defines` and quotes it."""
    problem = problem_of(write_variant("thing", manifest=f"{REQUIRED}defines: {{{name}: 1}}", **{"kernel.cu": ""}))
    assert problem.startswith("defines")
    assert repr(name) in problem


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (TORCH + ", include: [gone]}", "entry.include has 'gone'; there is no folder {folder}/gone"),
        ("entry: {include: [../../gone]}", "entry.include has '../../gone'; there is no folder {root}/gone"),
        ("entry: {include: [/gone/include]}", "entry.include has '/gone/include'; there is no folder /gone/include"),
        ("flags: [-I../../gone]", "flags: -I../../gone; there is no folder {root}/gone"),
    ],
)
def test_a_missing_include_folder_is_named(write_variant: WriteVariant, text: str, problem: str) -> None:
    """The message has the path as it is written and the whole path."""
    folder = write_variant("thing", manifest=REQUIRED + text, **{"kernel.cu": ""})
    assert problem.format(folder=folder, root=folder.parents[1]) == problem_of(folder)


def test_include_folders_are_read(write_variant: WriteVariant) -> None:
    """`entry.include` of a CUDA source may be relative to the manifest or absolute."""
    folder = write_variant("thing", manifest="entry: {include: [., /usr/include]}", **{"kernel.cu": ""})
    assert [variant.entry.include for variant in read(folder)] == [(".", "/usr/include")]


def test_an_empty_list_of_variants_is_refused(write_variant: WriteVariant) -> None:
    """`variants: {}` is refused, and the message names `variants`."""
    assert "variants" in problem_of(write_variant("thing", manifest=REQUIRED + "variants: {}", **{"kernel.cu": ""}))


def test_a_missing_file_is_a_manifest_error(tmp_path: Path) -> None:
    """The message for a missing manifest has the reason of the operating system."""
    assert "No such file or directory" in problem_of(tmp_path / "nowhere")


def test_a_file_that_is_not_text_is_a_manifest_error(write_variant: WriteVariant) -> None:
    """A file that is not UTF-8 is refused with the decoder's message."""
    folder = write_variant("thing")
    (folder / "variant.yaml").write_bytes(b"step: \xff\n")
    assert "can't decode byte 0xff" in problem_of(folder)


# -- yaml -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("64", 64),
        ("0", 0),
        ("-3", -3),
        ("010", "010"),
        ("0x10", "0x10"),
        ("1_000", "1_000"),
        ("+1", "+1"),
        ("1:30", "1:30"),
        ("no", "no"),
        ("off", "off"),
        ("Yes", "Yes"),
        ("True", "True"),
        ("2026-01-01", "2026-01-01"),
        ('"64"', "64"),
    ],
)
def test_scalars_are_read_as_yaml_1_2(write_variant: WriteVariant, written: str, value: int | str) -> None:
    """Only decimal numbers are numbers; YAML 1.1's octals, sexagesimals, dates and other booleans are text."""
    text = REQUIRED + f"defines: {{X: {written}}}"
    (variant,) = read(write_variant("thing", manifest=text, **{"kernel.cu": ""}))
    assert ({"X": value}, type(value)) == (variant.defines, type(variant.defines["X"]))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("step: again", "duplicate key 'step' on line 4"),
        ("supports:\n  dtype: [fp16]\n  causal: [none]\n  dtype: [bf16]", "duplicate key 'dtype' on line 7"),
        ("defines: {X: 1, X: 2}", "duplicate key 'X' on line 4"),
        ("variants:\n  a: {}\n  b: {}\n  a: {}", "duplicate key 'a' on line 7"),
        ("defines: {X: 1, 'X': 2}", "duplicate key 'X' on line 4"),
    ],
)
def test_a_duplicate_key_is_refused(write_variant: WriteVariant, text: str, problem: str) -> None:
    """A duplicate key is refused with its line; PyYAML would keep the last value."""
    assert problem == problem_of(write_variant("thing", manifest=REQUIRED + text, **{"kernel.cu": ""}))


@pytest.mark.parametrize("text", ["[a]: b", "{a: 1}: b"])
def test_a_key_must_be_a_plain_word(write_variant: WriteVariant, text: str) -> None:
    """A list or a mapping as a key is refused with its line."""
    assert "line 4" in problem_of(write_variant("thing", manifest=REQUIRED + text, **{"kernel.cu": ""}))


@pytest.mark.parametrize("text", ["role: [", "role: !!python/name:os.system x", "role: *missing", "\trole: probe"])
def test_the_message_for_broken_yaml_is_one_line(write_variant: WriteVariant, text: str) -> None:
    """The message for invalid YAML has the parser's message and the line number, on one line."""
    problem = problem_of(write_variant("thing", manifest=REQUIRED + text, **{"kernel.cu": ""}))
    assert "line 4" in problem
    assert "\n" not in problem


def test_a_variant_that_omits_a_phase_is_an_ablation_with_a_parent(tmp_path: Path) -> None:
    """`omits` needs role ablation and a parent; such a variant is not judged."""
    manifest = "step: a\nbecause: b\nexpect: c\nomits: softmax\n"
    folder = tmp_path / "kernels" / "part"
    folder.mkdir(parents=True)
    (folder / "kernel.cu").write_text("", encoding="utf-8")
    path = folder / "variant.yaml"
    path.write_text(f"{manifest}role: ablation\nparent: whole\n", encoding="utf-8")
    (variant,) = read_manifest(path, folder.parent)
    assert (variant.omits, variant.is_judged) == ("softmax", False)
    for line, values in (
        ("role: ablation\n", "omits is 'softmax', role is 'ablation', parent is None"),
        ("parent: whole\n", "omits is 'softmax', role is 'candidate', parent is 'whole'"),
    ):
        path.write_text(manifest + line, encoding="utf-8")
        with pytest.raises(ManifestError, match=f"part: {values}; omits needs role 'ablation' and a parent"):
            read_manifest(path, folder.parent)


def test_only_a_baseline_is_optional(write_variant: WriteVariant, snapshot: SnapshotAssertion) -> None:
    """A baseline may be optional; for other roles, the key is an error."""
    baseline = read(write_variant("thing", manifest="role: baseline\noptional: true\n", **{"kernel.cu": ""}))
    assert [(each.optional, each.runs_beside_others) for each in baseline] == [(True, False)]
    problem = problem_of(write_variant("other", manifest="optional: true\n", **{"kernel.cu": ""}))
    assert snapshot == problem


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("role: ablation\nparent: whole\nleaves_out: softmax\n", "unknown key 'leaves_out'"),
        ("explained: {racecheck: {most: 2, because: false positive}}\n", "unknown key 'explained'"),
        ("role: floor\n", "role is 'floor'"),
        ("tolerance: measured\n", "tolerance is 'measured'"),
    ],
    ids=["leaves_out", "explained", "floor", "measured"],
)
def test_a_name_of_an_earlier_version_is_refused(
    write_variant: WriteVariant, text: str, problem: str, snapshot: SnapshotAssertion
) -> None:
    """An old name is an unknown one: the error lists what is allowed."""
    complaint = problem_of(write_variant("thing", manifest=REQUIRED + text, **{"kernel.cu": ""}))
    assert problem in complaint
    assert snapshot == complaint
