"""Readers of folders and JSON lines, the vocabulary of bytes, and tokenized examples."""

import json
import re
from itertools import islice

import pytest

from longspan.train.byte_level import ByteVocabulary
from longspan.train.sources import Example, Fields, read_examples, standard_library
from longspan.train.tokenizing import tokenized
from tests.cli.checkpoints import words


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_a_folder_is_read_in_order_with_subfolders_as_labels(tmp_path):
    for name, text in (("b/2.txt", "two"), ("b/1.txt", "one"), ("a/deep/x", "x"), (".git/c", "no"), ("b/.d", "no")):
        write(tmp_path / name, text)
    found = [(example.texts["text"], example.label) for example in read_examples(tmp_path)]
    assert found == [("x", "a"), ("one", "b"), ("two", "b")]


def test_files_of_windows_are_read_without_their_byte_order_mark(tmp_path):
    mark = b"\xef\xbb\xbf"
    write(tmp_path / "a.jsonl", mark + b'{"text": "one", "label": "x"}\r\n{"text": "two\\r\\n", "label": "y"}\r\n')
    write(tmp_path / "b.txt", mark + "é\r\n".encode())
    assert [(e.texts["text"], e.label) for e in read_examples(tmp_path)] == [
        ("one", "x"),
        ("two\r\n", "y"),
        ("é\r\n", None),
    ]


def test_json_lines_have_texts_labels_or_pairs(tmp_path):
    lines = [dict(body="é", kind=3), dict(body="b", kind="x", other=1)]
    file = write(tmp_path / "a.jsonl", "\n\n".join(map(json.dumps, lines)))
    fields = Fields("body", "kind")
    assert [(e.place, e.texts["text"], e.label) for e in read_examples(file, fields)] == [
        (f"{file}, line 1", "é", "3"),
        (f"{file}, line 3", "b", "x"),
    ]
    pairs = write(tmp_path / "pairs.jsonl", '{"anchor": "a", "positive": "p", "negative": "n"}\n')
    assert next(read_examples(pairs, pairs=True)).texts == dict(anchor="a", positive="p", negative="n")


@pytest.mark.parametrize(
    ("text", "pairs", "message"),
    [
        ('{"text": "a"}\n{"text": "b"', False, "line 2 is not JSON ("),
        ('{"text": "a"}\n[1]', False, "line 2 must be a JSON object, got '[1]'."),
        ("[" * 99999, False, "line 1 is not JSON ("),
        (
            '{"body": "a"}',
            False,
            "line 1 has no field 'text', only 'body'. Name the field of the text with --text-field.",
        ),
        ('{"text": 3}', False, "line 1: 'text' must be a string, got '3'."),
        ('{"text": "a", "label": null}', False, "line 1: 'label' must be a string or an int, got 'None'."),
        ('{"text": "a", "label": [1]}', False, "line 1: 'label' must be a string or an int, got '[1]'."),
        (r'{"text": "a \ud800"}', False, r"line 1: 'text' is not valid Unicode, at character 2: '\ud800'."),
        (r'{"text": "a", "label": "\udfff"}', False, "line 1: 'label' is not valid Unicode, at character 0"),
        ('{"anchor": "a"}', True, "line 1 has no field 'positive', only 'anchor'."),
        (b'{"text": "\xff"}', False, "line 1 is not JSON ("),
        ("\n \n", False, "has no documents. Give a folder with text files, or a file with JSON lines."),
    ],
)
def test_broken_json_lines_are_named_by_their_number(tmp_path, text, pairs, message):
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        list(read_examples(write(tmp_path / "a.jsonl", text), pairs=pairs))
    assert "\n" not in str(raised.value)


def test_broken_folders(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere does not exist. Give a folder of text files"):
        list(read_examples(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty has no documents"):
        list(read_examples(tmp_path / "empty"))
    write(tmp_path / "folder" / "a.txt", b"abc\xff")
    with pytest.raises(ValueError, match=re.escape("a.txt is not UTF-8 text, at byte 3. Remove it")):
        list(read_examples(tmp_path / "folder"))
    with pytest.raises(ValueError, match=re.escape("a.txt is a text file, but pairs are read from JSON lines")):
        list(read_examples(tmp_path / "folder", pairs=True))


def test_the_standard_library_is_text_without_tests():
    found = list(islice(standard_library(), 5))
    assert len({example.place for example in found}) == 5 and any(example.texts["text"] for example in found)
    assert not any("/test/" in example.place for example in found)


@pytest.mark.parametrize("is_encoder", [False, True])
def test_the_vocabulary_of_bytes_has_every_byte(is_encoder):
    vocabulary = ByteVocabulary.of(is_encoder, None)
    tokenizer = vocabulary.tokenizer()
    text = "".join(map(chr, range(300))) + "\U0001f600 ab  c"
    ids = tokenizer.encode(text).ids
    own = ids[1:-1] if is_encoder else ids
    assert bytes(own).decode() == text == tokenizer.decode(ids)
    assert tokenizer.get_vocab_size() == vocabulary.size == 257 + 3 * is_encoder
    assert tokenizer.encode("".join(vocabulary.special), add_special_tokens=False).ids == list(
        range(256, vocabulary.size)
    )
    if is_encoder:
        assert (ids[0], ids[-1]) == (257, 258)


def test_a_vocabulary_that_is_too_small_is_refused():
    assert ByteVocabulary.of(False, 256).special == ()
    with pytest.raises(ValueError, match=re.escape("vocab_size=255, but the vocabulary of bytes has 257 tokens")):
        ByteVocabulary.of(False, 255)
    with pytest.raises(
        ValueError, match=re.escape("260 tokens: 256 bytes, [PAD], [CLS], [SEP], [MASK]. Set vocab_size")
    ):
        ByteVocabulary.of(True, 256)


def sentences(*texts, label=None):
    return [Example(f"file {number}", dict(text=text), label) for number, text in enumerate(texts)]


def test_long_texts_are_an_error_that_names_the_options():
    message = (
        "file 1 has 7 tokens, but a text may have at most 5 (--length, and the model's limit). Use it in parts "
        "with --split, or only its beginning with --truncate."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        tokenized(words(), sentences("w1", "w1 w2 w3 w4 w5"), length=5)
    pair = [Example("file 3", dict(anchor="w1", positive="w1 w2 w3 w4 w5"))]
    with pytest.raises(ValueError, match=re.escape("Use only its beginning with --truncate.")):
        tokenized(words(), pair, length=5)
    with pytest.raises(ValueError, match=re.escape("None is left for text. Give a larger --length.")):
        tokenized(words(), sentences("w1"), length=2, too_long="split")


def test_long_texts_are_split_truncated_or_kept_whole():
    def rows(too_long, **options):
        found = tokenized(words(), sentences("w1", "w1 w2 w3 w4 w5", label="x"), length=5, too_long=too_long, **options)
        documents = found.texts["text"]
        return [documents.row(index).tolist() for index in range(documents.count)], found

    parts, found = rows("split")
    assert parts == [[2, 5, 3], [2, 5, 6, 7, 3], [2, 8, 9, 3]] and found.labels == ["x"] * 3 and found.long == 1
    assert rows("truncate")[0] == [[2, 5, 3], [2, 5, 6, 7, 3]]
    assert rows("pieces", end=4)[0] == [[2, 5, 3, 4], [2, 5, 6, 7, 8, 9, 3, 4]]
    assert rows("truncate", end=4)[0] == [[2, 5, 3, 4], [2, 5, 6, 3, 4]]


def test_examples_are_tokenized_in_groups_and_empty_ones_left_out(monkeypatch):
    monkeypatch.setattr("longspan.train.tokenizing.GROUP_CHARACTERS", 4)
    found = tokenized(words(), sentences("w1", " ", "w2 w3", "w4"), length=9)
    assert found.texts["text"].lengths.tolist() == [3, 4, 3] and (found.empty, found.unlabelled) == (1, "file 0")
    mixed = [
        Example("a", dict(anchor="w1", positive="w2")),
        Example("b", dict(anchor="w1", positive="w2", negative="w3")),
    ]
    with pytest.raises(
        ValueError, match=r"b has anchor, positive, negative, but earlier examples have anchor, positive."
    ):
        tokenized(words(), mixed, length=9)
