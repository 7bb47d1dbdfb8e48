#!/usr/bin/env python3
"""Turns a terminal's screen, as text with ANSI colours on the standard input, into an SVG picture.

    tmux capture-pane -e -p | python terminal_svg.py --title "lockstep plan" > plan.svg
"""

import argparse
import re
import sys
from html import escape

CELL_W, CELL_H, PAD, BAR = 8.4, 18, 14, 30
BACKGROUND, FOREGROUND = "#16181d", "#d7dae0"
COLOURS = ["#3b4048", "#e06c75", "#98c379", "#e5c07b", "#61afef", "#c678dd", "#56b6c2", "#d7dae0"]
BRIGHT = ["#5c6370", "#ff7b86", "#b5e890", "#ffd68a", "#82c4ff", "#e29bff", "#79d7e2", "#ffffff"]


class Style:
    def __init__(self):
        self.reset()

    def reset(self):
        self.colour, self.bold, self.dim = None, False, False

    def apply(self, codes):
        codes = [int(code or 0) for code in codes.split(";")]
        while codes:
            code = codes.pop(0)
            if code == 0:
                self.reset()
            elif code == 1:
                self.bold = True
            elif code == 2:
                self.dim = True
            elif code == 22:
                self.bold = self.dim = False
            elif 30 <= code <= 37:
                self.colour = COLOURS[code - 30]
            elif 90 <= code <= 97:
                self.colour = BRIGHT[code - 90]
            elif code == 39:
                self.colour = None
            elif code in (38, 48):
                # Colours by number or by value: only the first sixteen occur.
                number = codes[1] if codes[:1] == [5] and len(codes) > 1 else None
                del codes[: 2 if codes[:1] == [5] else 4]
                if code == 38 and number is not None and number < 16:
                    self.colour = (COLOURS + BRIGHT)[number]

    def attributes(self):
        found = f'fill="{self.colour or FOREGROUND}"'
        found += ' font-weight="bold"' if self.bold else ""
        return found + (' opacity="0.6"' if self.dim else "")


def spans(line, style):
    """The parts of a line that look alike, with the column at which each begins."""
    column = 0
    for part in re.split(r"(\x1b\[[0-9;]*m)", line):
        if match := re.fullmatch(r"\x1b\[([0-9;]*)m", part):
            style.apply(match[1])
        elif part:
            if part.strip():
                yield column, part, style.attributes()
            column += len(part)


def svg(text, title):
    lines = [line.rstrip() for line in text.rstrip().split("\n")]
    plain = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in lines]
    width = max(map(len, plain), default=0) * CELL_W + 2 * PAD
    height = len(lines) * CELL_H + 2 * PAD + BAR
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height}" font-size="14" '
        'font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, DejaVu Sans Mono, monospace">',
        f"<title>{escape(title)}</title>",
        f'<rect width="100%" height="100%" rx="8" fill="{BACKGROUND}"/>',
    ]
    for at, colour in enumerate(["#ff5f57", "#febc2e", "#28c840"]):
        out.append(f'<circle cx="{PAD + 6 + 20 * at}" cy="18" r="6" fill="{colour}"/>')
    style = Style()
    for row, line in enumerate(lines):
        y = BAR + PAD + row * CELL_H + 12
        for column, part, attributes in spans(line, style):
            # `textLength` keeps columns aligned whatever font is found.
            out.append(
                f'<text x="{PAD + column * CELL_W:.1f}" y="{y}" textLength="{len(part) * CELL_W:.1f}" '
                f'xml:space="preserve" {attributes}>{escape(part)}</text>'
            )
    return "\n".join(out + ["</svg>", ""])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--title", default="terminal")
    args = parser.parse_args()
    sys.stdout.write(svg(sys.stdin.read(), args.title))


if __name__ == "__main__":
    main()
