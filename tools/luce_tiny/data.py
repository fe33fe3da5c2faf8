"""Fetch free English text from Debian packages and turn it into one cleaned corpus.

    python -m tools.luce_tiny.data fetch DIR      # apt-get download + dpkg -x, no root needed
    python -m tools.luce_tiny.data clean DIR OUT  # OUT/corpus.txt: documents separated by a NUL byte

The dictionaries double as the source of the question/answer task: `clean` also writes OUT/definitions.tsv.
"""

from __future__ import annotations

import argparse
import gzip
import html
import random
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Source:
    """One package: where its text lies, how to read it, under which licence it may be used."""

    package: str
    licence: str
    pattern: str
    reader: str
    limit_mb: float = 100.0


SOURCES: tuple[Source, ...] = (
    Source("bible-kjv", "public domain (text)", "bible.txt", "verses"),
    Source("dict-gcide", "GPL-3+", "**/gcide.dict.dz", "gcide"),
    Source("dict-wn", "WordNet licence (BSD style)", "**/wn.dict.dz", "wordnet"),
    Source("dict-foldoc", "GFDL-1.1+", "**/foldoc.dict.dz", "dictionary"),
    Source("dict-jargon", "public domain", "**/jargon.dict.dz", "dictionary"),
    Source("dict-devil", "public domain", "**/devil.dict.dz", "dictionary"),
    Source("debian-handbook", "GPL-2+ or CC-BY-SA-3.0", "usr/share/doc/debian-handbook/html/en-US/*.html", "page"),
    Source("debian-reference-en", "GPL-2+", "**/*.en.html", "page"),
    Source("debian-faq", "GPL-2+", "**/*.en.html", "page"),
    Source("debian-policy", "GPL-2+", "usr/share/doc/debian-policy/policy.html/*.html", "page"),
    Source("developers-reference", "GPL-2+", "**/*.html", "page"),
    Source("harden-doc", "GPL-2+", "**/html/en*/*.html", "page"),
    Source("installation-guide-amd64", "GPL-2", "**/en/*.html", "page"),
    Source("python3.11-doc", "PSF-2", "usr/share/doc/python3.11/html/**/*.html", "page", 14),
    Source("perl-doc", "Artistic or GPL-1+", "**/*.pod", "pod", 12),
    Source("git-doc", "GPL-2", "**/*.txt", "plain", 6),
    Source("postgresql-doc-15", "PostgreSQL", "**/*.html", "page", 9),
    Source("sqlite3-doc", "public domain", "**/*.html", "page", 9),
    Source("manpages", "mixed free (see package)", "usr/share/man/man*/*.gz", "roff"),
    Source("manpages-dev", "mixed free (see package)", "usr/share/man/man*/*.gz", "roff"),
    Source("apache2-doc", "Apache-2.0", "**/en/**/*.html", "page"),
    Source("rust-doc", "MIT or Apache-2.0", "usr/share/doc/rust-doc/html/*book*/**/*.html", "page", 6),
    Source("octave-doc", "GPL-3+ (manual: own free licence)", "**/octave.html/*.html", "page", 4),
    Source("zsh-doc", "Zsh licence (MIT style)", "**/*.html", "page", 3),
    Source("postfix-doc", "EPL-2.0 or IPL-1.0", "**/html/*.html", "page", 4),
    Source("linux-doc-6.1", "GPL-2", "usr/share/doc/linux-doc-6.1/html/**/*.html", "page", 22),
)

_BLOCK = re.compile(r"(?is)<(script|style|nav|head|footer|svg)\b.*?</\1>|<!--.*?-->")
_BREAK = re.compile(r"(?i)</?(p|div|li|ul|ol|h[1-6]|tr|dt|dd|dl|pre|table|section|article|br)\b[^>]*>")
_TAG = re.compile(r"<[^>]{0,2000}>")
_ROFF_FONT = re.compile(r"\\f(?:\[\w*\]|\(\w\w|\w)|\\s[-+]?\d|\\&|\\c|\\\||\\\^")
_SENTENCE_LETTERS = re.compile(r"[A-Za-z]")


def fetch(root: Path) -> None:
    """Download and unpack every package under root/<package>."""
    root.mkdir(parents=True, exist_ok=True)
    for source in SOURCES:
        target = root / source.package
        if target.exists():
            continue
        names = [source.package] + (["bible-kjv-text"] if source.package == "bible-kjv" else [])
        for name in names:
            subprocess.run(["apt-get", "download", "-q", name], cwd=root, check=True)
            for deb in root.glob(f"{name}_*.deb"):
                subprocess.run(["dpkg", "-x", str(deb), str(target)], check=True)


def read_page(path: Path) -> Iterator[str]:
    """HTML to text: no scripts, navigation or markup; blocks become lines."""
    text = path.read_text("utf-8", errors="replace")
    text = _BREAK.sub("\n", _BLOCK.sub(" ", text))
    text = html.unescape(_TAG.sub("", text)).replace("\u00b6", "").replace("\u00a0", " ")
    yield text


def read_plain(path: Path) -> Iterator[str]:
    yield path.read_text("utf-8", errors="replace")


def read_pod(path: Path) -> Iterator[str]:
    """Perl's POD: markup letters dropped, directives become plain headings."""
    text = path.read_text("utf-8", errors="replace")
    text = re.sub(r"(?m)^=(head\d|item|over|back|cut|pod|encoding|for|begin|end)\b[ \t]*", "", text)
    for _ in range(2):
        text = re.sub(r"\b[BCFILSXZ]<+\s?([^<>]*?)\s?>+", r"\1", text)
    yield text.replace("E<gt>", ">").replace("E<lt>", "<")


def read_roff(path: Path) -> Iterator[str]:
    """A manual page: requests dropped (headings kept), paragraphs re-joined by the cleaner."""
    lines = []
    for line in gzip.open(path, "rt", encoding="utf-8", errors="replace").read().splitlines():
        if line.startswith((".\\\"", "'\\\"", ".so", ".TH", ".ie", ".el", ".if", ".de", ".\"", "'")):
            continue
        if line.startswith((".SH", ".SS")):
            lines += ["", line[3:].strip().strip('"'), ""]
        elif re.match(r"\.[BIR]{1,2} ", line) or line.startswith((".SM ", ".BR ")):
            parts = re.findall(r'"([^"]*)"|(\S+)', line.split(" ", 1)[1])
            joined = [a or b for a, b in parts]
            lines.append((" " if line[1:3].strip() in {"B", "I"} else "").join(joined))
        elif line.startswith(("." "PP", ".P", ".TP", ".LP", ".IP")):
            lines.append("")
        elif not line.startswith("."):
            lines.append(line)
    text = _ROFF_FONT.sub("", "\n".join(lines))
    text = text.replace("\\-", "-").replace("\\(aq", "'").replace("\\(bu", "*").replace("\\e", "\\")
    text = re.sub(r"\\\((?:lq|rq|dq)|\\\*\((?:lq|rq|Tm)", '"', text)
    yield re.sub(r"(?<=\S)\n(?=\S)", " ", text)


def read_dictionary(path: Path) -> Iterator[str]:
    """A dictd dictionary, in documents of about forty entries."""
    text = gzip.open(path, "rt", encoding="utf-8", errors="replace").read()
    text = re.sub(r"\{([^{}]*)\}", lambda m: " ".join(m.group(1).split()), text)
    text = re.sub(r" *\[syn:[^\]]*\]| *\[(?:ant|also):[^\]]*\]", "", text)
    entries = re.split(r"\n(?=\S)", text)
    for start in range(0, len(entries), 40):
        yield "\n".join(entries[start : start + 40])


def read_gcide(path: Path) -> Iterator[str]:
    """Webster 1913: pronunciations and source notes dropped, wrapped lines joined."""
    text = gzip.open(path, "rt", encoding="utf-8", errors="replace").read()
    text = re.sub(r"\s*\[(?:1913 Webster|PJC|Webster[^\]]*|WordNet[^\]]*|Century[^\]]*)[^\]]*\]", "", text)
    text = re.sub(r"\\[^\\\n]{1,60}\\", "", text)
    text = re.sub(r"\{([^{}]*)\}", lambda m: " ".join(m.group(1).split()), text)
    text = re.sub(r"(?<=\S)\n {3,}(?=[a-zA-Z\"'(\[])", " ", text)
    entries = re.split(r"\n(?=\S)", text)
    for start in range(0, len(entries), 30):
        yield "\n".join(entries[start : start + 30])


def read_wordnet(path: Path) -> Iterator[str]:
    """WordNet, one sense a line."""
    for document in read_dictionary(path):
        yield re.sub(r"(?<=\S)\n {6,}(?!\d+:)", " ", document)


def read_verses(path: Path) -> Iterator[str]:
    """The King James text, one document a chapter or so."""
    verses = [" ".join(v.split()) for v in path.read_text("utf-8").split("\n") if v.strip()]
    for start in range(0, len(verses), 30):
        yield "\n".join(verses[start : start + 30])


READERS: dict[str, Callable[[Path], Iterator[str]]] = {
    "page": read_page, "plain": read_plain, "pod": read_pod, "roff": read_roff,
    "dictionary": read_dictionary, "wordnet": read_wordnet, "gcide": read_gcide, "verses": read_verses,
}


# readers whose pages repeat navigation and licence lines
MARKUP = frozenset({"page", "roff", "pod", "plain"})


def tidy(text: str, seen: set[int] | None) -> str:
    """Normalise white space, drop lines without words and (given `seen`) lines of earlier documents."""
    kept: list[str] = []
    for raw in text.replace("\r", "").replace("\t", "    ").replace("\x00", "").split("\n"):
        line = raw.rstrip()
        body = line.strip()
        letters = len(_SENTENCE_LETTERS.findall(body))
        if body and letters * 2 < len(body):
            continue
        if seen is not None and len(body) > 24:
            key = hash(body)
            if key in seen:
                continue
            seen.add(key)
        if not body and (not kept or not kept[-1]):
            continue
        indent = min((len(line) - len(line.lstrip())) // 2 * 2, 8)
        kept.append(" " * indent + body)
    return "\n".join(kept).strip()


def definitions(wordnet: Path, corpus: str, limit: int = 2500) -> list[tuple[str, str, str]]:
    """(word, part of speech, definition) of the corpus' most frequent plain words, first sense each."""
    text = gzip.open(wordnet, "rt", encoding="utf-8", errors="replace").read()
    counts = Counter(re.findall(r"\b[a-z]{3,}\b", corpus))
    found: list[tuple[str, str, str]] = []
    for match in re.finditer(r"\n([a-z]{3,})\n {4}(n|v|adj) 1: ((?:.*)(?:\n {8,}\S.*)*)", text):
        word, part, body = match.group(1), match.group(2), " ".join(match.group(3).split())
        body = re.split(r'[;"\[]| \(', body)[0].strip()
        if 15 <= len(body) <= 80 and counts[word] >= 20 and not body.startswith(("(", "of or relating")):
            found.append((word, part, body))
    found.sort(key=lambda item: -counts[item[0]])
    return found[120 : 120 + limit]  # the most frequent ones ("are", "can") are function words first


def clean(root: Path, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    bible = root / "bible-kjv"
    if not (bible / "bible.txt").exists():
        tool = bible / "usr/bin/bible"
        data = bible / "usr/lib"
        text = subprocess.run([str(tool), "-p", str(data), "-f", "gen1:1-rev22:21"], capture_output=True, text=True)
        (bible / "bible.txt").write_text(text.stdout)
    seen: set[int] = set()
    documents: list[str] = []
    report: list[str] = []
    for source in SOURCES:
        size = 0
        paths = sorted(p for p in (root / source.package).glob(source.pattern) if p.is_file() and not p.is_symlink())
        random.Random(source.package).shuffle(paths)
        for path in paths:
            if size > source.limit_mb * 1e6:
                break
            for raw in READERS[source.reader](path):
                text = tidy(raw, seen if source.reader in MARKUP else None)
                if len(text) > 400:
                    documents.append(text)
                    size += len(text)
        report.append(f"{source.package}\t{source.licence}\t{size}")
        print(report[-1], flush=True)
    random.Random(1).shuffle(documents)
    corpus = "\0".join(documents)
    (out / "corpus.txt").write_text(corpus)
    (out / "sources.tsv").write_text("\n".join(report) + "\n")
    wordnet = next((root / "dict-wn").glob("**/wn.dict.dz"))
    rows = definitions(wordnet, corpus)
    (out / "definitions.tsv").write_text("".join("\t".join(row) + "\n" for row in rows))
    print(f"{len(documents)} documents, {len(corpus) / 1e6:.1f} MB, {len(rows)} definitions")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    get = commands.add_parser("fetch")
    get.add_argument("root", type=Path)
    make = commands.add_parser("clean")
    make.add_argument("root", type=Path)
    make.add_argument("out", type=Path)
    args = parser.parse_args()
    if args.command == "fetch":
        fetch(args.root)
    else:
        clean(args.root, args.out)


if __name__ == "__main__":
    main()
