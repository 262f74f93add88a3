"""Tables that benchmarks write into pages of docs/, between two comments that name them."""

from pathlib import Path

END = "<!-- end of table -->"


def update(page: Path, name: str, head: list[str], rows: list[list[str]], keys: int) -> None:
    """Puts rows of cells into a page's table, in place of those with the same first `keys` cells; others stay.

    Raises:
      ValueError: the page has no place for the table.
    """
    begin = f"<!-- table: {name} -->"
    before, found, rest = page.read_text().partition(begin)
    table, end, after = rest.partition(END)
    if not found or not end:
        raise ValueError(f"{page}: no place for the table; put {begin} and {END} where it shall be")
    old = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.strip().splitlines()[2:]]
    cells = {tuple(row[:keys]): row for row in (*old, *rows)}
    lines = [_line(head), "|---" * len(head) + "|", *(_line(cells[key]) for key in sorted(cells))]
    page.write_text("\n".join([before + begin, *lines, end]) + after)


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
