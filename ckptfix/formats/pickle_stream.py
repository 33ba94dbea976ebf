"""Pickles of protocols 0 to 5, read by a symbolic machine: nothing is imported, called or built.

The machine keeps the stack and the memo of ``pickle.Unpickler`` (CPython's ``Lib/pickle.py``), but
a call becomes a node that says what would be called. Time grows with the bytes read, whatever the
pickle refers to; so does memory, by up to 100 bytes for a byte, which is why the opcodes are
counted.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import repeat
from struct import Struct
from typing import Any

from ckptfix.errors import BeyondLimits, FormatError, UnsupportedFormat
from ckptfix.formats.pickle_opcodes import HANDLERS, MAX_DEPTH, MAX_TEXT, MISSING, PADDING, Machine
from ckptfix.formats.pickle_tree import Kind, Node, PickleTree, Text

MAX_OPCODES = 12_000_000
"""Longest stream that is read, in opcodes; strings, frames and a memo with gaps count once more
(``Machine.weight``). 100,000 tensors take 2.9 million. The most expensive stream takes 1.3 GB of
memory at this limit.
"""

_BATCH = 1 << 16  # so many opcodes run between two looks at the weight
_LONG = 1 << 16
_PROTOCOLS_WITHOUT_MEMOIZE = (b"\x80\x02", b"\x80\x03")


def parse(data: bytes, start: int = 0) -> PickleTree:
    """Read the pickle that begins at ``start``.

    Raises TruncatedError when the bytes end before it does, FormatError for anything else a pickle
    cannot hold, UnsupportedFormat when it has more than ``MAX_OPCODES``.
    """
    data = data[start:]
    with paused_gc():
        if data[:2] in _PROTOCOLS_WITHOUT_MEMOIZE and len(data) > _LONG:
            # Numbered from 0 without gaps, as pickle does, the memo fits a list: half the time of a
            # dict, a seventh of its memory. Whatever does not work out that way is left to the
            # dict, which has the last word.
            try:
                return _parse(data, start, [MISSING] * min(len(data) // 6 + 257, MAX_OPCODES))
            except UnsupportedFormat:
                raise
            except FormatError:
                pass
        return _parse(data, start, {})


def _parse(data: bytes, start: int, memo: Any) -> PickleTree:
    return run(Machine(data, memo, HANDLERS), start)


def run(machine: Machine, start: int = 0) -> PickleTree:
    """Run a machine, of this module's handlers or of others, to the end of its pickle. Raises as
    ``parse`` does.
    """
    try:
        _run(machine)
    except FormatError:
        raise
    except (
        IndexError,
        KeyError,
        AttributeError,
        TypeError,
        ValueError,
        OverflowError,
        MemoryError,
    ) as error:
        raise _explained(machine, error) from None
    return machine.tree(start)


def _explained(machine: Machine, error: Exception) -> FormatError:
    """Return the error for a failed opcode at the present position."""
    data, position = machine.data, machine.position
    width = {0x68: 2, 0x6A: 5}.get(data[position], 1) if position < len(data) else 1
    if data.startswith(b"X", position):
        width = 5 + int.from_bytes(data[position + 1 : position + 5], "little")
    if position + width > len(data):
        return machine.truncated()
    if isinstance(error, IndexError):
        return machine.malformed("needs more values than the stack holds")
    if isinstance(error, KeyError):
        return machine.malformed("reads a memo entry that was never written")
    # The text of some errors holds the operand.
    return machine.malformed(f"cannot be read ({error!s:.100})")


@contextmanager
def paused_gc() -> Iterator[None]:
    """Stop the cyclic collector: while 100,000s of objects are made it takes 70 % of the time and
    finds nothing.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _run(machine: Machine) -> None:
    """Run to STOP. The opcodes torch.save writes per tensor are handled here, the others by
    ``HANDLERS``.

    Written flat, in locals, in the order that needs the fewest comparisons for such a file, and
    with the PUT that follows most values handled along with the value: this loop is nearly the
    whole cost of reading 100,000 tensors.
    """
    b = machine.data + PADDING
    memo, texts, persistent, add_call = (
        machine.memo,
        machine.texts,
        machine.persistent,
        machine.calls.append,
    )
    u32, from_bytes, size = Struct("<I").unpack_from, int.from_bytes, len(machine.data)
    new_text, add_text, call, persistent_id = (
        tuple.__new__,
        texts.append,
        Kind.CALL,
        Kind.PERSISTENT,
    )
    meta, stack = machine.meta, machine.stack
    push = stack.append
    long_text = 5 + MAX_TEXT
    # Of a machine with other handlers: its own REDUCE, and a memo that MEMOIZE makes longer.
    has_reduce, grows = 0x52 in machine.handlers, type(memo) is list and not memo
    handlers, step = machine.handlers, Machine.step
    i = done = 0
    try:
        while (rest := MAX_OPCODES - done - machine.weight()) > 0:
            done += min(rest, _BATCH)
            for _ in repeat(None, min(rest, _BATCH)):
                c = b[i]
                if c == 0x68 or c == 0x6A:  # BINGET, LONG_BINGET
                    if c == 0x68:
                        x = memo[b[i + 1]]
                        width = 2
                    else:
                        x = memo[u32(b, i + 1)[0]]
                        width = 5
                    if type(x) is Text:
                        x = new_text(Text, (x[0], i, x[1]))
                        add_text(x)
                    elif x is MISSING:
                        raise KeyError
                    push(x)
                    i += width
                elif c == 0x4B:  # BININT1
                    push(b[i + 1])
                    i += 2
                elif c < 0x52:
                    if c == 0x28:  # MARK
                        if len(meta) > MAX_DEPTH:
                            raise BeyondLimits(f"the pickle nests marks more than {MAX_DEPTH} deep")
                        meta.append(stack)
                        stack = []
                        push = stack.append
                        i += 1
                    elif c == 0x51:  # BINPERSID
                        x = stack[-1] = Node(persistent_id, stack[-1])
                        persistent.append(x)
                        i += 1
                    elif c == 0x29:  # EMPTY_TUPLE
                        push(())
                        i += 1
                    elif c == 0x4D:  # BININT2
                        push(b[i + 1] | b[i + 2] << 8)
                        i += 3
                    elif c == 0x4A:  # BININT
                        x = u32(b, i + 1)[0]
                        push(x - (x >> 31 << 32))
                        i += 5
                    elif c == 0x2E:  # STOP
                        i += 1
                        return
                    else:
                        machine.position, machine.stack = i, stack
                        handlers.get(c, step)(machine)
                        i, stack = machine.position, machine.stack
                        push = stack.append
                else:
                    if c == 0x58:  # BINUNICODE
                        end = i + 5 + u32(b, i + 1)[0]
                        if end - i > long_text:
                            machine.position, machine.stack = i, stack
                            machine.step()
                            i = machine.position
                            continue
                        x = new_text(Text, (str(b[i + 5 : end], "utf-8", "surrogatepass"), i, i))
                        add_text(x)
                        push(x)
                        i = end
                    elif c == 0x74:  # TUPLE
                        x = tuple(stack)
                        stack = meta.pop()
                        push = stack.append
                        push(x)
                        i += 1
                    elif c == 0x86:  # TUPLE2
                        x = (stack[-2], stack[-1])
                        stack[-2:] = (x,)
                        i += 1
                    elif c == 0x85:  # TUPLE1
                        x = stack[-1] = (stack[-1],)
                        i += 1
                    elif c == 0x52 and not has_reduce:
                        x = stack.pop()
                        x = stack[-1] = Node(call, stack[-1], x)
                        add_call(x)
                        i += 1
                    elif c == 0x89:  # NEWFALSE
                        push(False)
                        i += 1
                        continue
                    elif c == 0x71:  # BINPUT
                        memo[b[i + 1]] = stack[-1]
                        i += 2
                        continue
                    elif c == 0x8A and b[i + 1] <= size - i - 2:  # LONG1: half of random's state
                        end = i + 2 + b[i + 1]
                        push(from_bytes(b[i + 2 : end], "little", signed=True))
                        i = end
                        continue
                    else:
                        machine.position, machine.stack = i, stack
                        handlers.get(c, step)(machine)
                        i, stack = machine.position, machine.stack
                        push = stack.append
                        if grows and b[i] == 0x94:
                            memo.append(stack[-1])
                            i += 1
                        continue
                    if b[i] == 0x72:  # LONG_BINPUT
                        memo[u32(b, i + 1)[0]] = x
                        i += 5
                    elif grows and b[i] == 0x94:  # MEMOIZE
                        memo.append(x)
                        i += 1
        raise BeyondLimits(f"the pickle has more than {MAX_OPCODES} opcodes")
    finally:
        machine.position, machine.stack = i, stack
