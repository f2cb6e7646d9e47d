"""Every message that this package raises, as a list that people can read: ``python -m tests.repository.messages [WORD …]``.

With words, only messages that contain one of them are listed. ``{…}`` stands for a value, and ``<…>`` for text that is made
elsewhere.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from typing import NamedTuple

from tests.support.pages import ROOT

PACKAGE = ROOT / "sp_lightning"


class Message(NamedTuple):
    """A message, and where it is raised.

    Attributes:
        file: the file, from the package on.
        line: the line of the ``raise``.
        error: the class of the error.
        text: what it says.
    """

    file: str
    line: int
    error: str
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.error}\n    {self.text}"


def messages() -> list[Message]:
    """All messages of the package, in the order of files and lines."""
    files = sorted(PACKAGE.rglob("*.py"))
    return [each for file in files for each in raised(file.read_text(), file.relative_to(PACKAGE).as_posix())]


def raised(source: str, file: str = "") -> Iterator[Message]:
    """The messages that a file raises."""
    tree = ast.parse(source)
    texts = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            text = said(node.exc.args[0], texts)
            if re.search(r"[a-z]{3}", re.sub(r"<[^>]*>", "", text)):
                yield Message(file, node.lineno, ast.unparse(node.exc.func), text)


def said(node: ast.expr, texts: dict[str, ast.expr]) -> str:
    """An expression as a reader sees it, if it is known without a run.

    Args:
        node: the expression.
        texts: the values of the file's constants by name.
    """
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(said(value, texts) for value in node.values)
    if isinstance(node, ast.FormattedValue):
        known = isinstance(node.value, ast.Name) and node.value.id in texts
        return said(node.value, texts) if known else "{" + ast.unparse(node.value).split("(")[0].split("[")[0] + "}"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return said(node.left, texts) + said(node.right, texts)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return f"[{said(node.left, texts)}]"
    if isinstance(node, ast.IfExp):
        return f"[{said(node.body, texts)}|{said(node.orelse, texts)}]"
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "format":
        return said(node.func.value, texts)
    if isinstance(node, ast.Name) and isinstance(texts.get(node.id), ast.Constant | ast.JoinedStr | ast.BinOp):
        return said(texts[node.id], texts)
    return f"<{ast.unparse(node)}>"


if __name__ == "__main__":
    words = sys.argv[1:]
    found = [each for each in messages() if not words or any(word in each.text for word in words)]
    print("\n".join(map(str, found)))
    print(f"{len(found)} messages.")
