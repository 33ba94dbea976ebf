"""The state of the symbolic pickle machine, and the errors it raises."""

import pickletools
from collections.abc import Callable, Mapping
from typing import Any

from ckptfix.errors import BeyondLimits, FormatError, TruncatedError
from ckptfix.formats.pickle_tree import Kind, Node, PickleTree, Text

PADDING = bytes(16)
"""Follows the data, so that reading a fixed-size operand never runs out; 0 is no opcode."""

MAX_DEPTH = 1_000_000
"""Most open marks. An honest pickle has as many as its objects nest."""

MAX_LINE = 1 << 20
"""Longest line, in bytes. Only strings and bytes of protocol 0 come near it."""

MAX_GLOBALS = 10_000
"""Most different globals. A whole pickled model names some hundred classes."""

MAX_GLOBAL_NAME = 1024
"""Longest name of a global, in characters, with its module."""

MISSING = object()
"""What an entry of the memo is before it is written."""


class Machine:
    """The state of a symbolic unpickler."""

    def __init__(self, data: bytes, memo: Any, handlers: "Mapping[int, Callable[[Machine], None]]") -> None:
        """Start at the first byte of ``data``; ``memo`` is a dict, or a list filled with ``MISSING``."""
        self.handlers = handlers
        self.data = data
        self.position = 0
        self.protocol = 0
        self.stack: list[Any] = []
        self.meta: list[list[Any]] = []
        self.memo = memo
        self.globals: dict[tuple[str, str], int] = {}
        self.texts: list[Text] = []
        self.persistent: list[Node] = []
        self.frames: list[tuple[int, int]] = []
        self.duplicated: set[int] = set()
        self.heads: dict[tuple[str, str], tuple[str, str]] = {}
        self.refused: set[int] = set()
        self.refused_targets: set[str] = set()
        self.containers = 0

    def step(self) -> None:
        """Do what the opcode at the present position says."""
        position = self.position
        handler = self.handlers.get(self.data[position]) if position < len(self.data) else None
        if handler is None:
            raise self.truncated() if position >= len(self.data) else self.malformed("is unknown")
        handler(self)

    def recall(self, index: int) -> Any:
        """Return what the memo holds. Raises KeyError or IndexError when that was never written."""
        value = self.memo[index] if index >= 0 else MISSING
        if value is MISSING:
            raise KeyError(index)
        return value

    def truncated(self) -> TruncatedError:
        """Return the error for data that ends inside the pickle."""
        size = len(self.data)
        return TruncatedError(f"the pickle does not end within its {size} bytes", have=size)

    def malformed(self, problem: str) -> FormatError:
        """Return the error for the opcode at the present position."""
        code = self.data[self.position] if self.position < len(self.data) else 0
        return FormatError(f"the pickle opcode {opcode_name(code)} at byte {self.position} {problem}")

    def tree(self, start: int) -> PickleTree:
        """Return what was read, once STOP was reached."""
        if not self.stack:
            raise FormatError(f"the pickle ends at byte {self.position} without a value")
        root = self.stack.pop()
        return PickleTree(
            root=root,
            data=self.data[: self.position],
            end=start + self.position,
            protocol=self.protocol,
            globals=self.globals,
            texts=tuple(self.texts),
            persistent=tuple(self.persistent),
            frames=tuple(self.frames),
            duplicated=frozenset(self.duplicated),
            refused_opcodes=(
                *sorted(opcode_name(code) for code in self.refused),
                *sorted(self.refused_targets),
            ),
            leftover=bool(self.stack or self.meta),
        )

    def weight(self) -> int:
        """Return how many things are held beyond what the stack holds; each takes about 100 bytes."""
        numbered = len(self.memo) if type(self.memo) is dict else 0
        return len(self.texts) + len(self.frames) + numbered

    def name_global(self, offset: int, module: str, name: str) -> Node:
        """Note that the opcode at ``offset`` refers to a global, and return its node."""
        head = (module, name)
        if head not in self.heads:
            if len(module) + len(name) > MAX_GLOBAL_NAME:
                raise self.malformed(f"names a global by {len(module) + len(name)} characters")
            if len(self.heads) >= MAX_GLOBALS:
                raise FormatError(f"the pickle names more than {MAX_GLOBALS} globals")
            self.heads[head] = head
            self.globals[head] = offset
        return Node(Kind.GLOBAL, self.heads[head])

    def pop_mark(self) -> list[Any]:
        """Return what was pushed since the last mark, and go back to the stack below it."""
        items = self.stack
        self.stack = self.meta.pop()
        return items

    def operand(self, length: int, width: int) -> bytes:
        """Return ``length`` bytes that follow an opcode and ``width`` bytes of length, and step over them."""
        begin = self.skip(length, width)
        return self.data[begin : begin + length]

    def skip(self, length: int, width: int) -> int:
        """Step over an opcode, ``width`` bytes of length and ``length`` bytes; return where these begin."""
        begin = self.position + 1 + width
        if length > len(self.data) - begin:
            raise self.truncated()
        self.position = begin + length
        return begin

    def line(self) -> bytes:
        """Return the line that follows an opcode, without its end, and step over it."""
        end = self.data.find(b"\n", self.position + 1)
        if end < 0:
            raise self.truncated()
        length = end - self.position - 1
        if length > MAX_LINE:
            raise BeyondLimits(f"the pickle holds a line of {length} bytes, at most {MAX_LINE} are read")
        line = self.data[self.position + 1 : end]
        self.position = end + 1
        return line


_NAMES = {ord(opcode.code): opcode.name for opcode in pickletools.opcodes}


def opcode_name(code: int) -> str:
    """Return the name of an opcode as pickletools has it, or its number in hexadecimal."""
    return _NAMES.get(code, f"0x{code:02x}")
