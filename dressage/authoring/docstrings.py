"""What docstrings say of a function and its parameters, in the shapes that people write."""

import contextlib
import re
import textwrap
from dataclasses import dataclass

import docstring_parser
from docstring_parser.google import DEFAULT_SECTIONS, GoogleParser, Section, SectionType

HEADINGS = ("Keyword Args", "Keyword Arguments", "Other Parameters", "Other Args")
_HEADING = re.compile(r"^\s*(Args|Arguments|Parameters|Params|Keyword Args|Keyword Arguments):\s*$")
_ENTRY = re.compile(r"^(\s+)(?:[-*•]\s+)?(\*{0,2}\w+)(\s*\([^)]*\))?(?::\s|\s+[-–—]\s+)(?=\S)")


@dataclass(frozen=True)
class Documentation:
    """What a function is for, and what its parameters are, by name."""

    description: str
    parameters: dict[str, str]


def documentation_of(docstring: str) -> Documentation:
    """Read a Google, NumPy, Sphinx or Epydoc docstring.

    Google's also with bullets (`- city: Where.`), dashes (`city - Where.`) and a section of keyword
    arguments; NumPy's also with several names in a line (`x, y : float`).
    """
    first, _, rest = docstring.partition("\n")
    has_summary = not _HEADING.match(first)
    if not has_summary:  # what follows a first line has lost its indentation
        docstring = f"Summary.\n\n{first}\n{textwrap.indent(rest, '    ')}"
    text = _plain_entries(docstring)
    found = docstring_parser.parse(text)
    sections = [*DEFAULT_SECTIONS, *(Section(h, "param", SectionType.MULTIPLE) for h in HEADINGS)]
    with contextlib.suppress(docstring_parser.ParseError):
        google = GoogleParser(sections=sections).parse(text)
        found = max(found, google, key=lambda parsed: len(parsed.params))
    parameters = {
        name.strip().lstrip("*"): parameter.description or ""
        for parameter in found.params
        for name in parameter.arg_name.split(",")
    }
    paragraphs = [found.short_description if has_summary else "", found.long_description]
    return Documentation("\n\n".join(p for p in paragraphs if p), parameters)


def _plain_entries(docstring: str) -> str:
    """Entries of sections as `name: what`."""
    lines, inside = [], False
    for line in docstring.splitlines():
        if _HEADING.match(line):
            inside = True
        elif line.strip() and not line[:1].isspace():
            inside = False
        found = _ENTRY.match(line) if inside else None
        if found:
            line = f"{found[1]}{found[2]}{found[3] or ''}: {line[found.end() :]}"
        lines.append(line)
    return "\n".join(lines)
