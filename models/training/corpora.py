"""Plain text to train on: the King James Bible and the Jargon File, both free of copyright.

Training reads two plain ASCII files, `kjv.txt` and `jargon.txt`, from one folder. Debian carries both texts:

    apt-get install bible-kjv dict-jargon
    python -m models.training.corpora --out .data

`kjv.txt` has one verse a line ("Ge1:1 In the beginning ..."), as the reader `bible -f` prints it. `jargon.txt` is the
lexicon of the dictionary without its database header. Any two text files with these names do as well.
"""

import argparse
import dataclasses
import gzip
import importlib.resources
import pathlib
import subprocess
import unicodedata

import numpy as np

HELD_OUT = {"kjv": 0.04, "jargon": 0.06}
"""Share of each text, at its end, that training never sees."""

JARGON_DICTIONARY = pathlib.Path("/usr/share/dictd/jargon.dict.dz")

_ASCII = str.maketrans(
    {
        "“": '"',
        "”": '"',
        "‘": "'",
        "’": "'",
        "´": "'",
        "·": ".",
        "—": "--",
        "−": "-",
        "×": "x",
        "™": "(TM)",
        "Ø": "0",
        "→": "->",
        "←": "<-",
        "ß": "ss",
        "æ": "ae",
        "\u00ad": "",
        "─": "-",
        "│": "|",
        **dict.fromkeys("├┼┤┌┬┐└┴┘□", "+"),
    }
)


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
    """One text as bytes, cut into the part to train on and the part held out."""

    train: np.ndarray  # u8[bytes]
    held_out: np.ndarray  # u8[bytes]


def to_ascii(text: str) -> str:
    """Plain ASCII with Unix line ends: stand-ins for typographic signs, accents dropped, the rest as "?"."""
    plain = unicodedata.normalize("NFKD", text.translate(_ASCII).replace("\r\n", "\n"))
    plain = "".join(sign for sign in plain if not unicodedata.combining(sign))
    return plain.encode("ascii", "replace").decode()


def split(text: bytes, held_out: float) -> Corpus:
    """Cut off the last `held_out` share of a text, at the next line end."""
    cut = int(len(text) * (1 - held_out))
    cut = text.find(b"\n", cut) + 1 or cut
    data = np.frombuffer(text, np.uint8)
    return Corpus(data[:cut], data[cut:])


def load(folder: str | pathlib.Path) -> dict[str, Corpus]:
    """Read `kjv.txt` and `jargon.txt` from a folder.

    Raises FileNotFoundError that says how to make a missing file.
    """
    corpora = {}
    for name, share in HELD_OUT.items():
        path = pathlib.Path(folder) / f"{name}.txt"
        if not path.is_file():
            raise FileNotFoundError(
                f"{path} is missing. On Debian: apt-get install bible-kjv dict-jargon, "
                f"then python -m models.training.corpora --out {folder}"
            )
        corpora[name] = split(path.read_bytes(), share)
    return corpora


def excerpt() -> np.ndarray:
    """The first 16 kB of the held-out KJV, u8[bytes]: text that every installation has, never trained on."""
    resource = importlib.resources.files("models") / "pretrained" / "ouro_tiny" / "excerpt.txt"
    return np.frombuffer(resource.read_bytes(), np.uint8)


def read_kjv(command: str = "bible") -> str:
    """The whole King James Bible from the reader of the Debian package `bible-kjv`, one verse a line.

    Raises FileNotFoundError where the reader is not installed, and CalledProcessError where it fails.
    """
    try:
        verses = subprocess.run([command, "-f", "Gen1:1-Rev22:21"], capture_output=True, check=True, text=True)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{command!r} is not installed. On Debian: apt-get install bible-kjv") from error
    return to_ascii(verses.stdout)


def read_jargon(path: str | pathlib.Path = JARGON_DICTIONARY) -> str:
    """The lexicon of the Jargon File from the dictionary of the Debian package `dict-jargon` (gzip or plain).

    Raises FileNotFoundError where there is no such file, and UnicodeDecodeError where it is not UTF-8.
    """
    path = pathlib.Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing. On Debian: apt-get install dict-jargon")
    data = path.read_bytes()
    text = (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode("utf-8")
    start = max(text.find("\n(TM)\n"), 0)  # the first entry; what stands before describes the database
    text, _, alphabet = text[start:].strip("\n").rpartition("\n\n")  # the last paragraph is the database's alphabet
    return to_ascii(text or alphabet).strip("\n") + "\n"


def main(arguments: list[str] | None = None) -> None:
    """Write both files; the entry of `python -m models.training.corpora`."""
    parser = argparse.ArgumentParser(prog="python -m models.training.corpora", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(".data"), help="folder to write to")
    parser.add_argument("--reader", default="bible", help="the program of the Debian package bible-kjv")
    parser.add_argument("--dictionary", type=pathlib.Path, default=JARGON_DICTIONARY, help="the file of dict-jargon")
    options = parser.parse_args(arguments)
    texts = {"kjv": read_kjv(options.reader), "jargon": read_jargon(options.dictionary)}
    options.out.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        path = options.out / f"{name}.txt"
        path.write_bytes(text.encode("ascii"))
        print(f"{path}: {len(text):,} bytes")


if __name__ == "__main__":
    main()
