"""The package's size by folder, and its import cycles. From the source text alone."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import sp_lightning
from sp_lightning.registry import CAPABILITIES
from tests.support import source as sources_of

PACKAGE = Path(sp_lightning.__file__).parent
NAME = PACKAGE.name
MEETING_POINTS = {f"{NAME}.__init__", f"{NAME}._public", f"{NAME}.registry"}
"""The files that import from everywhere by design: the public names, and the registry, which names all capabilities."""
ROOT = "(root)"

# ------------------------------------------------------------------ size

_NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING, tokenize.ENDMARKER,
}  # fmt: skip
_FOR_TOOLS = re.compile(r"#\s*(?:type:|noqa|fmt:|pragma|\(\d+\)\s*$)")


@dataclass
class Size:
    """Files, lines of code (without blank lines, comments and docstrings), lines with a comment, and classes."""

    files: int = 0
    code: int = 0
    comments: int = 0
    classes: int = 0

    def __add__(self, other: Size) -> Size:
        return Size(
            self.files + other.files,
            self.code + other.code,
            self.comments + other.comments,
            self.classes + other.classes,
        )

    def __str__(self) -> str:
        share = f"{self.comments / self.code:.1%}" if self.code else ""
        return f"{self.files} | {self.code:,} | {self.comments:,} | {share} | {self.classes}"


def size(source: str) -> Size:
    """Returns the size of one file. Comments for tools, such as ``# noqa``, do not count."""
    tree = ast.parse(source)
    docs = {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    code: set[int] = set()
    comments = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
        elif token.type == tokenize.COMMENT and not _FOR_TOOLS.match(token.string):
            comments += 1
    return Size(1, len(code - docs), comments, sum(isinstance(node, ast.ClassDef) for node in ast.walk(tree)))


def files(package: Path = PACKAGE) -> dict[str, str]:
    """Returns the source of each module by its dotted name. A package's own file ends in ``.__init__``."""
    return {
        ".".join((package.name, *path.relative_to(package).with_suffix("").parts)): path.read_text()
        for path in sorted(package.rglob("*.py"))
    }


def folder(module: str) -> str:
    """Returns the folder of a module, as :func:`tests.support.source.folder`."""
    _, *parts = module.split(".")
    return sources_of.folder(".".join(parts)) if len(parts) > 1 else ROOT


def sizes(sources: Mapping[str, str]) -> dict[str, Size]:
    """Returns the size of each folder."""
    found: dict[str, Size] = defaultdict(Size)
    for module, source in sources.items():
        found[folder(module)] += size(source)
    return dict(found)


# ------------------------------------------------------------------ imports


def imported(source: str, module: str, modules: Iterable[str], *, types: bool, inside: bool) -> set[str]:
    """Returns those of ``modules`` that a source imports.

    Args:
        source: the source of a file.
        module: its dotted name, from which relative imports begin.
        modules: dotted names, a package's with ``__init__``.
        types: True to include imports below ``if TYPE_CHECKING``.
        inside: True to include imports inside functions.
    """
    known = {each.removesuffix(".__init__"): each for each in modules}
    found = set()
    for node in _nodes(ast.parse(source), types, inside):
        if isinstance(node, ast.Import):
            names = [[alias.name] for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join([*(module.split(".")[: -node.level] if node.level else []), *filter(None, [node.module])])
            names = [[f"{base}.{alias.name}", base] for alias in node.names]
        else:
            continue
        # "from package import name" imports the file "package/name.py" if there is one, otherwise "package/__init__.py".
        found |= {next((known[name] for name in each if name in known), "") for each in names}
    return found - {"", module}


def _nodes(tree: ast.AST, types: bool, inside: bool) -> Iterator[ast.AST]:
    """Iterates over all nodes; over those below ``if TYPE_CHECKING`` and inside functions only on demand."""
    for node in ast.iter_child_nodes(tree):
        for_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        in_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        if (types or not for_types) and (inside or not in_function):
            yield node
            yield from _nodes(node, types, inside)


def cycles(graph: Mapping[str, set[str]]) -> list[set[str]]:
    """Returns the strongly connected components with more than one node, the largest first."""
    reached = {node: _reachable(graph, node) for node in graph}
    components = {
        frozenset({node, *(other for other in there if node in reached[other])}) for node, there in reached.items()
    }
    return sorted((set(each) for each in components if len(each) > 1), key=lambda each: (-len(each), sorted(each)))


def _reachable(graph: Mapping[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    left = [start]
    while left:
        new = graph[left.pop()] - found
        found |= new
        left += new
    return found


def between_files(sources: Mapping[str, str], *, types: bool, inside: bool) -> dict[str, set[str]]:
    """Returns, for each file, the files that it imports. The arguments are those of :func:`imported`."""
    return {module: imported(source, module, sources, types=types, inside=inside) for module, source in sources.items()}


def without_meeting_points(graph: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Returns a graph of files without those that import from everywhere by design."""
    return {module: others - MEETING_POINTS for module, others in graph.items() if module not in MEETING_POINTS}


def between_folders(graph: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Returns, for each folder, the folders that its files import. A file directly in the package counts as a folder."""

    def place(module: str) -> str:
        return module if folder(module) == ROOT else folder(module)

    found: dict[str, set[str]] = defaultdict(set)
    for module, others in graph.items():
        found[place(module)] |= {place(other) for other in others} - {place(module)}
    return dict(found)


# ------------------------------------------------------------------ report


def report() -> Iterator[str]:
    """Iterates over the lines of the report: tables in Markdown."""
    sources = files()
    found = sizes(sources)
    yield "\n## Size\n"
    yield "Lines of code without blank lines, comments and docstrings. Comments: lines with one, and as a share of code lines.\n"
    yield "| folder | files | code | comments | share | classes |"
    yield "|---|---|---|---|---|---|"
    core = sum((each for name, each in found.items() if name not in CAPABILITIES), Size())
    for name in sorted(found, key=lambda name: (name in CAPABILITIES, name)):
        kind = " (capability)" if name in CAPABILITIES else ""
        yield f"| {name}{kind} | {found[name]} |"
    yield f"| **core** | {core} |"
    yield f"| **capabilities** | {sum((each for name, each in found.items() if name in CAPABILITIES), Size())} |"
    yield f"| **all** | {sum(found.values(), Size())} |"
    yield "\n## Cycles\n"
    yield "Strongly connected components with more than one member, and the size of each."
    yield "The second and third row leave out `registry`, `_public` and the package's `__init__`: they import from everywhere by"
    yield "design, inside functions or for annotations, so that with them nearly all files are one component.\n"
    yield "| imports | between files | between folders |"
    yield "|---|---|---|"
    for title, types, inside in (
        ("at module level", False, False),
        ("and for annotations (`if TYPE_CHECKING`)", True, False),
        ("and inside functions", True, True),
    ):
        graph = between_files(sources, types=types, inside=inside)
        if types:
            graph = without_meeting_points(graph)
        of_files, of_folders = cycles(graph), cycles(between_folders(graph))
        yield f"| {title} | {_cell(of_files)} | {_cell(of_folders)} |"
    for component in of_files + of_folders:
        yield f"\nA component of the last row: {_names(component)}."


def _cell(components: list[set[str]]) -> str:
    return f"{len(components)} ({', '.join(str(len(each)) for each in components)})" if components else "0"


def _names(component: set[str]) -> str:
    return ", ".join(f"`{each.removeprefix(f'{NAME}.')}`" for each in sorted(component))
