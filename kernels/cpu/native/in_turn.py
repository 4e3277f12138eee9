"""Kernels one after another, each on its number of threads, as one native function.

To enter and to leave native code takes Python as long as a small kernel runs, so a call enters once for all of its
kernels. The function is LLVM's own language and takes a millisecond to compile: it is not kept.

    for (kernel, threads) in programme, until (0, 0):
        threads == 1:  kernel(block)        else:  parallel(kernel, block, threads, 0)
"""

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir

_WORD, _FLAGS = ir.IntType(64), ir.IntType(32)


def in_turn(steps: Sequence[tuple[Any, int]], parallel: Any) -> Callable[[Any], None]:
    """A function of a task's block that runs each (native kernel, threads).

    ``parallel`` is OpenMP's ``GOMP_parallel``, or None where every kernel runs on one thread.
    """
    words = [0 if parallel is None else _address(parallel)]
    for kernel, threads in steps:
        words += [_address(kernel), threads]
    programme = (ctypes.c_int64 * (len(words) + 2))(*words, 0, 0)
    call: Any = functools.partial(_compiled(), ctypes.addressof(programme))
    call.owner = programme, steps  # keeps them alive
    return call


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


@functools.cache
def _compiled() -> Any:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(jit=True)  # the engine becomes its owner
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(str(_module())), machine)
    engine.finalize_object()
    function: Any = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(engine.get_function_address("in_turn"))
    function.owner = engine  # keeps the machine code alive
    return function


def _module() -> ir.Module:
    module = ir.Module("in_turn")
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [_WORD.as_pointer(), _WORD]), "in_turn")
    programme, block = function.args
    alone = ir.FunctionType(ir.VoidType(), [_WORD]).as_pointer()
    together = ir.FunctionType(ir.VoidType(), [_WORD, _WORD, _FLAGS, _FLAGS]).as_pointer()
    begin, next_step, step, end = (function.append_basic_block(name) for name in ("begin", "next", "step", "end"))
    builder = ir.IRBuilder(begin)
    parallel = builder.load(programme)
    builder.branch(next_step)
    builder.position_at_end(next_step)
    i = builder.phi(_WORD)
    kernel, threads = (builder.load(builder.gep(programme, [builder.add(i, _WORD(more))])) for more in (0, 1))
    builder.cbranch(builder.icmp_signed("==", kernel, _WORD(0)), end, step)
    builder.position_at_end(step)
    with builder.if_else(builder.icmp_signed("==", threads, _WORD(1))) as (one, several):
        with one:
            builder.call(builder.inttoptr(kernel, alone), [block])
        with several:
            number = builder.trunc(threads, _FLAGS)
            builder.call(builder.inttoptr(parallel, together), [kernel, block, number, _FLAGS(0)])
    i.add_incoming(_WORD(1), begin)
    i.add_incoming(builder.add(i, _WORD(2)), builder.block)
    builder.branch(next_step)
    builder.position_at_end(end)
    builder.ret_void()
    return module
