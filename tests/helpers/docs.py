"""Reading the pages of docs/."""


def table_rows(text):
    """The cells of all tables in a Markdown text, without the headers, whose second cell begins with "here"."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in cells if not row[1].startswith(("here", "---"))]


def names_in(file):
    """The lines of a file, without comments and empty ones."""
    return [line for line in file.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
