import pytest
import tokenizers

from models.tokenizers import ByteTokenizer, SubwordTokenizer, for_folder

TEXT = "In the beginning, naïve 🙂 τέλος\n"


@pytest.fixture(scope="module")
def hub_folder(tmp_path_factory):
    """A byte-level BPE with the special ids of Ouro, trained on one line."""
    fast = tokenizers.Tokenizer(tokenizers.models.BPE())
    fast.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=290,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    fast.train_from_iterator([TEXT] * 20, trainer)
    folder = tmp_path_factory.mktemp("hub")
    fast.save(str(folder / "tokenizer.json"))
    return folder


def test_bytes_round_trip_after_a_beginning():
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(TEXT)
    assert ids[0] == 256
    assert ids[1:] == list(TEXT.encode())
    assert tokenizer.encode("ab", bos=False) == [97, 98]
    assert tokenizer.encode(b"\xff", bos=False) == [255]
    assert tokenizer.decode([*ids, 257, 263]) == TEXT
    assert tokenizer.vocab_size == 264


def test_bytes_that_are_not_utf8_come_through():
    tokenizer = ByteTokenizer()
    assert tokenizer.encode(b"a\xffb".decode("utf-8", "surrogateescape"), bos=False) == [97, 255, 98]
    assert tokenizer.decode([97, 255, 98]) == "a\ufffdb"


def test_byte_stream_never_cuts_a_character():
    tokenizer = ByteTokenizer()
    stream = tokenizer.stream()
    pieces = [stream.push([token]) for token in tokenizer.encode(TEXT)]
    assert "".join(pieces) + stream.finish() == TEXT
    assert all("\ufffd" not in piece for piece in pieces)
    stream = tokenizer.stream()
    assert stream.push("é".encode()[:1]) == ""
    assert stream.finish() == "\ufffd"


def test_subword_tokenizer_round_trip_and_special_ids(hub_folder):
    tokenizer = SubwordTokenizer.from_file(hub_folder / "tokenizer.json")
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert tokenizer.encode("<|im_start|>")[0] == 1
    assert tokenizer.decode([0, 1, 2]) == ""


def test_subword_stream_never_cuts_a_character(hub_folder):
    tokenizer = SubwordTokenizer.from_file(hub_folder / "tokenizer.json")
    stream = tokenizer.stream()
    ids = tokenizer.encode(TEXT + "🙃 ß 漢")
    pieces = [stream.push([token]) for token in ids]
    assert "".join(pieces) + stream.finish() == TEXT + "🙃 ß 漢"
    assert all("\ufffd" not in piece for piece in pieces)


def test_folder_decides_the_tokenizer(hub_folder, tmp_path):
    assert isinstance(for_folder(hub_folder), SubwordTokenizer)
    assert isinstance(for_folder(tmp_path), ByteTokenizer)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="no tokenizer at"):
        SubwordTokenizer.from_file(tmp_path / "tokenizer.json")


def test_subword_bytes_that_are_not_utf8_become_replacement_characters(hub_folder):
    tokenizer = SubwordTokenizer.from_file(hub_folder / "tokenizer.json")
    text = b"a\xffb".decode("utf-8", "surrogateescape")
    assert tokenizer.decode(tokenizer.encode(text)) == "a\ufffdb"
