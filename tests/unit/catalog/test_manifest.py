"""`variant.yaml`: every key is read, members differ where they say so, and what is wrong is named in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

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
    """The variants of one folder under `kernels`."""
    return read_manifest(folder / "variant.yaml", folder.parent)


def problem_of(folder: Path) -> str:
    """The one line that a wrong manifest gives, without the file that it begins with."""
    with pytest.raises(ManifestError) as problem:
        read(folder)
    path = f"{folder / 'variant.yaml'}: "
    assert path == str(problem.value)[: len(path)]
    return str(problem.value)[len(path) :]


def test_three_lines_make_a_variant(write_variant: WriteVariant) -> None:
    """A manifest with its three texts alone is a candidate: `kernel.cu` for every architecture, fp16, 64 wide."""
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
    )
    assert [expected] == read(folder)


def test_every_key_is_read(write_variant: WriteVariant) -> None:
    """Each key of a manifest that uses them all arrives with its value."""
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
    """Without `instantiations`, each dtype meets each head_dim."""
    text = REQUIRED + "supports: {dtype: [fp16, bf16], head_dim: [64, 128]}"
    (variant,) = read(write_variant("thing", manifest=text, **{"kernel.cu": ""}))
    expected = ("fp16", 64), ("fp16", 128), ("bf16", 64), ("bf16", 128)
    assert expected == variant.instantiations


def test_a_python_entry_has_no_architectures(write_variant: WriteVariant) -> None:
    """A callable is compiled for nothing, and needs no source beside its manifest."""
    text = REQUIRED + 'entry: {kind: python, target: "package.module:function", context: "module:pin"}'
    (variant,) = read(write_variant("thing", manifest=text))
    entry = Entry(kind="python", target="package.module:function", context="module:pin")
    assert (entry, ()) == (variant.entry, variant.arch)


# -- members ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("source", "expected"), [("kernel.cu", ("sm_80", "sm_90a")), ("kernel.cpp", ("host",))])
def test_a_torch_entry_is_for_the_gpu_or_for_the_host(
    write_variant: WriteVariant, source: str, expected: tuple[str, ...]
) -> None:
    """CUDA sources are compiled for the manifest's architectures, C++ alone for the host; the call is read whole."""
    text = REQUIRED + (
        "arch: [sm_80, sm_90a]\n"
        f"entry: {{kind: torch, sources: [{source}], include: [.], cflags: [-g], ldflags: [-lm], "
        "target: mine::forward, call: {arguments: [q, k, v, 1.5e-3, true, ~, {constant: q}], "
        "keywords: {scale: scale}, layout: bshd, contiguous: true, returns: 0}}\nsupports: {layout: [bshd]}\n"
    )
    (found,) = read(write_variant("thing", manifest=text, **{source: ""}))
    call = Call(
        ("q", "k", "v", 0.0015, True, None, Constant("q")), {"scale": "scale"}, "bshd", contiguous=True, returns=0
    )
    entry = Entry(
        kind="torch",
        sources=(source,),
        include=(".",),
        cflags=("-g",),
        ldflags=("-lm",),
        target="mine::forward",
        call=call,
    )
    assert (entry, expected) == (found.entry, found.arch)


def test_members_replace_the_folder_variant(write_variant: WriteVariant) -> None:
    """A folder that names its variants has those and none of its own name, in the manifest's order."""
    folder = write_variant("thing", manifest=MEMBERS, **{"kernel.cu": ""})
    expected = ["plain", "other"]
    assert expected == [each.name for each in read(folder)]


def test_a_folder_of_members_may_have_any_name(write_variant: WriteVariant) -> None:
    """A folder's name is checked only where it names a variant."""
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
def test_a_member_differs_where_it_says_so(
    write_variant: WriteVariant, field: str, plain: object, other: object
) -> None:
    """An empty member is the folder's manifest; another replaces key by key and keeps the rest."""
    first, second = read(write_variant("thing", manifest=MEMBERS, **{"kernel.cu": ""}))
    assert (plain, other) == (getattr(first, field), getattr(second, field))


def test_members_may_share_a_target_and_differ_in_context(write_variant: WriteVariant) -> None:
    """A member's `target` and `context` replace those of the folder's entry."""
    text = REQUIRED + (
        'entry: {kind: python, target: "module:one", context: "module:pin"}\n'
        'variants: {a: {target: "module:two"}, b: {context: "module:free"}}'
    )
    expected = [("module:two", "module:pin"), ("module:one", "module:free")]
    variants = read(write_variant("thing", manifest=text))
    assert expected == [(each.entry.target, each.entry.context) for each in variants]


# -- what is wrong ----------------------------------------------------------------------------------------------------

TOP = (
    "step, because, expect, parent, role, computes, cases, entry, arch, supports, instantiations, defines, flags, "
    "rounds, limits, tolerance, deterministic, omits, suppressions, variants"
)
SUPPORTS = "dtype, head_dim, causal, layout, device, grouped_heads, seq_q_multiple_of, seq_k_multiple_of, seq_k_min"
LIMITS = "registers_per_thread, spill_bytes, stack_bytes, smem_bytes_per_block, advisories, instructions"
MEMBER = (
    "defines, role, cases, target, context, step, parent, because, expect, supports, limits, rounds, deterministic, "
    "omits, suppressions"
)

ENTRY = "kind, source, target, context, sources, include, cflags, ldflags, call"
CALL = "arguments, keywords, layout, contiguous, returns"
TORCH = "entry: {kind: torch, sources: [kernel.cu], target: forward"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("rol: probe", f"unknown key 'rol' in the manifest; did you mean 'role'? (allowed: {TOP})"),
        ("xyz: 1", f"unknown key 'xyz' in the manifest (allowed: {TOP})"),
        (
            "entry: {kin: cuda}",
            f"unknown key 'kin' in entry; did you mean 'kind'? (allowed: {ENTRY})",
        ),
        (
            TORCH + ", call: {layouts: bhsd}}",
            f"unknown key 'layouts' in entry.call; did you mean 'layout'? (allowed: {CALL})",
        ),
        (
            "supports: {dtypes: [fp16]}",
            f"unknown key 'dtypes' in supports; did you mean 'dtype'? (allowed: {SUPPORTS})",
        ),
        ("limits: {spills: 0}", f"unknown key 'spills' in limits; did you mean 'spill_bytes'? (allowed: {LIMITS})"),
        (
            "limits: {instructions: {LDL: {maxi: 0}}}",
            "unknown key 'maxi' in limits.instructions[...]; did you mean 'max'? (allowed: min, max)",
        ),
        (
            "variants: {a: {roles: probe}}",
            f"unknown key 'roles' in variants[...]; did you mean 'role'? (allowed: {MEMBER})",
        ),
        (
            "variants: {a: {supports: {causl: [none]}}}",
            f"unknown key 'causl' in variants[...].supports; did you mean 'causal'? (allowed: {SUPPORTS})",
        ),
    ],
)
def test_an_unknown_key_is_answered_with_the_allowed_ones(write_variant: WriteVariant, text: str, problem: str) -> None:
    """The message names the key, where it stands, the nearest known key and all of them."""
    assert problem == problem_of(write_variant("thing", manifest=REQUIRED + text, **{"kernel.cu": ""}))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("role: candidat", "role is 'candidat'; allowed: candidate, baseline, overhead, ablation, probe, wrong"),
        ("tolerance: loose", "tolerance is 'loose'; allowed: same_precision, absolute, fp8"),
        ("entry: {kind: tarch}", "entry.kind is 'tarch'; allowed: cuda, torch, python"),
        (
            "variants: {a: {role: x}}",
            "variants[...].role is 'x'; allowed: candidate, baseline, overhead, ablation, probe, wrong",
        ),
        (TORCH + ", call: {layout: sbhd}}", "entry.call.layout is 'sbhd'; allowed: bhsd, bshd"),
        (
            TORCH + ", call: {arguments: [q, k, v, {const: 1}]}}",
            "unknown key 'const' in entry.call.arguments[3]; did you mean 'constant'? (allowed: constant)",
        ),
        (
            TORCH + ", call: {arguments: [q, k, v, skale]}}",
            (
                "entry.call.arguments[3] is 'skale'; allowed: q, k, v, out, scale, causal, "
                "numbers, true, false, null, {constant: text}"
            ),
        ),
        ("arch: [sm_70]", "arch[0] is 'sm_70'; allowed: sm_80, sm_89, sm_90a"),
        ("rounds: [q, x]", "rounds[1] is 'x'; allowed: q, s, p"),
        ("supports: {dtype: [fp16, fp8]}", "supports.dtype[1] is 'fp8'; allowed: fp16, bf16"),
        ("supports: {causal: [causal]}", "supports.causal[0] is 'causal'; allowed: none, top_left, bottom_right"),
        ("variants: {a: {rounds: [x]}}", "variants[...].rounds[0] is 'x'; allowed: q, s, p"),
    ],
)
def test_a_wrong_word_is_answered_with_the_allowed_ones(write_variant: WriteVariant, text: str, problem: str) -> None:
    """The message names the key, the value found and every value allowed, in a list as well."""
    assert problem == problem_of(write_variant("thing", manifest=REQUIRED + text, **{"kernel.cu": ""}))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("supports: {dtype: fp16}", "supports.dtype: Expected `array`, got `str`"),
        ("supports: {grouped_heads: 1}", "supports.grouped_heads: Expected `bool`, got `int`"),
        ("supports: {seq_q_multiple_of: 0}", "supports.seq_q_multiple_of: Expected `int` >= 1"),
        ("supports: {seq_k_min: -1}", "supports.seq_k_min: Expected `int` >= 0"),
        ("limits: {spill_bytes: -1}", "limits.spill_bytes: Expected `int` >= 0"),
        ("limits: {instructions: {LDL: {max: -1}}}", "limits.instructions[...].max: Expected `int` >= 0"),
        ("instantiations: [fp16d64]", "instantiations[0]: Expected `str` matching regex '^(fp16|bf16)-d[0-9]+$'"),
        ("defines: {X: true}", "defines[...]: Expected `int | str`, got `bool`"),
        ("defines: {X: 1.5}", "defines[...]: Expected `int | str`, got `float`"),
        ("flags: -lineinfo", "flags: Expected `array`, got `str`"),
        ("variants: [a]", "variants: Expected `object | null`, got `array`"),
        ("variants: {a: }", "variants[...]: Expected `object`, got `null`"),
        ("entry: {source: other.cu}", "entry.source is 'other.cu', and there is no such file"),
        ("entry: {kind: python}", "entry.target is ''; a python entry's is 'package.module:function'"),
        (
            "entry: {kind: python, target: module.function}",
            "entry.target is 'module.function'; a python entry's is 'package.module:function'",
        ),
        (
            'entry: {kind: python, target: "module:f", context: "pin it"}',
            "entry.context is 'pin it'; a python entry's is 'package.module:function'",
        ),
        ("entry: {kind: torch, target: f}", "entry.sources is missing; a torch entry names its source files"),
        (
            "entry: {kind: torch, sources: [gone.cpp], target: f}",
            "entry.sources is 'gone.cpp', and there is no such file",
        ),
        (
            "entry: {kind: torch, sources: [variant.yaml], target: f}",
            "entry.sources has 'variant.yaml'; a source ends with .cu, .cpp, .cc, .cxx, .c",
        ),
        (TORCH + ", include: [gone]}", "entry.include is 'gone', and there is no such folder"),
        (
            "entry: {kind: torch, sources: [kernel.cu], target: a.b}",
            "entry.target is 'a.b'; a torch entry's is 'function' or 'namespace::operator'",
        ),
        ("entry: {sources: [kernel.cu]}", "entry.sources is for kind torch, this one is cuda"),
        ("entry: {call: {}}", "entry.call is for kind torch or python, this one is cuda"),
        (TORCH + ", call: {arguments: [q, k]}}", "entry.call does not pass 'v'"),
        (
            TORCH + ", call: {layout: bshd, contiguous: true}}",
            "entry.call takes contiguous bshd tensors, and supports.layout is bhsd",
        ),
        (
            "entry: {kind: torch, sources: [kernel.cu, kernel.cu], target: f}",
            "entry.sources has kernel.cu, kernel.cu, which make one object file; give each a name of its own",
        ),
        (
            TORCH + ", call: {arguments: [q, k, v, out], returns: 0}}",
            "entry.call passes 'out' and has returns; the output is the one or the other",
        ),
        (
            TORCH + ", call: {}}\nsupports: {causal: [none, top_left]}",
            "entry.call does not pass 'causal', and supports.causal is none, top_left",
        ),
        (
            TORCH + ", call: {keywords: {c: causal}}}\nsupports: {causal: [top_left, bottom_right]}",
            (
                "entry.call passes 'causal' as true or false, and supports.causal is top_left, bottom_right: "
                "name one alignment"
            ),
        ),
        (
            'variants: {a: {target: ""}}\nentry: {kind: python, target: "m:f"}',
            "entry.target is ''; a python entry's is 'package.module:function'",
        ),
    ],
)
def test_a_wrong_value_is_named_with_its_key(write_variant: WriteVariant, text: str, problem: str) -> None:
    """The message names the key and says what is expected there; nothing is converted silently."""
    assert problem == problem_of(write_variant("thing", manifest=REQUIRED + text, **{"kernel.cu": ""}))


@pytest.mark.parametrize("key", ["step", "because", "expect"])
def test_the_three_texts_must_be_there(write_variant: WriteVariant, key: str) -> None:
    """A variant says what it is, why, and what was expected of it before it was written."""
    text = "".join(line for line in REQUIRED.splitlines(keepends=True) if not line.startswith(key))
    assert f"key {key!r} is missing in the manifest" == problem_of(
        write_variant("thing", manifest=text, **{"kernel.cu": ""})
    )


@pytest.mark.parametrize(
    ("text", "kind"), [("", "null"), ("- step", "array"), ("step", "str"), ("# nothing yet", "null")]
)
def test_a_manifest_is_a_mapping(write_variant: WriteVariant, text: str, kind: str) -> None:
    """A file that holds something else is refused as a whole."""
    assert f"the manifest: Expected `object`, got `{kind}`" == problem_of(write_variant("thing", manifest=text))


@pytest.mark.parametrize("name", ["Thing", "2_stages", "two-stages", "two stages"])
def test_a_variant_name_is_a_lowercase_word(write_variant: WriteVariant, name: str) -> None:
    """A folder name that could not stand in a test id is refused, and the refusal quotes it."""
    folder = write_variant(name, manifest=REQUIRED, **{"kernel.cu": ""})
    assert repr(name) in problem_of(folder)


@pytest.mark.parametrize(
    ("text", "name"),
    [("{Bad: {}}", "Bad"), ("{a: {}, 2x: {}}", "2x")],
)
def test_a_member_name_is_a_lowercase_word(write_variant: WriteVariant, text: str, name: str) -> None:
    """A member's name is checked like a folder's, and the refusal says where it stands and quotes it."""
    problem = problem_of(write_variant("thing", manifest=f"{REQUIRED}variants: {text}", **{"kernel.cu": ""}))
    assert problem.startswith("variants")
    assert repr(name) in problem


@pytest.mark.parametrize("name", ["block", "BLOCK-M", "2BLOCK"])
def test_a_definition_is_an_uppercase_word(write_variant: WriteVariant, name: str) -> None:
    """A definition's name is checked like a macro's, and the refusal says where it stands and quotes it."""
    problem = problem_of(write_variant("thing", manifest=f"{REQUIRED}defines: {{{name}: 1}}", **{"kernel.cu": ""}))
    assert problem.startswith("defines")
    assert repr(name) in problem


def test_an_empty_list_of_variants_is_refused(write_variant: WriteVariant) -> None:
    """`variants: {}` names no variant, and nothing is made up for it."""
    assert "variants" in problem_of(write_variant("thing", manifest=REQUIRED + "variants: {}", **{"kernel.cu": ""}))


def test_a_missing_file_is_a_manifest_error(tmp_path: Path) -> None:
    """A manifest that vanished gives the system's reason."""
    assert "No such file or directory" in problem_of(tmp_path / "nowhere")


def test_a_file_that_is_no_text_is_a_manifest_error(write_variant: WriteVariant) -> None:
    """Bytes that are no UTF-8 are refused like any other mistake."""
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
def test_a_scalar_means_what_it_looks_like(write_variant: WriteVariant, written: str, value: int | str) -> None:
    """Only YAML 1.2's plain numbers are numbers; octals, sexagesimals, dates and the many words for no are text."""
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
def test_a_key_stands_once(write_variant: WriteVariant, text: str, problem: str) -> None:
    """A second mention of a key is refused with its line, where PyYAML would keep the last one."""
    assert problem == problem_of(write_variant("thing", manifest=REQUIRED + text, **{"kernel.cu": ""}))


@pytest.mark.parametrize("text", ["[a]: b", "{a: 1}: b"])
def test_a_key_that_is_no_word_is_a_manifest_error(write_variant: WriteVariant, text: str) -> None:
    """A list or a mapping as a key is refused like any other mistake."""
    assert "line 4" in problem_of(write_variant("thing", manifest=REQUIRED + text, **{"kernel.cu": ""}))


@pytest.mark.parametrize("text", ["role: [", "role: !!python/name:os.system x", "role: *missing", "\trole: probe"])
def test_broken_yaml_is_one_line(write_variant: WriteVariant, text: str) -> None:
    """YAML that cannot be read gives the reader's words and its place on one line."""
    problem = problem_of(write_variant("thing", manifest=REQUIRED + text, **{"kernel.cu": ""}))
    assert "line 4" in problem
    assert "\n" not in problem


def test_an_ablation_says_of_whom(tmp_path: Path) -> None:
    """What leaves a stage out is not judged: with a parent and the role it reads, and else it is refused."""
    manifest = "step: a\nbecause: b\nexpect: c\nomits: softmax\n"
    folder = tmp_path / "kernels" / "part"
    folder.mkdir(parents=True)
    (folder / "kernel.cu").write_text("", encoding="utf-8")
    path = folder / "variant.yaml"
    path.write_text(f"{manifest}role: ablation\nparent: whole\n", encoding="utf-8")
    (variant,) = read_manifest(path, folder.parent)
    assert (variant.omits, variant.is_judged) == ("softmax", False)
    for more in ("role: ablation\n", "parent: whole\n"):
        path.write_text(manifest + more, encoding="utf-8")
        with pytest.raises(ManifestError, match="it needs role 'ablation' and a parent"):
            read_manifest(path, folder.parent)
