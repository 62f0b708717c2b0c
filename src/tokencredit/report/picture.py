"""A completion with its credit as a picture for a paper or a post, drawn by Matplotlib."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from io import BytesIO
from typing import Any, NamedTuple

import matplotlib
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, fontManager, get_font
from matplotlib.patches import FancyBboxPatch
from matplotlib.textpath import text_to_path

from tokencredit.report.templating import SHADES, opacity
from tokencredit.runs.transcript import SIGN

DOTS, MAX_DOTS = 300, 2**14
"""Dots per inch of a PNG, and most dots of its height: a longer one is coarser."""
SIZE, SMALL, LINE, MARGIN = 10.0, 8.0, 1.9, 10.0
"""Sizes of the text and of its legend, in points; height of a line, in sizes; the margin, in points."""
INK, SOFT, PALE, GROUND = "#1b1b1f", "#5b5b66", "#82828e", "#ffffff"
"""Colours of tokens, of faint tokens and the legend, of what the policy did not write, and behind all."""
FONT = "DejaVu Sans"
"""The font that comes with Matplotlib."""
PLAIN: Any = {
    # The reader's matplotlibrc may enable TeX, and `$` would begin a formula.
    **{"text.usetex": False, "text.parse_math": False},
    "svg.hashsalt": "tokencredit",  # equal figures are equal files
}
PARTS = re.compile("\n| |[\u2e80-\U0003ffff]|[^\n \u2e80-\U0003ffff]+")
"""Parts of a text; a line may break beside a space and beside a CJK character."""
JOINED = re.compile("[^\n \u2e80-\U0003ffff]")


class Piece(NamedTuple):
    """A piece of text in one look; its shade is made of `share`, a number from −1 to 1."""

    text: str
    colour: str = PALE
    share: float = 0.0


def draw(sample: Mapping[str, Any], scale: str, ending: str, inches: float) -> tuple[bytes, str]:
    """A picture, and the characters that no installed font has, which are boxes in it.

    `sample` is a completion as `notebook.described` gives it, `scale` the number of the strongest shade, `inches` the
    width. `ending` is `svg`, whose texts are outlines and so look the same everywhere, or `png`.
    """
    faint = any(token["faint"] for part in sample["parts"] for token in part.get("tokens", ()))
    legend = [
        Piece(f"advantage, in units of reward: −{scale}\u00a0", SOFT),
        *(Piece("\u00a0", share=step / 12) for step in range(-12, 13)),
        Piece(f"\u00a0{scale}{'; grey: below its standard error' * faint}", SOFT),
    ]
    blocks = [(SMALL, [Piece(sample["about"], SOFT)]), (SIZE, pieces(sample)), (SMALL, legend)]
    names, missing = fonts("".join(piece.text for _, block in blocks for piece in block))
    figure, top = Figure(facecolor=GROUND), MARGIN
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    with matplotlib.rc_context(PLAIN | {"svg.fonttype": "path", "text.hinting": "none"}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # of `missing`
        for size, block in blocks:
            font = FontProperties(family=names, size=size)

            @cache
            def width_of(text: str, font: FontProperties = font) -> float:
                return float(text_to_path.get_text_width_height_descent(text, font, ismath=False)[0])

            for line in lines(block, inches * 72 - 2 * MARGIN, width_of):
                x, base = MARGIN, top + 0.7 * LINE * size
                for piece in line:
                    width = width_of(piece.text)
                    if piece.share:
                        box = FancyBboxPatch(
                            (x, base - size), width, 1.3 * size, linewidth=0, color=colour(piece.share)
                        )
                        box.set_boxstyle("round", pad=0, rounding_size=min(1.5, width / 6))
                        axes.add_patch(box)
                    axes.text(x, base, piece.text, color=piece.colour, fontproperties=font)
                    x += width
                top += LINE * size
        height = top + MARGIN
        axes.set(xlim=(0, inches * 72), ylim=(height, 0))
        figure.set_size_inches(inches, height / 72)
        file, undated = BytesIO(), {"Date": None} if ending == "svg" else None
        figure.savefig(file, format=ending, dpi=min(DOTS, MAX_DOTS * 72 / height), metadata=undated)
    return file.getvalue(), missing


def pieces(sample: Mapping[str, Any]) -> list[Piece]:
    """The prompt, then the completion's tokens with their shades, or the turns of an episode by speaker."""
    found = [Piece(sample["prompt"])]
    for part in sample["parts"]:
        said = [
            Piece(token["text"], SOFT if token["faint"] else INK, token["share"]) for token in part.get("tokens", ())
        ]
        said += [Piece(part["text"])] if "text" in part else []
        if part["role"]:  # the sign after it is escaped in texts, so that none can pass for a speaker
            found.append(Piece("\n" * (not found[-1].text.endswith("\n")) + f"{part['role']} {SIGN} "))
            said = [piece._replace(text=piece.text.replace(SIGN, "\\u203a")) for piece in said]
        found += said
    return found


def lines(block: Sequence[Piece], width: float, width_of: Callable[[str], float]) -> Iterator[list[Piece]]:
    """Lines of a block, broken at a width; a word that is wider breaks anywhere."""
    line: list[Piece] = []
    x, last = 0.0, -1  # the last piece in the line, by its number
    for word in words(block):
        wide = sum(width_of(text) for _, text in word) > width
        for part in [[(number, character)] for number, text in word for character in text] if wide else [word]:
            first, length = part[0][1], sum(width_of(text) for _, text in part)
            if first == "\n" or x + length > width + MARGIN * (first == " "):  # where spaces may hang
                yield line
                line, x, last = [], 0.0, -1
            for number, text in part if first != "\n" else ():
                if number == last:
                    line[-1] = line[-1]._replace(text=line[-1].text + text)
                else:
                    line.append(block[number]._replace(text=text))
                last = number
            x += length * (first != "\n")
    yield line


def words(block: Sequence[Piece]) -> list[list[tuple[int, str]]]:
    """What stays in one line: numbers of pieces and their texts, or parts of these."""
    found: list[list[tuple[int, str]]] = []
    for number, piece in enumerate(block):
        for text in PARTS.findall(piece.text):
            if found and JOINED.match(text) and JOINED.match(found[-1][-1][1]):
                found[-1].append((number, text))
            else:
                found.append([(number, text)])
    return found


def colour(share: float) -> tuple[float, ...]:
    """A number's shade for Matplotlib, as `templating.shade` for CSS."""
    return *(int(part) / 255 for part in SHADES["light"][share >= 0].split()), opacity(share)


def fonts(text: str) -> tuple[list[str], str]:
    """Names of installed fonts that together have a text's characters, and the characters that none has."""
    names, missing = [FONT], {character for character in text if character.isprintable()}
    order = sorted(fontManager.ttflist, key=lambda font: (font.name != FONT, font.style, font.weight != 400, font.name))
    for font in order:
        if not missing or font.name.startswith("Last Resort"):  # which has a box for every character
            continue
        with suppress(OSError, RuntimeError):  # it is gone since Matplotlib listed it, or broken
            if has := missing.intersection(map(chr, get_font(font.fname).get_charmap())):
                names.append(font.name)
                missing -= has
    return list(dict.fromkeys(names)), "".join(sorted(missing))
