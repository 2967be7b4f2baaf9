"""FlexAttention over trees compiled for a card that is not there, by inductor and Triton; nothing is run.

    python -m tests.training.flex_kernels 90

prints a JSON object for each kernel. A process of its own: torch sees the card in it.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch._dynamo
import torch._inductor.config
from torch._dynamo.device_interface import get_interface_for_device
from torch._higher_order_ops.flex_attention import flex_attention, flex_attention_backward
from torch._inductor.debug import DebugContext
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime import triton_helpers, triton_heuristics
from torch._inductor.virtualized import V
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from forge.training.flex import TreeMask

CUDA = "cuda:0"


class Card(NamedTuple):
    """An accelerator: its multiprocessors, and bytes of shared memory that a block of threads can have."""

    name: str
    multiprocessors: int
    shared: int


# By compute capability: CUDA's programming guide, "technical specifications per compute capability".
CARDS = {80: Card("A100", 108, 166_912), 90: Card("H100", 132, 232_448), 100: Card("B200", 148, 232_448)}


class Case(NamedTuple):
    """An attention: dtype, size of heads, query and key heads, and whether it has a window."""

    dtype: str
    size: int
    heads: int
    key_heads: int
    window: bool


# Heads of Qwen2.5 0.5B and 7B, Gemma3 1B, and without half precision.
CASES = [
    Case("bfloat16", 64, 14, 2, False),
    Case("bfloat16", 128, 28, 4, False),
    Case("bfloat16", 128, 28, 4, True),
    Case("bfloat16", 256, 4, 1, True),
    Case("float32", 128, 28, 4, False),
    Case("float32", 256, 4, 1, True),
]
OPTIONS = {
    "PRESCALE_QK": False,
    "ROWS_GUARANTEED_SAFE": False,
    "BLOCKS_ARE_CONTIGUOUS": False,
    "WRITE_DQ": True,
    "OUTPUT_LOGSUMEXP": True,
    "OUTPUT_MAX": False,
}

FIXED = {"debug": False, "sanitize_overflow": False}  # as inductor compiles


def pretend(capability: int) -> Any:
    """Make torch and Triton see one card; returns Triton's target."""
    import triton
    from triton.backends.compiler import GPUTarget

    card, target = CARDS[capability], GPUTarget("cuda", capability, 32)
    numbers = divmod(capability, 10)
    properties = SimpleNamespace(
        name=f"NVIDIA {card.name}",
        major=numbers[0],
        minor=numbers[1],
        multi_processor_count=card.multiprocessors,
        total_memory=80 * 2**30,
        shared_memory_per_block=49_152,
        shared_memory_per_block_optin=card.shared,
        shared_memory_per_multiprocessor=card.shared + 1024,
        regs_per_multiprocessor=65_536,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        warp_size=32,
        gcnArchName="",
        L2_cache_size=40 * 2**20,
    )
    values = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "_lazy_init": None,
        "get_device_properties": properties,
        "get_device_capability": numbers,
        "get_device_name": properties.name,
        "is_bf16_supported": True,
        "get_compute_capability": capability,
    }
    interface: Any = get_interface_for_device("cuda")
    for name, value in values.items():
        function = mock.Mock(return_value=value)
        for owner in (torch.cuda, interface, interface.Worker):
            if hasattr(owner, name):
                setattr(owner, name, function)
    fake_tensor.init_gpu_context = lambda *_: None
    triton_helpers.set_driver_to_gpu = lambda: None
    hop: Any = sys.modules["torch._higher_order_ops.flex_attention"]
    hop._permute_strides = lambda out, strides: out
    triton.runtime.driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: target,
            get_current_device=lambda: 0,
            get_device_capability=lambda *_: numbers,
            get_active_torch_device=lambda: torch.device(CUDA),
            utils=SimpleNamespace(
                get_device_properties=lambda _: {
                    "max_shared_mem": card.shared,
                    "multiprocessor_count": card.multiprocessors,
                    "warpSize": 32,
                    "max_num_regs": 65_536,
                }
            ),
        )
    )
    return target


def source(case: Case, backward: bool) -> str:
    """Inductor's code of an attention, for any number of tokens."""
    torch._dynamo.reset()
    window = 96 if case.window else None
    blocks = TreeMask.of([300, 200, 140], [-1, 0, 0]).blocks(window).as_tuple()
    shapes = ShapeEnv()
    mode = FakeTensorMode(shape_env=shapes)
    tokens, count = (symbol(shapes, name, hint) for name, hint in (("tokens", 640), ("count", 5)))
    with mode:

        def empty(*shape: Any, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=CUDA)

        dtype = getattr(torch, case.dtype)
        query, out, gradient = (empty(1, case.heads, tokens, case.size, dtype=dtype) for _ in range(3))
        key, value = (empty(1, case.key_heads, tokens, case.size, dtype=dtype) for _ in range(2))
        sums, gradient_of_sums = (empty(1, case.heads, tokens, dtype=torch.float32) for _ in range(2))
        of_tokens = [empty(tokens, dtype=torch.int64) for _ in range(3)]
        size = [] if window is None else [empty(dtype=torch.int64)]
        given = [block for block in blocks if torch.is_tensor(block)]
        lists = [empty(1, 1, *[count] * (block.dim() - 2), dtype=block.dtype) for block in given]

    def attend(tokens: Any, count: Any, query: Any, key: Any, value: Any, *others: Any) -> Any:
        behind = 0 if not backward else 4
        captured = others[behind : len(others) - len(lists)]
        filled = iter(others[len(others) - len(lists) :])
        fields = [next(filled) if torch.is_tensor(block) else block for block in blocks[2:-1]]

        def score(value: Any, *_: Any) -> Any:
            return value

        def joint(value: Any, batch: Any, head: Any, at: Any, to: Any, grad: Any) -> Any:
            return [grad, *[None] * 4]

        def mask(batch: Any, head: Any, at: Any, to: Any, first: Any, end: Any, position: Any, *size: Any) -> Any:
            return TreeMask(None, first, end, position).sees(at, to, *size)  # type: ignore[arg-type]

        how = ((tokens, tokens, *fields, mask), case.size**-0.5, OPTIONS, (), tuple(captured))
        if backward:
            return flex_attention_backward(query, key, value, *others[:behind], score, joint, *how)[:3]
        return flex_attention(query, key, value, score, *how)[:2]

    of_backward = [out, sums, gradient, gradient_of_sums] if backward else []
    inputs = [tokens, count, query, key, value, *of_backward, *of_tokens, *size, *lists]
    with mode:
        traced = make_fx(attend)(*inputs)
    graph = GraphLowering(traced, example_inputs=inputs, shape_env=shapes)
    with V.set_debug_handler(DebugContext()), V.set_graph_handler(graph), V.set_fake_mode(mode):
        graph.run(*inputs)
        code = graph.codegen()[0]
    return str(getattr(code, "value", code))


def symbol(shapes: ShapeEnv, name: str, hint: int) -> Any:
    """A size that the kernels take as an argument."""
    from torch._dynamo.source import ConstantSource

    place = ConstantSource(name)
    return shapes.create_symintnode(
        shapes.create_symbol(hint, place, dynamic_dim=DimDynamic.DYNAMIC), hint=hint, source=place
    )


def kernels(code: str, folder: Path) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Name, function and meta-data of each Triton template in inductor's code."""
    for node in ast.walk(ast.parse(code)):
        if not (isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "triton" and len(node.args) > 1):
            continue
        name, text = (argument.value for argument in node.args[:2])  # type: ignore[attr-defined]
        path = folder / f"{name}.py"
        path.write_text(text)
        spec: Any = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        template = mock.Mock(return_value=lambda function: function)
        with mock.patch.object(triton_heuristics, "template", template):
            spec.loader.exec_module(module)
        if template.called:
            yield name, getattr(module, name), template.call_args.kwargs


def compile_all(capability: int, folder: Path) -> Iterator[dict[str, Any]]:
    """Each kernel of each case: sizes that it takes as arguments, bytes of shared memory, and bytes of the stack, which
    is where registers spill."""
    import triton
    from triton.compiler import ASTSource

    target, cubin = pretend(capability), folder / "kernel.cubin"
    usage_of = [Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump", "--dump-resource-usage", cubin]
    for case in CASES:
        for backward in (False, True):
            for name, function, meta in kernels(source(case, backward), folder):
                how = meta["triton_meta"]
                options = {option: meta[option] for option in ("num_warps", "num_stages")}
                # With what inductor knows of alignment: without it copies are not asynchronous, and take half of the
                # shared memory.
                asked = ASTSource(function, how["signature"], how.get("constants", {}), how["configs"][0])
                compiled = triton.compile(asked, target=target, options=options | FIXED)
                cubin.write_bytes(compiled.asm["cubin"])
                usage = subprocess.check_output(usage_of, text=True)
                (stack,) = re.findall(r"STACK:(\d+)", usage)
                yield (
                    case._asdict()
                    | options
                    | {
                        "kernel": name,
                        "backward": backward,
                        "sizes": sorted(argument for argument in how["signature"] if argument.startswith("ks")),
                        "shared": compiled.metadata.shared,
                        "stack": int(stack),
                    }
                )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        for kernel in compile_all(int(sys.argv[1]), Path(scratch)):
            print(json.dumps(kernel), flush=True)
