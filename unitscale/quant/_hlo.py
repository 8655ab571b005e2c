"""Parse optimized HLO, the text of `jax.stages.Compiled.as_text()`, and trace operands."""

import dataclasses
import functools
import re
from pathlib import Path

_COMPUTATION = re.compile(r"^(ENTRY\s+)?%?([\w.\-]+)\s*\(.*->.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(ROOT\s+)?%?([\w.\-]+)\s*=\s*(.*)$")
_OPCODE = re.compile(r"\s([a-z][\w\-]*)\(")
_TYPE = re.compile(r"([a-z]\w*)\[([\d,]*)\]")
_CALLED = re.compile(r"\b(?:calls|to_apply|body|condition)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\s*\{"n":\s*"(\d+)"\}')

# Instructions that run another computation on their own operands, one for one.
CALLS = frozenset({"fusion", "call", "async-start"})


@dataclasses.dataclass(frozen=True)
class HloInstruction:
    """One instruction of a program.

    Attributes:
        computation: name of the computation that contains it.
        dtype: HLO's name of the element type ("bf16"), of the first element for a tuple.
        shape: dimensions, of the first element for a tuple.
        operands: names of the operands, in the same computation.
        attributes: the text after the operands.
        literal: the text between the parentheses, such as a parameter's number.
        types: element type and dimensions of the result, of each element for a tuple.
    """

    name: str
    computation: str
    opcode: str
    dtype: str
    shape: tuple[int, ...]
    operands: tuple[str, ...]
    attributes: str
    literal: str
    types: tuple[tuple[str, tuple[int, ...]], ...]

    @functools.cached_property
    def calls(self) -> tuple[str, ...]:
        """Names of the computations that it runs."""
        names = _CALLED.findall(self.attributes)
        for group in _BRANCHES.findall(self.attributes):
            names += [name.strip().lstrip("%") for name in group.split(",")]
        return tuple(names)

    @property
    def trips(self) -> int:
        """How often a while loop runs its body, where XLA knows; else 1."""
        found = _TRIPS.search(self.attributes) if self.opcode == "while" else None
        return int(found[1]) if found else 1

    def quoted(self, key: str) -> str:
        """The quoted value of an attribute, such as "custom_call_target"; "" if it has none."""
        found = re.search(rf'\b{key}="((?:[^"\\]|\\.)*)"', self.attributes)
        return found[1] if found else ""

    def dimensions(self, key: str) -> tuple[int, ...]:
        """The numbers in braces of an attribute, such as "lhs_contracting_dims"."""
        found = re.search(rf"\b{key}=\{{([\d,]*)\}}", self.attributes)
        return _numbers(found[1]) if found else ()


@dataclasses.dataclass(frozen=True)
class HloProgram:
    """The computations of a program and their callers.

    Attributes:
        computations: for each computation its instructions by name, in order.
        roots: name of each computation's result.
        callers: for each computation the instruction that runs it; the entry has none.
        frames: for each stack frame number its "file:line" and those of its callers.
        entry: name of the entry computation; "" if there is none.
        header: the first line, which states the number of devices.
    """

    computations: dict[str, dict[str, HloInstruction]]
    roots: dict[str, str]
    callers: dict[str, HloInstruction]
    frames: dict[str, tuple[str, ...]]
    entry: str = ""
    header: str = ""

    @property
    def instructions(self) -> list[HloInstruction]:
        """All instructions of all computations."""
        return [i for body in self.computations.values() for i in body.values()]

    def operand(self, instruction: HloInstruction, index: int) -> HloInstruction | None:
        """Return the instruction that computes an operand, looking into and out of fusions."""
        if index >= len(instruction.operands):
            return None
        body = self.computations[instruction.computation]
        return self._through(body.get(instruction.operands[index]))

    def _through(self, found: HloInstruction | None) -> HloInstruction | None:
        while found is not None:
            caller = self.callers.get(found.computation)
            if found.opcode == "parameter" and caller is not None and caller.opcode in CALLS:
                index = int(found.literal)
                if index >= len(caller.operands):
                    return found
                name = caller.operands[index]
                found = self.computations[caller.computation].get(name)
            elif (root := self._root(found)) is not None and root.opcode != "tuple":
                found = root
            elif found.opcode == "fusion-done":
                found = self.computations[found.computation].get(found.operands[0])
            elif found.opcode == "get-tuple-element":
                fusion = self.computations[found.computation].get(found.operands[0])
                root = self._root(fusion)
                number = re.search(r"\bindex=(\d+)", found.attributes)
                if root is None or root.opcode != "tuple" or number is None:
                    return found
                name = root.operands[int(number[1])]
                found = self.computations[root.computation].get(name)
            else:
                return found
        return None

    def _root(self, instruction: HloInstruction | None) -> HloInstruction | None:
        """The result of the computation that a fusion or call runs."""
        if instruction is None or instruction.opcode not in CALLS or not instruction.calls:
            return None
        called = instruction.calls[0]
        return self.computations[called][self.roots[called]] if called in self.roots else None

    def trips(self, instruction: HloInstruction) -> int:
        """Return how often an instruction runs, counting the loops around it."""
        total, seen = 1, set()
        name = instruction.computation
        while name in self.callers and name not in seen:
            seen.add(name)
            total *= self.callers[name].trips
            name = self.callers[name].computation
        return total

    def stack(self, instruction: HloInstruction) -> tuple[str, ...]:
        """Return "file:line" of the source of an instruction, innermost frame first."""
        frame = re.search(r"\bstack_frame_id=(\d+)", instruction.attributes)
        if frame:
            return self.frames.get(frame[1], ())
        line = re.search(r"\bsource_line=(\d+)", instruction.attributes)
        file = instruction.quoted("source_file")
        return (f"{file}:{line[1]}",) if file and line else ()


def bits(dtype: str) -> int:
    """Return the number of bits in the name of an HLO element type; 0 if it has none ("pred")."""
    found = re.match(r"[a-z]+(\d+)", dtype)
    return int(found[1]) if found else 0


def contracted(instruction: HloInstruction) -> tuple[int, ...]:
    """Return the dimensions of the left operand that a matmul sums over; () if it is not one."""
    found = re.search(r'"lhs_contracting_dimensions":\s*\[([^\]]*)\]', instruction.attributes)
    return _numbers(found[1]) if found else instruction.dimensions("lhs_contracting_dims")


def user_line(program: HloProgram, instruction: HloInstruction) -> str:
    """Return the innermost "file:line" that is neither unitscale's nor a dependency's."""
    stack = program.stack(instruction)
    package = str(Path(__file__).parents[1])
    own = [f for f in stack if not f.startswith(package) and "site-packages" not in f]
    return (own or list(stack[-1:]) or [""])[0]


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)))


def _closing(text: str, start: int) -> int:
    """Index of the parenthesis that closes the one at `start`, outside of strings."""
    depth, quoted = 0, False
    for index in range(start, len(text)):
        character = text[index]
        if character == '"' and text[index - 1] != "\\":
            quoted = not quoted
        elif not quoted and character in "()":
            depth += 1 if character == "(" else -1
            if not depth:
                return index
    return len(text)


def _instruction(name: str, computation: str, rest: str) -> HloInstruction | None:
    opcode = _OPCODE.search(rest)
    if opcode is None:
        return None
    end = _closing(rest, opcode.end() - 1)
    inner = rest[opcode.end() : end]
    types = tuple((kind, _numbers(shape)) for kind, shape in _TYPE.findall(rest[: opcode.start()]))
    kind = opcode[1]
    operands = tuple(re.findall(r"%([\w.\-]+)", inner)) if kind != "constant" else ()
    if kind == "fusion-start":  # asynchronous; its types are operands, results and a context
        kind, types = "fusion", types[len(operands) : -1]
    dtype, shape = types[0] if types else ("", ())
    attributes = rest[end + 1 :]
    return HloInstruction(name, computation, kind, dtype, shape, operands, attributes, inner, types)


def _frames(text: str) -> dict[str, tuple[str, ...]]:
    """Read the tables before the computations: each stack frame with its callers."""
    tables: dict[str, dict[str, str]] = {}
    table: dict[str, str] = {}
    for line in text.splitlines():
        if line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
            table = tables.setdefault(line, {})
        elif row := re.match(r"(\d+) (.*)$", line):
            table[row[1]] = row[2]

    def field(table: str, row: str, name: str) -> str:
        found = re.search(rf"\b{name}=(\d+)", tables.get(table, {}).get(row, ""))
        return found[1] if found else ""

    rows = tables.get("StackFrames", {})
    # XLA prints the number of the caller plus one; the first frame, which has none, shows it.
    offset = int(field("StackFrames", "1", "parent_frame_id") == "1")
    frames = {}
    for number in rows:
        stack, frame = [], int(number)
        while 0 < frame <= len(rows) and len(stack) <= len(rows):
            place = field("StackFrames", str(frame), "file_location_id")
            file = tables.get("FileNames", {}).get(field("FileLocations", place, "file_name_id"))
            if file:
                stack.append(file.strip('"') + ":" + field("FileLocations", place, "line"))
            frame = int(field("StackFrames", str(frame), "parent_frame_id") or 0) - offset
        frames[number] = tuple(stack)
    return frames


def parse_hlo(text: str) -> HloProgram:
    r"""Read the text of an optimized program.

    Example:
        >>> program = parse_hlo("ENTRY %f (a: s8[2]) -> s8[2] {\n  %a = s8[2] parameter(0)\n}")
        >>> [(i.opcode, i.dtype, i.shape) for i in program.instructions]
        [('parameter', 's8', (2,))]
    """
    computations: dict[str, dict[str, HloInstruction]] = {}
    roots: dict[str, str] = {}
    current = entry = ""
    lines = text.splitlines()
    for line in lines:
        if header := _COMPUTATION.match(line):
            current = str(header[2])
            computations[current] = {}
            entry = current if header[1] else entry
        elif current and (found := _INSTRUCTION.match(line)):
            instruction = _instruction(found[2], current, found[3])
            if instruction is not None:
                computations[current][instruction.name] = instruction
                if found[1]:
                    roots[current] = instruction.name
    callers = {
        called: instruction
        for body in computations.values()
        for instruction in body.values()
        for called in instruction.calls
    }
    return HloProgram(computations, roots, callers, _frames(text), entry, lines[0] if lines else "")
