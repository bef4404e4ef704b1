"""A page's tables as they are shown, for papers and slides: CSV, Markdown and LaTeX."""

from collections.abc import Callable, Iterator

import pandas as pd

from harness.report.blocks import Page, Table

# What pdfLaTeX cannot set in a text font; ensuremath, as a name may stand within $…$ of the user's own.
SYMBOLS = {
    "−": "-", "×": r"\times", "·": r"\cdot", "±": r"\pm", "÷": r"\div", "≤": r"\leq", "≥": r"\geq", "≠": r"\neq",
    "≈": r"\approx", "∞": r"\infty", "√": r"\surd", "→": r"\rightarrow", "←": r"\leftarrow", "∣": r"\vert",
    "▲": r"\bigtriangleup", "▼": r"\bigtriangledown", "Σ": r"\Sigma", "ᵀ": r"^\top", "⊙": r"\odot",
    "α": r"\alpha", "β": r"\beta", "γ": r"\gamma", "δ": r"\delta", "ε": r"\varepsilon", "θ": r"\theta",
    "Γ": r"\Gamma", "Φ": r"\Phi",
    "λ": r"\lambda", "µ": r"\mu", "μ": r"\mu", "π": r"\pi", "σ": r"\sigma", "τ": r"\tau",
    "φ": r"\varphi", "ω": r"\omega",
    **{digit: f"_{place}" for place, digit in enumerate("₀₁₂₃₄₅₆₇₈₉")},
    **{digit: f"^{place}" for place, digit in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")},
}  # fmt: skip
WORDS = {"–": "--", "…": r"\dots{}", "“": "``", "”": "''", "\u202f": r"\,", "\u00a0": "~"}
SPECIAL = {sign: f"\\{sign}" for sign in "&%$#_{}"} | {
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "\\": r"\textbackslash{}",
    "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}",
}  # fmt: skip
LATEX = str.maketrans({sign: rf"\ensuremath{{{command}}}" for sign, command in SYMBOLS.items()} | WORDS | SPECIAL)


def typeset(page: Page, markdown: Callable[[Table], str]) -> dict[str, str]:
    """File name → content, three files for each table of a page; `markdown` renders one."""
    files = {}
    for name, table in _named(page):
        frame = pd.DataFrame([[cell.text for cell in row] for row in table.rows], columns=list(table.columns))
        files[f"{name}.csv"] = frame.to_csv(index=False, lineterminator="\n")
        files[f"{name}.md"] = markdown(table)
        files[f"{name}.tex"] = latex(table, frame)
    return files


def _named(page: Page) -> Iterator[tuple[str, Table]]:
    """Each table by its section, and by its number there if there are several."""
    if page.glance:
        yield "answer", page.glance
    for section in page.sections:
        tables = [block for block in section.blocks if isinstance(block, Table)]
        for number, table in enumerate(tables, 1):
            yield section.anchor + f"-{number}" * (len(tables) > 1), table


def latex(table: Table, frame: pd.DataFrame) -> str:
    """A tabular in the style of booktabs; its caption stands in a comment."""
    columns = "".join("r" if right else "l" for right in table.numeric)
    caption = escaped(" ".join(f"{table.folded} {table.caption}".split()))
    body = frame.map(escaped).rename(columns=escaped).to_latex(index=False, column_format=columns)
    return f"% \\usepackage{{booktabs}}\n% {caption}\n{body}"


def escaped(text: str) -> str:
    """A text as LaTeX shows it."""
    return text.translate(LATEX)
