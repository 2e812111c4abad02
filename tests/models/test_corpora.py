"""Corpora: ASCII, splits, and the two readers on small stand-ins for the installed packages."""

import gzip
import stat

import pytest

from models.training import corpora


def test_to_ascii_has_stand_ins_and_is_idempotent():
    assert corpora.to_ascii("“naïve” — café\r\n×→ß☃") == '"naive" -- cafe\nx->ss?'
    once = corpora.to_ascii("─│┼ ’n’ ™")
    assert corpora.to_ascii(once) == once == "-|+ 'n' (TM)"


def test_split_cuts_at_a_line_end_and_loses_nothing():
    lines = b"".join(b"line %d of a text\n" % i for i in range(100))
    corpus = corpora.split(lines, 0.06)
    assert corpus.train.tobytes() + corpus.held_out.tobytes() == lines
    assert corpus.train.tobytes().endswith(b"\n")
    assert 0.04 < len(corpus.held_out) / len(lines) <= 0.06


def test_split_of_one_long_line():
    corpus = corpora.split(b"x" * 100, 0.04)
    assert (len(corpus.train), len(corpus.held_out)) == (96, 4)


def test_command_writes_what_load_reads(tmp_path):
    reader = tmp_path / "bible"
    reader.write_text('#!/bin/sh\nprintf "Ge1:1 In the beginning\\nGe1:2 And the earth\\n"\n')
    reader.chmod(reader.stat().st_mode | stat.S_IXUSR)
    dictionary = tmp_path / "jargon.dict.dz"
    entries = "about the database\n\n(TM)\n //\n\n    Said of ‘signs’.\n\nack\n\n    A noise.\n\n !$&'()abc~\n"
    dictionary.write_bytes(gzip.compress(entries.encode()))
    folder = tmp_path / "data"
    corpora.main(["--out", str(folder), "--reader", str(reader), "--dictionary", str(dictionary)])
    assert (folder / "kjv.txt").read_text() == "Ge1:1 In the beginning\nGe1:2 And the earth\n"
    assert (folder / "jargon.txt").read_text() == "(TM)\n //\n\n    Said of 'signs'.\n\nack\n\n    A noise.\n"
    texts = corpora.load(folder)
    assert set(texts) == {"kjv", "jargon"}
    assert texts["kjv"].train.tobytes() + texts["kjv"].held_out.tobytes() == (folder / "kjv.txt").read_bytes()


def test_what_is_missing_is_named_with_its_remedy(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"kjv\.txt.*apt-get install bible-kjv"):
        corpora.load(tmp_path)
    with pytest.raises(FileNotFoundError, match="apt-get install bible-kjv"):
        corpora.read_kjv(str(tmp_path / "no-such-reader"))
    with pytest.raises(FileNotFoundError, match="apt-get install dict-jargon"):
        corpora.read_jargon(tmp_path / "no-such-dictionary")


def test_excerpt_comes_with_the_package():
    data = corpora.excerpt().tobytes()
    assert 15_000 < len(data) <= 16_384
    assert data.decode("ascii").startswith("2Tim2:16 ")
