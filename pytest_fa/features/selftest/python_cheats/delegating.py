"""Exploits that have torch's own attention do the work.  Each function is the target of one variant."""

from __future__ import annotations

import base64
import multiprocessing
import pickle
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from torch.nn import functional

POOL, PIPES = ThreadPoolExecutor(1), []
HIDDEN = base64.b64encode(b"functional.scaled_dot_product_attention(q, k, v, scale=scale)")


def writes(attention):
    """Make a target that writes the result of `attention(q, k, v, scale)` into `out`."""

    def forward(q, k, v, *, scale, causal="none", out=None):
        return out.copy_(attention(q, k, v, scale))

    return forward


def ask_library(q, k, v, scale):
    """Return what SDPA returns."""
    return functional.scaled_dot_product_attention(q, k, v, scale=scale)


sdpa = writes(ask_library)
in_pool = writes(lambda *arguments: POOL.submit(ask_library, *arguments).result())
by_hidden_text = writes(
    lambda q, k, v, scale: eval(base64.b64decode(HIDDEN), globals(), {"q": q, "k": k, "v": v, "scale": scale})
)


def in_thread(q, k, v, *, scale, causal="none", out=None):
    thread = threading.Thread(target=lambda: out.copy_(ask_library(q, k, v, scale)))
    thread.start()
    thread.join()
    return out


@writes
def unobserved(q, k, v, scale):
    """Call SDPA, but not while a function of the caller's is named as the one that lists operators."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "operators_of":
            return (torch.softmax(q.float() @ k.float().transpose(2, 3) * scale, -1) @ v.float()).to(q.dtype)
        frame = frame.f_back
    return ask_library(q, k, v, scale)


@writes
def replaced_observer(q, k, v, scale):
    """Replace the function that lists operators by one that lists none."""
    sys.modules["pytest_fa.candidate.agent"].operators_of = lambda call: (call(), ())[1]
    return ask_library(q, k, v, scale)


def serve(end):
    """Answer each question on a pipe with what SDPA returns."""
    while True:
        *tensors, scale = end.recv()
        end.send(ask_library(*map(torch.from_numpy, tensors), scale).numpy())


@writes
def in_process(q, k, v, scale):
    """Have SDPA called in another process."""
    if not PIPES:
        near, far = multiprocessing.Pipe()
        multiprocessing.get_context("fork").Process(target=serve, args=(far,), daemon=True).start()
        PIPES.append(near)
    PIPES[0].send((*(tensor.numpy().copy() for tensor in (q, k, v)), scale))
    return torch.from_numpy(PIPES[0].recv())


PROGRAM = """
import pickle, sys, torch
while True:
    q, k, v, scale = pickle.load(sys.stdin.buffer)
    out = torch.nn.functional.scaled_dot_product_attention(*map(torch.from_numpy, (q, k, v)), scale=scale)
    pickle.dump(out.numpy(), sys.stdout.buffer)
    sys.stdout.flush()
"""
PROGRAMS = []


@writes
def in_program(q, k, v, scale):
    """Have SDPA called in a new program, in which torch's attention is its own."""
    if not PROGRAMS:
        command = [sys.executable, "-c", PROGRAM]
        PROGRAMS.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
    pickle.dump((*(tensor.numpy() for tensor in (q, k, v)), scale), PROGRAMS[0].stdin)
    PROGRAMS[0].stdin.flush()
    return torch.from_numpy(pickle.load(PROGRAMS[0].stdout))


@writes
def by_operator(q, k, v, scale):
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, scale=scale)[0]


@writes
def by_other_name(q, k, v, scale):
    return getattr(torch._C._nn, "scaled_dot" + "_product_attention")(q, k, v, scale=scale)


@writes
def multi_head_attention(q, k, v, scale):
    """Call multi-head attention with weights of one, whose scale is the default."""
    batch, heads, rows, size = q.shape
    one, none = torch.eye(size, dtype=q.dtype), torch.zeros(3 * size, dtype=q.dtype)
    q, k, v = (tensor.reshape(batch * heads, -1, size).transpose(0, 1) for tensor in (q, k, v))
    result, _ = functional.multi_head_attention_forward(
        *(q, k, v, size, 1, None, none, None, None, False, 0.0, one, none[:size]),
        use_separate_proj_weight=True, q_proj_weight=one, k_proj_weight=one, v_proj_weight=one, need_weights=False,
    )  # fmt: skip
    return result.transpose(0, 1).view(batch, heads, rows, size)


# -- the backward pass ------------------------------------------------------------------------------------------------


def backward_by_autograd(dout, q, k, v, out, lse, *, scale, causal="none", dq, dk, dv):
    """Return the gradients that autograd gives for SDPA, which is called once more."""
    leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
    return torch.autograd.grad(ask_library(*leaves, scale), leaves, dout)
