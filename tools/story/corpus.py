"""From a folder of public-domain books to clean stories.

BOOKS_DIR/*.txt are tales, BOOKS_DIR/novels/*.txt longer children's books (sampled less often); `books.tsv` lists the
Project Gutenberg texts behind the bundled model. A document is one story, or one chapter of a longer book. Titles,
chapter numbers, lists of contents, prefaces, notes and every Project Gutenberg notice are dropped. A text that already
holds "<|endoftext|>" is taken as clean documents with that between them.
"""

from __future__ import annotations

import random
import re
import unicodedata
from dataclasses import dataclass
from pathlib import Path

from .tokenizer import END

__all__ = ["Corpus", "documents", "read_books"]

HELD_OUT = 0.02
SHORTEST = 700
"""Characters of a document; anything shorter is a title page or a list."""

DROPPED_SECTION = re.compile(
    r"PREFACE|CONTENTS|INTRODUCTION|\bNOTES?\b|ILLUSTRATION|FOOTNOTE|DEDICAT|GLOSSARY|INDEX|TRANSCRIBER|PREPARER|"
    r"APPENDIX|POSTSCRIPT|BY THE SAME AUTHOR|ADVERTISE|^TO \w+ \w+$",
    re.I,
)
CHAPTER = re.compile(
    r"^(chapter|book|part|story|stave|act|scene)\b[\s.:]*([ivxlc\d]+|\w+)\b|^[ivxlc]{1,7}\.?$|^\d{1,2}\.?$", re.I
)
ELISION = re.compile(
    r"'(tis|twas|twere|twill|twould|em|ere|til|till|cause|un|ee|ed|bout|gainst|mid|neath|eard|orse|im|ow|as)\b", re.I
)
ATTRIBUTION = re.compile(
    r"[\[(]?(From|Source|Translated|Adapted|Taken|Shortened|Abridged|Kletke|Madame|Grimm|Andersen|Bechstein|"
    r"Asbjornsen|Perrault|Told|Contes|Lapplandische|A Russian|The original)\b",
    re.I,
)
NOT_ATTRIBUTION = re.compile(r"From (that|this|the (first|time))")
NOTICE = re.compile(
    r"\s*(\[\d+\]|\[(Footnote|Illustration)|Footnotes?:|Produced by|E-?text prepared|Transcrib|\*)", re.I
)
HEADER = (r"\*\*\* ?START OF TH.*?\*\*\*[^\n]*\n", r"\*END\*? ?THE SMALL PRINT[^\n]*\n")
FOOTER = re.compile(
    r"\n[^\n]{0,12}(\*\*\* ?END OF TH|End of (the |this )?Project Gutenberg|\*Project Gutenberg Etext|"
    r"THE END\.?\s*\n\s*\n\s*\n|Transcriber's Note)",
    re.I,
)
FOLKLORE_NOTES = re.compile(r"\n *NOTES AND REFERENCES")
FOLD = {
    "\u201c": '"', "\u201d": '"', "\u201e": '"', "\u2018": "'", "\u2019": "'", "`": "'", "\u00b4": "'",
    "\u2014": "--", "\u2013": "--", "\u2015": "--", "\u2026": "...", "\u00e6": "ae", "\u00c6": "Ae", "\u0153": "oe",
    "\u0152": "Oe", "\u00a3": "L", "\u00a0": " ", "\u00df": "ss", "\u00f8": "o", "\u00d8": "O",
}  # fmt: skip
CLEANING = (
    (re.compile(r"\[(Illustration|Footnote|Note|Sidenote|Transcriber)[^\]]*\]", re.S), " "),
    (re.compile(r"\[\d+\]|\{\d+\}|\(\d+\)|\[[A-Z]\]"), ""),  # footnote marks, page numbers
    (re.compile(r"\[\*+\]|\*+|#"), ""),
    (re.compile(r"\["), "("),
    (re.compile(r"\]"), ")"),
    (re.compile(r"[_=~^]"), ""),
    (re.compile(r"\s*-{2,}\s*"), " - "),
    (re.compile(r" - (?=[\"'.,!?;:)]|$)"), " -"),
    (re.compile(r"(?<=[\"'(])\s*- "), "- "),
    (re.compile(r"\.\s*\.\s*\.(\s*\.)*"), "..."),
    (re.compile(r"''"), '"'),
    (re.compile(r"[ \t]+"), " "),
    (re.compile(r" +([,.;:!?])"), r"\1"),
)


@dataclass(frozen=True, slots=True)
class Corpus:
    """Documents to train on, and a fiftieth of them held out."""

    tales: list[str]
    novels: list[str]
    valid: list[str]


def _body(text: str) -> str:
    """Without the Project Gutenberg header, small print and licence, and without folklore notes at the back."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    begins = [m.end() for pattern in HEADER for m in re.finditer(pattern, text[: len(text) // 3], re.S)]
    text = text[max(begins, default=0) :]
    half = len(text) // 2
    if footer := FOOTER.search(text, half):
        text = text[: footer.start()]
    notes = [m.start() for m in FOLKLORE_NOTES.finditer(text, half)]
    return text[: notes[-1]] if notes else text


def _ascii(text: str) -> str:
    for letter, plain in FOLD.items():
        text = text.replace(letter, plain)
    return "".join(c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c))


def _swap_quotes(text: str) -> str:
    """British books quote speech with ': outer quotes become ", inner ones '."""
    text = text.replace('"', "\x01")
    text = ELISION.sub(lambda m: "\x02" + m.group(1), text)
    text = re.sub(r"(^|[\s(\[-])'(?=[\w\x01(\x02])", r'\1"', text)
    text = re.sub(r"(?<=[.,!?;:\x01)-])'(?=$|[\s)\]-])", '"', text)
    return text.replace("\x01", "'").replace("\x02", "'")


def _clean(paragraph: str) -> str:
    for pattern, replacement in CLEANING:
        paragraph = pattern.sub(replacement, paragraph)
    return paragraph.strip()


def _is_heading(lines: list[str], gap: int) -> bool:
    """`gap`: empty lines before."""
    text = " ".join(x.strip() for x in lines).strip(" _*")
    if not text or len(lines) > 3 or len(text) > 110:
        return False
    if CHAPTER.match(text) and len(text) < 80:
        return True
    letters = [c for c in text if c.isalpha()]
    if not letters:
        return False
    if gap >= 2 and sum(c.isupper() for c in letters) > 0.8 * len(letters):
        return True
    return gap >= 3 and len(text) < 70 and not re.search(r"[.!?,;:\"')-]$", text) and text[0].isupper()


def _paragraph(lines: list[str]) -> str | None:
    """Clean text of a paragraph (verse keeps its lines), or None for what is no part of a story."""
    if NOTICE.match("\n".join(lines)):
        return None
    widths = [len(x.strip()) for x in lines]
    indented = sum(x.startswith("  ") for x in lines)
    verse = len(lines) > 1 and (indented > 0.6 * len(lines) or max(widths) < 52) and max(widths) < 62
    text = _clean(("\n" if verse else " ").join(x.strip() for x in lines))
    text = re.sub(r"\s*\n\s*", "\n", text)
    letters = [c for c in text if c.isalpha()]
    if len(letters) < 3 or sum(c.islower() for c in letters) < 0.6 * len(letters):
        return None
    contents_line = len(text) < 100 and re.search(r"\s(\.\s){3,}|\.{6,}|\s\d{1,3}$", text)
    return None if contents_line or re.search(r"[|+]", text) else text


def _split(text: str) -> list[list[str]]:
    """Stories of a book as lists of paragraphs. What comes before the first heading is the title page."""
    stories: list[list[str]] = []
    current: list[str] | None = None
    for match in re.finditer(r"(\n*)((?:[^\n]*\S[^\n]*(?:\n|$))+)", re.sub(r"^[^\S\n]+$", "", text, flags=re.M)):
        lines = match.group(2).rstrip("\n").split("\n")
        if _is_heading(lines, len(match.group(1))):
            if current:
                stories.append(current)
            title = " ".join(x.strip() for x in lines)
            current = None if DROPPED_SECTION.search(title) else []
        elif current is not None and (paragraph := _paragraph(lines)):
            current.append(paragraph)
    return [*stories, current] if current else stories


def _trim(story: list[str]) -> list[str]:
    """Without notes on the source at either end, and with the first words (often capitals) in ordinary spelling."""

    def is_note(p: str) -> bool:
        return bool(ATTRIBUTION.match(p)) and not NOT_ATTRIBUTION.match(p)

    while story and len(story[0]) < 160 and (is_note(story[0]) or not re.search(r"[.!?,;:\"'-]$", story[0])):
        story = story[1:]
    while story and len(story[-1]) < 260 and (ATTRIBUTION.match(story[-1]) or story[-1].startswith(("[", "("))):
        story = story[:-1]
    if not story:
        return []
    first = re.sub(r"^(\"?)([A-Z]+(?:[ -][A-Z]+)*)\b", lambda m: m.group(1) + m.group(2).capitalize(), story[0])
    first = re.sub(r"^(Once|There|Long|In)( [A-Z]{2,})+", lambda m: m.group(0).capitalize(), first)
    return [first, *story[1:]]


def documents(text: str) -> list[str]:
    """Clean stories of one book; paragraphs are parted by an empty line."""
    if END in text:
        return [part for part in (p.strip("\n") for p in text.split(END)) if part]
    text = _ascii(_body(text))
    single_quoted = len(re.findall(r"(?:^|\s)'\w", text)) > 2 * len(re.findall(r'(?:^|\s)"\w', text))
    found = []
    for raw in _split(text):
        story = _trim([p for p in raw if p.isascii()])
        size = sum(map(len, story))
        if size < SHORTEST or size / len(story) < 40 or any(re.match(r"(Source|Parallels)\W", p) for p in story):
            continue
        found.append("\n\n".join(_swap_quotes(p) if single_quoted else p for p in story))
    return found


def _read(path: Path) -> str:
    data = path.read_bytes()
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return data.decode("latin-1")  # older Project Gutenberg editions


def read_books(folder: Path, seed: int) -> Corpus:
    """All books below `folder`; the choice of held-out documents depends on `seed` alone."""
    chance = random.Random(seed)
    corpus = Corpus([], [], [])
    for group, where in ((corpus.tales, folder), (corpus.novels, folder / "novels")):
        for path in sorted(where.glob("*.txt")):
            for document in documents(_read(path)):
                (corpus.valid if chance.random() < HELD_OUT else group).append(document)
    if not corpus.tales or not corpus.valid:
        raise SystemExit(f"{folder}: no stories found; put some books (*.txt) there, see tools/story/books.tsv")
    return corpus
