"""The process of the user's functions: it imports their file, and calls them on inputs that the judge sends.

It is neither the judge's nor a candidate's.  It gets q, k and v of a call and nothing of what a candidate wrote.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import torch

from pytest_fa.catalog.kernels_folder import MANIFEST
from pytest_fa.catalog.own_truth import digest_of
from pytest_fa.errors import FaError
from pytest_fa.features.truth.judge_side.messages import TruthAnswer, TruthQuestion, memory_of, read_tensors
from pytest_fa.gpu.inputs import extra_dtype, given_form
from pytest_fa.wire.channel import Channel
from pytest_fa.wire.user_traceback import CALL_HINT, explanation_of

UsersFunction = Callable[..., Any]


class NoneWord(str):
    """The word "none": equal to the text that kernels get, and false, so that `if causal:` means what it says."""

    __slots__ = ()

    def __bool__(self) -> bool:
        """A mask that is none masks nothing."""
        return False


class Unusable(FaError):
    """A function returned what is no output."""


def serve_functions(channel: Channel) -> None:
    """Answer questions until the judge closes the connection."""
    modules: dict[str, Any] = {}
    ours = frozenset(sys.modules)  # what the user's files import comes later
    while True:
        try:
            question = msgspec.json.decode(channel.receive(), type=TruthQuestion)
        except EOFError:
            return
        descriptor = channel.take_descriptor()
        answer, memory = _answer(question, descriptor, modules, ours)
        if descriptor is not None:
            os.close(descriptor)
        try:
            channel.send(msgspec.json.encode(answer), memory)
        except OSError:
            return  # the judge has ended
        finally:
            if memory is not None:
                os.close(memory)


def _answer(
    question: TruthQuestion, descriptor: int | None, modules: dict[str, Any], ours: frozenset[str]
) -> tuple[TruthAnswer, int | None]:
    try:
        q, k, v, *kept = (tensor.to(question.device) for tensor in read_tensors(descriptor, question.shapes))
        pairs, named = (*q.shape[:3], k.shape[2]), zip(question.tensors, kept, strict=True)
        more = {name: given_form(name, _of_kind(name, tensor), pairs) for name, tensor in named}
        function = _function(question, modules, ours)
        outputs = _outputs(_call(function, question, (q, k, v), more), question)
        _require_no_kernel(question.files[0], ours)
    except (Unusable, SystemExit) as problem:
        return TruthAnswer(problem=str(problem) or "ended its process"), None
    except Exception as problem:  # noqa: BLE001  # a user's function may raise anything
        first, *rest = explanation_of(problem).replace(CALL_HINT, "").splitlines()
        return TruthAnswer(problem=f"raised {first}", details="\n".join(rest)), None
    finally:
        if question.device == "cuda":
            torch.cuda.empty_cache()
    return TruthAnswer(shapes=tuple(tuple(each.shape) for each in outputs)), memory_of(outputs)


def _function(question: TruthQuestion, modules: dict[str, Any], ours: frozenset[str]) -> UsersFunction:
    """The function, of the file and of what it imports as they were when the run began."""
    file = question.files[0]
    if file not in modules:
        if digest_of(question.files) != question.sha256:
            raise Unusable("has changed since the run began, or a file that it imports has; run it again")
        _forget(modules, ours)
        path = Path(file)
        sys.path.insert(0, str(path.parent))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None  # noqa: S101  # the path ends with .py
        assert spec.loader is not None  # noqa: S101  # as above
        module = importlib.util.module_from_spec(spec)
        sys.modules.setdefault(path.stem, module)
        spec.loader.exec_module(module)
        modules[file] = module
    function = getattr(modules[file], question.function, None)
    if not callable(function):
        raise Unusable("is not a function")
    return cast("UsersFunction", function)


def _forget(modules: dict[str, Any], ours: frozenset[str]) -> None:
    """Forget what an earlier file imported from its folder: another file may mean another module by the same name."""
    folders = {str(Path(file).parent) for file in modules}
    for name in sys.modules.keys() - ours:
        source = getattr(sys.modules[name], "__file__", None) or ""
        if any(source.startswith(f"{folder}{os.sep}") for folder in folders):
            del sys.modules[name]
    sys.path[:] = [place for place in sys.path if place not in folders]
    modules.clear()


def _of_kind(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A part's tensor, which came in float64, as a function gets it: only numbers stay in float64."""
    dtype = extra_dtype(name, tensor.dtype)
    return tensor if dtype.is_floating_point else tensor.to(dtype)


def _call(
    function: UsersFunction, question: TruthQuestion, qkv: Sequence[torch.Tensor], more: dict[str, torch.Tensor]
) -> Any:  # noqa: ANN401  # what a user's function returns
    """Call the function with those of the keywords that it takes."""
    words = {name: NoneWord(value) if value == "none" else value for name, value in question.keywords.items()}
    keywords = {**words, **more, "dtype": getattr(torch, question.dtype)}
    parameters = inspect.signature(function).parameters.values()
    if not any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters):
        names = {each.name for each in parameters}
        if missing := [name for name in question.needed if name not in names]:
            raise Unusable(f"takes no keyword argument `{missing[0]}`, without which this call cannot be judged")
        keywords = {name: value for name, value in keywords.items() if name in names}
    with torch.no_grad():
        return function(*qkv, **keywords)


def _require_no_kernel(path: str, ours: frozenset[str]) -> None:
    """Require that no source of a variant was imported: a kernel cannot be its own truth."""
    for name in sys.modules.keys() - ours:
        source = getattr(sys.modules[name], "__file__", None)
        if source and source != path and (Path(source).parent / MANIFEST).exists():
            raise Unusable(
                f"imports {source}, which is in the folder of a kernel; what is true must not come from there"
            )


def _outputs(result: Any, question: TruthQuestion) -> tuple[torch.Tensor, ...]:  # noqa: ANN401  # as above
    """The output, and the log-sum-exp if the function returns it."""
    outputs = result if isinstance(result, tuple | list) else (result,)
    expected = (list(question.out_shape), list(question.out_shape[:3]))
    if not 1 <= len(outputs) <= len(expected) or not all(isinstance(each, torch.Tensor) for each in outputs):
        raise Unusable(f"returned {_described(result)}; return the output, or (out, lse), as tensors")
    for name, tensor, shape in zip(("output", "log-sum-exp"), outputs, expected, strict=False):
        if list(tensor.shape) != shape:
            raise Unusable(f"returned an {name} of shape {list(tensor.shape)}; the kernel's is {shape}")
        if tensor.dtype != torch.float64 and question.is_exact:
            raise Unusable(f"returned {str(tensor.dtype).removeprefix('torch.')}; compute and return float64")
    return tuple(each.detach().double().cpu().contiguous() for each in outputs)


def _described(result: Any) -> str:  # noqa: ANN401  # as above
    if isinstance(result, tuple | list):
        return f"{len(result)} values ({', '.join(type(each).__name__ for each in result)})"
    return "nothing" if result is None else type(result).__name__
