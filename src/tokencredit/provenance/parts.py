"""Descriptions of the parts of a run: functions, classes, objects and data from Python or from files of users."""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import math
import sys
import sysconfig
import textwrap
from collections.abc import Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from tokencredit.errors import cut

LIBRARIES = [str(Path(__file__).parents[1]), *map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib"))]
"""Folders of Tokencredit, Python's library and installed packages, whose code is not the user's."""
MAX_ENTRIES, MAX_TEXT = 20, 200
"""Longest list and text that a description shows; longer ones count by their digest."""
SHOWN = 4
"""Most arguments in a label."""
CHANGES = {"add", "append", "clear", "extend", "insert", "pop", "popitem", "remove", "setdefault", "update", "write"}
"""Methods that change an object."""
DECORATED = FunctionType, type(cache(len))
"""Types of functions below decorators: `functools.wraps`, `functools.cache`."""
CONSTRUCTORS = ("__new__", "__init__", "__post_init__")
CHUNK = 1000
"""Rows of a `Dataset` that are read at a time."""
Part = dict[str, Any]
"""Description of a part as JSON: `digest`, and `name`, `file`, `source`, `arguments`, those `given` by a partial,
`reads` and `decorators` of code, or `rows` and `columns` of data."""


def describe(value: Any) -> Part:
    """The description of a function, class, callable object, `partial`, dataclass, name, `Dataset` or list of rows.

    The digest of code is of its source, its `arguments` (of a partial; the fields of an object; a function's defaults
    and variables of enclosing functions), what it `reads` by name of the user's own (functions, classes, constants; a
    class's constants), and its `decorators`. Equal parts have equal digests in every process and folder. What the code
    itself changes, such as a list that it appends to, is its state and no argument.
    """
    return {"name": value, "digest": _sha(value)} if isinstance(value, str) else _Describer().part(value)


def label(part: Part, *, digest: bool = True) -> str:
    """A part in a line, such as `score(sign=-1) (rewards.py, 1a2b3c4d)` or `128 rows of prompt, label (5e6f7a8b)`."""
    short = [part["digest"][:8]] if digest else []
    if "rows" in part:
        return f"{part['rows']:,} row{'s' * (part['rows'] != 1)} of {', '.join(part['columns'])} ({part['digest'][:8]})"
    arguments = [f"{name}={_short(value)}" for name, value in part.get("arguments", {}).items()]
    shown = ", ".join([*arguments[:SHOWN], *["…"] * (len(arguments) > SHOWN)])
    inside = ", ".join([*([Path(part["file"]).name] if "file" in part else []), *short])
    return f"{part['name']}{f'({shown})' * bool(shown)}{f' ({inside})' * bool(inside)}"


def location(part: Part) -> tuple[str, dict[str, Any]] | None:
    """`path/file.py:name` and the numbers given to it, for a function at the top level of a file; else None."""
    top = part.get("source", "").startswith(("def ", "@")) and part.get("name", "").isidentifier() and "file" in part
    given = {name: part.get("arguments", {}).get(name, ...) for name in part.get("given", [])}
    plain = all(x is None or isinstance(x, int | float) for x in given.values())
    return (f"{part['file']}:{part['name']}", given) if top and plain and all(map(str.isidentifier, given)) else None


def parameters(part: Part) -> set[str]:
    """Names of a function's parameters, by its source; empty if that is no function."""
    try:
        (function,) = ast.parse(textwrap.dedent(part.get("source", ""))).body
    except (SyntaxError, ValueError):
        return set()
    found = (*function.args.args, *function.args.kwonlyargs) if isinstance(function, ast.FunctionDef) else ()
    return {argument.arg for argument in found}


def rows_digest(rows: Any) -> str:
    """SHA-256 of a list of rows or a `Dataset`, with all columns."""
    sha = hashlib.sha256()
    if isinstance(rows, list):
        sha.update(json.dumps(rows, default=_as_json).encode())
        return sha.hexdigest()
    for table in rows.with_format("arrow").iter(CHUNK):
        for batch in table.to_batches():
            sha.update(batch.serialize())
    return sha.hexdigest()


def _as_json(value: Any) -> Any:
    """What stands for a value that JSON lacks: a list of numbers or entries, or a text."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, set | frozenset):
        return sorted(json.dumps(entry, default=_as_json) for entry in value)
    text = repr(value)
    return type(value).__name__ if " at 0x" in text else text


def column_names(rows: Any) -> list[str]:
    """Names of all columns that occur in any row of a list or a `Dataset`."""
    return list(dict.fromkeys(key for row in rows for key in row)) if isinstance(rows, list) else rows.column_names


class _Describer:
    """Describes values, each object once."""

    def __init__(self) -> None:
        self.met: dict[int, Any] = {}

    def part(self, value: Any) -> Part:
        """The description of a part."""
        dataset = all(hasattr(value, x) for x in ("column_names", "with_format", "__len__"))
        if isinstance(value, list) or (dataset and not isinstance(value, type)):
            return {"rows": len(value), "columns": column_names(value), "digest": rows_digest(value)}
        self.met[id(value)] = value
        arguments: dict[str, Any] = {}
        while isinstance(value, partial):
            arguments = {f"args[{i}]": x for i, x in enumerate(value.args)} | value.keywords | arguments
            value = value.func
        if isinstance(value, MethodType):
            value, arguments = value.__func__, {"self": value.__self__} | arguments
        code = code_of(value)
        self.met[id(code)] = code
        part: Part = {"name": getattr(code, "__qualname__", repr(code)).replace("<locals>.", "")}
        if is_users(code) and (file := _file(code)) is not None:
            part["file"] = file
        source = _source(code)
        built = code is type(value)
        kinds = getattr(code, "__mro__", [code])
        state = set[str]().union(*(_state(_source(kind)) for kind in kinds))
        owners = {"cls", "type(self)", "self.__class__", *(kind.__name__ for kind in kinds)}
        changed = {name.rpartition(".")[2] for name in state if name.rpartition(".")[0] in owners}
        own = _fields(value) if built else _variables(code)
        own = {name: x for name, x in own.items() if ("self." * built + name) not in state} | arguments
        reads = {name: x for name, x in _reads(code) if name not in state}
        reads |= {f"{code.__name__}.{name}": x for name, x in _constants(code) if name not in changed}
        for key, values in {"arguments": own, "reads": reads}.items():
            if shown := {name: self.plain(x) for name, x in values.items()}:
                part[key] = shown
        exact: Any = [code.__module__, source] if source is None else source
        if source is None or "<lambda>" in part["name"]:  # a lambda's source is its whole line
            exact = [exact, *map(_bytecode, _codes(code))]
        if arguments:
            part["given"] = list(arguments)
        if decorators := [self.plain(wrapper) for wrapper in _wrappers(code if code is type(value) else value)]:
            part["decorators"] = decorators
        digest = _sha(
            [exact, *(_unplaced(part.get(key)) for key in ("name", "arguments", "reads")), *map(_unplaced, decorators)]
        )
        return part | {"digest": digest} | ({} if source is None else {"source": source})

    def plain(self, value: Any) -> Any:
        """A value as JSON: data itself, or its digest if it is long, the description of a user's code, or a name."""
        if value is None or isinstance(value, bool | int | float | str):
            exact = not isinstance(value, float) or math.isfinite(value)
            text = value if isinstance(value, str) else ""
            return _cut(text, value) if text else value if exact else str(value)
        if id(value) in self.met:
            return f"{type(value).__name__}, as above"
        self.met[id(value)] = value
        if isinstance(value, Mapping):
            return _cut({str(key): self.plain(x) for key, x in value.items()}, value)
        if isinstance(value, list | tuple | set | frozenset):
            entries = [self.plain(x) for x in value]
            return _cut(entries if isinstance(value, list | tuple) else sorted(entries, key=json.dumps), value)
        if isinstance(getattr(value, "shape", None), tuple) and hasattr(value, "dtype"):
            return f"{value.dtype} {list(value.shape)} ({_sha(_numbers(value))[:8]})"
        if isinstance(value, partial | MethodType) or hasattr(value, "state_dict") or is_users(value):
            return self.part(value)
        text = getattr(value, "__name__", repr(value))
        placed = " at 0x" in text or "tokencredit_user_" in text  # in memory, or in a folder (`user_objects.load`)
        return type(value).__qualname__ if placed or len(text) > MAX_TEXT else text


def code_of(value: Any) -> Any:
    """The function or class of a value: itself, below its decorators, or its type."""
    if isinstance(value, DECORATED):
        return inspect.unwrap(value)
    return value if inspect.isroutine(value) or isinstance(value, type | ModuleType) else type(value)


def _functions(code: type) -> Iterator[Any]:
    """The functions of a class's own methods and properties, and its other attributes."""
    for member in vars(code).values():
        yield getattr(member, "__func__", getattr(member, "fget", getattr(member, "func", member)))


def _constants(code: Any) -> Iterator[tuple[str, Any]]:
    """Names and values of a user's class's own constants and nested classes; what may change in place is none."""
    for name, value in vars(code).items() if isinstance(code, type) and is_users(code) else ():
        if not name.startswith("__") and _constant(value):
            yield name, value


def _constant(value: Any) -> bool:
    if isinstance(value, tuple | frozenset):
        return all(map(_constant, value))
    return value is None or isinstance(value, bool | int | float | str | type)


def _wrappers(value: Any) -> Iterator[FunctionType]:
    """The functions that decorators have put around a function, or a class's methods (`functools.wraps`), as they are.

    Each is a copy without the name, signature and source of what it wraps.
    """
    if isinstance(value, type):
        for function in _functions(value) if is_users(value) else ():
            yield from _wrappers(function) if isinstance(function, DECORATED) else ()
    while isinstance(value, DECORATED) and hasattr(value, "__wrapped__"):
        if isinstance(value, FunctionType):
            code = value.__code__
            bare = FunctionType(code, value.__globals__, code.co_name, value.__defaults__, value.__closure__)
            bare.__kwdefaults__, bare.__qualname__ = value.__kwdefaults__, code.co_qualname
            yield bare
        value = value.__wrapped__


def is_users(value: Any) -> bool:
    """True for the user's own module, function, class or object, and false for a library's."""
    code, file = code_of(value), _file(value)
    if file is None:
        return getattr(code, "__module__", None) == "__main__" or isinstance(code, FunctionType)
    return not any(Path(file).is_relative_to(folder) for folder in LIBRARIES)


def _cut(shown: Any, value: Any) -> Any:
    """A list, dict or text, or its length and digest if it is long."""
    longest = MAX_TEXT if isinstance(value, str) else MAX_ENTRIES
    return shown if len(shown) <= longest else f"{type(value).__name__} of {len(shown)} ({_sha(shown)[:8]})"


def _short(value: Any) -> str:
    """An argument in a few characters."""
    text = str(value["name"]) if isinstance(value, dict) and "name" in value else value
    return cut(text if isinstance(text, str) else json.dumps(text, ensure_ascii=False), 30)


def _unplaced(tree: Any) -> Any:
    """A description without the places of files, which a run may be moved to and from."""
    if isinstance(tree, dict):
        return {key: _unplaced(x) for key, x in tree.items() if key != "file" or "digest" not in tree}
    return [_unplaced(x) for x in tree] if isinstance(tree, list) else tree


def _sha(value: Any) -> str:
    """SHA-256 of bytes, or of a JSON value."""
    data = value if isinstance(value, bytes) else json.dumps(value, sort_keys=True).encode()
    return hashlib.sha256(data).hexdigest()


def _numbers(array: Any) -> bytes:
    """The numbers of an array, a tensor or a column of a table."""
    import numpy as np  # loaded by whatever made the array

    if hasattr(array, "detach"):
        array = array.detach().cpu().to_dense()
        array = array.float() if array.is_floating_point() and array.itemsize < 4 else array  # NumPy has no bfloat16
    array = np.asarray(array)
    return array.tobytes() if array.dtype != object else repr(array.tolist()).encode()


def _fields(value: Any) -> dict[str, Any]:
    """The attributes of an object; of a module of PyTorch the public ones and its weights."""
    if hasattr(value, "state_dict"):
        return {k: v for k, v in vars(value).items() if k[0] != "_"} | {"weights": value.state_dict()}
    slots = [name for kind in type(value).__mro__ for name in vars(kind).get("__slots__", ())]
    return {name: getattr(value, name) for name in slots if hasattr(value, name)} | getattr(value, "__dict__", {})


def _variables(code: Any) -> dict[str, Any]:
    """Defaults of a function, and variables of the functions around it; nothing of anything else."""
    if not isinstance(code, FunctionType):
        return {}
    defaults = {name: p.default for name, p in inspect.signature(code).parameters.items() if p.default is not p.empty}
    cells = zip(code.__code__.co_freevars, code.__closure__ or (), strict=True)
    return defaults | {name: cell.cell_contents for name, cell in cells if cell != CellType()}  # no value yet


def _codes(code: Any) -> Iterator[CodeType]:
    """The code objects of a function, or of a class's own methods, with those inside them."""
    if isinstance(code, CodeType):
        yield code
        for constant in code.co_consts:
            yield from _codes(constant)
    elif isinstance(code, FunctionType):
        yield from _codes(code.__code__)
    elif isinstance(code, type):
        for function in map(code_of, _functions(code)):
            yield from _codes(function) if isinstance(function, FunctionType) else ()


def _bytecode(code: CodeType) -> list[str]:
    """What a code object does."""
    return [code.co_code.hex(), *(repr(x) for x in code.co_consts if not isinstance(x, CodeType)), *code.co_names]


def _reads(code: Any) -> Iterator[tuple[str, Any]]:
    """Names and values of what a user's function or class reads of its module, and its base classes; no libraries."""
    if not is_users(code) or isinstance(code, ModuleType):
        return
    for base in code.__mro__[1:] if isinstance(code, type) else ():
        if is_users(base):
            yield base.__qualname__, base
    module = vars(sys.modules.get(code.__module__, math))
    space = module if isinstance(code, type) else getattr(code, "__globals__", module)
    names = {name for inner in _codes(code) for name in inner.co_names if not name.startswith("__")}  # no `__file__`
    for name in sorted(names & space.keys()):
        value = space[name]
        if code_of(value) is not code and (is_users(value) or not (callable(value) or isinstance(value, ModuleType))):
            yield name, value


def _state(source: str | None) -> set[str]:
    """Names of variables and attributes that a source changes itself, an object's own after its construction.

    Local variables are none.
    """
    try:
        tree = ast.parse(textwrap.dedent(source or ""))
    except SyntaxError:  # a lambda inside a call
        return set()
    names: set[str] = set()
    for function in _outermost(tree):
        nodes, constructs = [*ast.walk(function)], getattr(function, "name", "") in CONSTRUCTORS
        shared = {name for node in nodes if isinstance(node, ast.Global | ast.Nonlocal) for name in node.names}
        stored = [node for node in nodes if isinstance(getattr(node, "ctx", None), ast.Store | ast.Del)]
        local = {node.id for node in stored if isinstance(node, ast.Name)} - shared
        methods = [node.func for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
        for changed in [*stored, *(method.value for method in methods if method.attr in CHANGES)]:
            inner: Any = changed
            while isinstance(inner, ast.Subscript):
                inner = inner.value
            constructed = constructs and ast.unparse(inner).startswith("self.")
            variable = isinstance(inner, ast.Attribute) or (isinstance(inner, ast.Name) and inner.id not in local)
            if variable and not constructed:
                names.add(ast.unparse(inner))
    return names


def _outermost(tree: ast.AST) -> Iterator[ast.AST]:
    """The functions of a tree that are inside no other."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield node
        else:
            yield from _outermost(node)


def _file(value: Any) -> str | None:
    """The file of a module, or of a value's function or class; None without one, as for code that is typed in."""
    try:
        file = inspect.getsourcefile(code_of(value))
    except (TypeError, OSError):
        return None
    return file if file is not None and Path(file).is_file() else None


def _source(code: Any) -> str | None:
    """The source of a user's function, class or module; None if it is not known, or a library's."""
    try:
        return inspect.getsource(code) if is_users(code) else None
    except (OSError, TypeError):
        return None
