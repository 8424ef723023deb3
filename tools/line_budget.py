"""Keep files, functions and classes small enough to read: part of `make lint`.

Budgets: a source file 350 lines, a test file 600, a function 80, a class 300 (test classes and functions are
held to their file's budget alone).
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("shared", "services", "tests", "tools", "bench", "ops", "examples")
MAX_FILE, MAX_TEST_FILE, MAX_FUNCTION, MAX_CLASS = 350, 600, 80, 300


def overruns(path: Path, is_test: bool) -> Iterator[str]:
    """Yield one line per budget that a file breaks."""
    text = path.read_text(encoding="utf-8")
    name = path.relative_to(ROOT)
    num_lines = text.count("\n")
    budget = MAX_TEST_FILE if is_test else MAX_FILE
    if num_lines > budget:
        yield f"{name}: {num_lines} lines, budget {budget}"
    if is_test:
        return
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        size = (node.end_lineno or node.lineno) - node.lineno + 1
        budget = MAX_CLASS if isinstance(node, ast.ClassDef) else MAX_FUNCTION
        if size > budget:
            yield f"{name}:{node.lineno} {node.name}: {size} lines, budget {budget}"


def main() -> int:
    """Print every overrun; the exit code says whether there was one."""
    found = [
        line
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line in overruns(path, is_test=folder == "tests")
    ]
    print("\n".join(found) if found else "line budget: ok")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
