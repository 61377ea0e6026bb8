"""Writes the mutants of source files with mutmut's operators, as JSON lines on standard output.

It runs in the environment of `requirements.txt`, from a folder with a `setup.cfg`, which mutmut reads when it is
imported. It knows no tests: `run` names the files, and decides what each mutant means.
"""

from __future__ import annotations

import argparse
import difflib
import json
import random
from collections.abc import Iterator
from pathlib import Path

import libcst
import libcst.matchers
from mutmut.mutation.file_mutation import MutationVisitor
from mutmut.mutation.mutators import mutation_operators
from mutmut.mutation.pragma_handling import get_ignored_lines

OPERATORS = {
    "operator_number",
    "operator_remove_unary_ops",
    "operator_keywords",
    "operator_name",
    "operator_swap_op",
    "operator_augmented_assignment",
    "operator_match",
    "operator_if_exp",
}
"""Operators that are used. The others change texts, or put None into places that mypy would reject."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", required=True)
    parser.add_argument("--most", type=int, required=True)
    parser.add_argument("files", nargs="+", type=Path)
    options = parser.parse_args()
    found = [one for file in options.files for one in _mutations(file)]
    random.Random(options.seed).shuffle(found)
    print(json.dumps({"num_found": len(found)}))
    for file, module, mutation in found[: options.most]:
        print(json.dumps(_described(file, module, mutation)))


def _mutations(file: Path) -> Iterator[tuple[Path, libcst.Module, object]]:
    """Mutations of function bodies. Constants and defaults are choices, and an assertion may be looser than the
    truth."""
    source = libcst.parse_module(file.read_text())
    wrapper = libcst.MetadataWrapper(source)
    chosen = [(kind, operator) for kind, operator in mutation_operators if operator.__name__ in OPERATORS]
    visitor = MutationVisitor(chosen, get_ignored_lines(str(file), source.code, wrapper))
    module = wrapper.visit(visitor)
    asserts = {node for check in libcst.matchers.findall(module, libcst.matchers.Assert()) for node in _nodes(check)}
    for mutation in visitor.mutations:
        if not isinstance(mutation.contained_by_top_level_function, libcst.FunctionDef) or (
            mutation.original_node in asserts
        ):
            continue
        yield file, module, mutation


def _nodes(node: libcst.CSTNode) -> Iterator[libcst.CSTNode]:
    yield node
    for child in node.children:
        yield from _nodes(child)


def _described(file: Path, module: libcst.Module, mutation: object) -> dict[str, object]:
    """The mutant's one edit, and a readable form of it."""
    before = module.code
    after = module.deep_replace(mutation.original_node, mutation.mutated_node).code
    lines = list(difflib.unified_diff(before.splitlines(), after.splitlines(), n=0, lineterm=""))[2:]
    start = next(i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b)
    return {"file": str(file), "line": before.count("\n", 0, start) + 1, "diff": lines[1:], "source": after}


if __name__ == "__main__":
    main()
