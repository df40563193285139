"""Prints what the kernels and their TensorRT plugins support, as the tables of plugins/README.md.

    python -m plugins.support           # print
    python -m plugins.support --write   # put into the README

Everything follows from the checks that run when an engine is built; nothing is compiled.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path

from plugins.attend.plugin import attend_fields
from plugins.commit.plugin import check_commit
from plugins.compile import SMS
from plugins.errors import KernelError
from plugins.kernel import Kernel
from plugins.layout import ELEMENTS, KERNEL_HEAD_DIMS, QUANTIZED
from plugins.trt_fields import BLOCK_ENTRIES, PAGE_TOKENS, PluginFields, field_kinds
from plugins.trt_operations import BODIES

README = Path(__file__).resolve().parent / "README.md"
BEGIN, END = "<!-- python -m plugins.support -->\n", "<!-- end -->\n"
USUAL_PAGE, USUAL_BLOCK = 16, 64
Check = Callable[[PluginFields], object]


def support_matrix() -> str:
    """Markdown: per device and head size the longest pages and blocks."""
    header = "| SM | head_dim | dtype | page_tokens | block_entries, attend and score | block_entries, commit |"
    rows = [header, "|---|---|---|---|---|---|"]
    for sm in SMS:
        for head_dim in KERNEL_HEAD_DIMS:
            for element in ELEMENTS:
                cells = (sm, str(head_dim), element, *_limits(sm, head_dim, element))
                rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def _limits(sm: str, head_dim: int, element: str) -> tuple[str, str, str]:
    def passing(values: range, check: Check, page: int | None, block: int | None) -> list[int]:
        """Values with which every block format passes. page, block: fixed, or None for the one that varies."""
        found = []
        for value in values:
            sizes = (page or value, block or value)
            if all(_passes(check, (sm, element, name), head_dim, sizes) for name in (*QUANTIZED, element)):
                found.append(value)
        return found

    return (
        _ranges(passing(PAGE_TOKENS, _check_attend, None, USUAL_BLOCK)),
        _ranges(passing(BLOCK_ENTRIES, _check_attend, USUAL_PAGE, None)),
        _ranges(passing(BLOCK_ENTRIES, check_commit, USUAL_PAGE, None)),
    )


def _passes(check: Check, kind: tuple[str, str, str], head_dim: int, sizes: tuple[int, int]) -> bool:
    try:
        check(PluginFields(*kind, 8, 2, head_dim, *sizes))
    except KernelError:
        return False
    return True


def _check_attend(fields: PluginFields) -> None:
    attend_fields(fields, num_layers=1, scale=1.0, compile_cubin=_no_cubin)


def _no_cubin(kernel: Kernel, sm: str) -> bytes:
    return b""


def _ranges(values: list[int]) -> str:
    """`8 to 144, then multiples of 16 to 256`, say."""
    dense = next((a for a, b in pairwise(values) if b - a > 8), values[-1])
    rest = [value for value in values if value > dense]
    assert rest == list(range(dense + 16, rest[-1] + 1, 16)) if rest else True, values
    return f"{values[0]} to {dense}" + (f", then multiples of 16 to {rest[-1]}" if rest else "")


def tensor_table(operation: str) -> str:
    """Markdown: inputs and outputs of one plugin, in TensorRT's order."""
    rows = ["| tensor | type | shape | |", "|---|---|---|---|"]
    spec = BODIES[operation].spec
    for tensor in spec.inputs:
        rows.append(f"| {tensor.name} | {tensor.kind} | [{', '.join(tensor.dims)}] | |")
    for tensor in spec.outputs:
        note = "output" if tensor.alias is None else f"output, `{tensor.alias}` edited in place"
        rows.append(f"| {tensor.name} | {tensor.kind} | [{', '.join(tensor.dims)}] | {note} |")
    return "\n".join(rows) + "\n"


def field_table() -> str:
    """Markdown: plugin fields by operation."""
    shared = field_kinds(PluginFields)
    rows = ["| plugin | fields |", "|---|---|", f"| all | {_fields(shared)} |"]
    for operation, body in BODIES.items():
        own = {name: kind for name, kind in field_kinds(body.fields_type).items() if name not in shared}
        rows.append(f"| {operation}: `{body.spec.name}` | {_fields(own)} |")
    return "\n".join(rows) + "\n"


def _fields(kinds: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {kind}" for name, kind in kinds.items())


def sections() -> Iterator[str]:
    """What stands between the README's marks, in order."""
    yield support_matrix()
    yield field_table()
    for operation in BODIES:
        yield tensor_table(operation)


def updated(text: str) -> str:
    """The README with today's tables."""
    parts = text.split(BEGIN)
    tables = list(sections())
    assert len(parts) == len(tables) + 1, f"{README} has {len(parts) - 1} marks, expected {len(tables)}"
    after = [part.split(END, 1)[1] for part in parts[1:]]
    return parts[0] + "".join(f"{BEGIN}{table}{END}{rest}" for table, rest in zip(tables, after, strict=True))


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(prog="python -m plugins.support", description="Print what kernels support.")
    parser.add_argument("--write", action="store_true", help="put the tables into plugins/README.md")
    if parser.parse_args().write:
        README.write_text(updated(README.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print("\n".join(sections()), end="")


if __name__ == "__main__":
    main()
