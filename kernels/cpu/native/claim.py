"""Which chunk of its task a thread takes next.

Chunks are neighbouring rows. From call to call a thread begins with the same ones, its own, so that it finds what it
wrote or read before in the caches of its own core; when these are done it takes whatever others have not begun.

    the task's first word has a bit for each chunk, 0 at first; a thread with the number t, of ``share`` chunks each:
        free  = the bits that are 0          none: there is nothing left
        chunk = the lowest one from t·share on, or of all where those are taken
        set its bit; if another thread was faster, once more
"""

from llvmlite import ir

from fastcross.kernels.cpu.fields import CLAIMS, WORD_OF_ASKING, WORD_OF_SHARE
from fastcross.kernels.cpu.native.emit import I32, I64, declare


def emit_claim(builder, words, chunks):
    """A chunk that no other thread has; a number that is not below ``chunks`` when there is none left."""
    with builder.if_else(builder.icmp_unsigned("<=", chunks, I64(CLAIMS))) as (bits_suffice, too_many):
        with bits_suffice:
            claimed = _claim(builder, words, chunks)
            from_bits = builder.block
        with too_many:  # each takes the next number
            counted = builder.atomic_rmw("add", words, I64(1), "monotonic")
            from_counter = builder.block
    return _either(builder, (claimed, from_bits), (counted, from_counter))


def _claim(builder, words, chunks):
    own = builder.mul(_thread(builder, words), _word(builder, words, WORD_OF_SHARE))
    own = builder.select(builder.icmp_unsigned("<", own, chunks), own, I64(0))  # fewer chunks than threads
    every, from_own = builder.lshr(I64(-1), builder.sub(I64(CLAIMS), chunks)), builder.shl(I64(-1), own)
    lowest = declare(builder, "llvm.cttz.i64", I64, I64, ir.IntType(1))
    taken_at_first = builder.load_atomic(words, "monotonic", 8)
    begin, (look, claim, end) = builder.block, (builder.append_basic_block() for _ in range(3))
    builder.branch(look)

    builder.position_at_end(look)
    taken = builder.phi(I64)
    free = builder.and_(builder.not_(taken), every)
    preferred = builder.and_(free, from_own)
    preferred = builder.select(builder.icmp_unsigned("!=", preferred, I64(0)), preferred, free)
    builder.cbranch(builder.icmp_unsigned("!=", free, I64(0)), claim, end)

    builder.position_at_end(claim)
    chunk = builder.call(lowest, [preferred, ir.IntType(1)(1)])
    bit = builder.shl(I64(1), chunk)
    taken_by_now = builder.atomic_rmw("or", words, bit, "monotonic")
    builder.cbranch(builder.icmp_unsigned("==", builder.and_(taken_by_now, bit), I64(0)), end, look)
    taken.add_incoming(taken_at_first, begin)
    taken.add_incoming(taken_by_now, claim)

    builder.position_at_end(end)
    return _either(builder, (chunks, look), (chunk, claim))


def _thread(builder, words):
    """The number of the thread, from the function whose address is in the task; 0 where there is none."""
    address, begin = _word(builder, words, WORD_OF_ASKING), builder.block
    with builder.if_then(builder.icmp_unsigned("!=", address, I64(0))):
        number = builder.call(builder.inttoptr(address, ir.FunctionType(I32, []).as_pointer()), [])
        number, asked = builder.zext(number, I64), builder.block
    return _either(builder, (I64(0), begin), (number, asked))


def _word(builder, words, index):
    return builder.load(builder.gep(words, [I64(index)]))


def _either(builder, *values_and_blocks):
    result = builder.phi(I64)
    for value, block in values_and_blocks:
        result.add_incoming(value, block)
    return result
