"""How single files are read: cut, decompressed, decoded, and refused with a reason."""

import gzip
import json
import os

import pytest
import zstandard

from danlu.base.errors import DataError, UserError
from danlu.config.data import SourceConfig
from danlu.data.source import Document, Reject, Source, build_sources
from danlu.data.sources import _bytes, _files
from danlu.data.sources.files import PART_BYTES


def source(path, **keys) -> Source:
    (built,) = build_sources([SourceConfig(path=str(path), **keys)])
    return built


def items(path, size=1 << 40, **keys) -> list[Document | Reject]:
    built = source(path, **keys)
    return [item for unit in built.units(size) for item in built.read_unit(unit)]


def names(path, **keys) -> list[str]:
    return [file.path for file in source(path, **keys).files()]


def compress(path, data: bytes) -> None:
    zstd = zstandard.ZstdCompressor(write_checksum=True)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else zstd.compress(data))


POEM = "".join(
    f"Stanza {i}: ünïcode and 漢字.\nSecond line.\n" + "\n" * (i % 3 == 0) for i in range(4000)
)


# Which files


def test_hidden_binary_and_danlus_own_files_are_not_text(tmp_path):
    for name in ("a.txt", ".hidden", ".git/config", "b.PNG", "c.tar.gz", "d.py.gz", "LICENSE"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / ".danlu").touch()
    (tmp_path / "corpus" / "manifest.json").write_text("{}")
    assert names(tmp_path) == ["LICENSE", "a.txt", "d.py.gz"]
    assert names(tmp_path, include=["*.PNG"]) == ["b.PNG"]


@pytest.mark.parametrize(
    ("pattern", "path", "matches"),
    [
        ("*.py", "a/b/c.py", True),
        ("*.py", "c.py.gz", True),
        ("*.py", "c.pyx", False),
        ("docs/*.md", "docs/a.md", True),
        ("docs/*.md", "x/docs/a.md", True),
        ("docs/*.md", "xdocs/a.md", False),
        ("tests", "x/tests/a/b.py", True),
        ("tests/", "tests/b.py", True),
        ("tests", "mytests/b.py", False),
        ("a[0-9].txt", "a1.txt", True),
        ("*.py", "line\nbreak.py", True),
    ],
)
def test_a_pattern_matches_at_any_depth_and_covers_a_folder(pattern, path, matches):
    assert _files.matcher((pattern,))(path) is matches


def test_exclude_wins_over_include(tmp_path):
    for name in ("a.py", "test_a.py", "notes.md"):
        (tmp_path / name).write_text("x")
    assert names(tmp_path, include="*.py", exclude="test_*") == ["a.py"]


def test_a_link_that_turns_in_a_circle_is_followed_once(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("x")
    (tmp_path / "in" / "up").symlink_to(tmp_path)
    (tmp_path / "other").symlink_to(tmp_path / "in")
    assert len(names(tmp_path)) == 1


def test_a_pipe_is_left_out_instead_of_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "a.txt").write_text("x")
    assert names(tmp_path) == ["a.txt"]
    with pytest.raises(DataError, match="not a file or folder"):
        names(tmp_path / "pipe.txt")


def test_a_file_name_that_is_not_unicode_is_read_and_shown(tmp_path):
    path = os.fsencode(tmp_path) + b"/caf\xe9.txt"
    with open(path, "wb") as file:
        file.write(b"\xff")
    (reject,) = items(tmp_path)
    assert isinstance(reject, Reject)
    assert reject.path == "caf\\xe9.txt"


def test_a_broken_link_is_rejected_with_a_reason(tmp_path):
    (tmp_path / "a.txt").symlink_to(tmp_path / "gone.txt")
    (reject,) = items(tmp_path)
    assert reject == Reject("a.txt", "it cannot be read (No such file or directory)")


@pytest.mark.parametrize(("kind", "name"), [("files", "a.txt"), ("jsonl", "a.jsonl")])
def test_a_link_to_itself_is_rejected_with_a_reason(tmp_path, kind, name):
    (tmp_path / name).symlink_to(name)
    (reject,) = items(tmp_path, type=kind)
    assert reject == Reject(name, "it cannot be read (Too many levels of symbolic links)")


def test_a_parquet_link_to_itself_or_to_nowhere_is_rejected_with_a_reason(tmp_path):
    pytest.importorskip("pyarrow")
    (tmp_path / "a.parquet").symlink_to("a.parquet")
    (tmp_path / "b.parquet").symlink_to("gone.parquet")
    assert items(tmp_path, type="parquet") == [
        Reject("a.parquet", "it cannot be read (Too many levels of symbolic links)"),
        Reject("b.parquet", "it cannot be read (No such file or directory)"),
    ]


# Text


def test_one_long_file_becomes_parts_that_end_at_paragraphs(tmp_path):
    (tmp_path / "poem.txt").write_text(POEM)
    parts = items(tmp_path / "poem.txt")
    assert "".join(part.text for part in parts) == POEM
    assert [part.last for part in parts] == [False] * (len(parts) - 1) + [True]
    assert all(PART_BYTES // 2 <= len(p.text.encode()) <= PART_BYTES for p in parts[:-1])
    assert all(part.text.endswith("\n\n") for part in parts[:-1])


@pytest.mark.parametrize("char", ["x", "ü", "漢", "😀"])
def test_a_file_without_lines_is_cut_between_characters(tmp_path, char):
    (tmp_path / "a.txt").write_text(char * 50_000)
    parts = items(tmp_path)
    assert len(parts) > 2
    assert "".join(part.text for part in parts) == char * 50_000


def test_many_files_stay_whole(tmp_path):
    for index in range(80):
        (tmp_path / f"{index}.txt").write_text(POEM[: 20_000 + index])
    assert len(items(tmp_path)) == 80


@pytest.mark.parametrize("size", [1024, 5000, 70_000])
def test_ranges_of_a_large_file_hold_all_of_it_and_end_it_once(tmp_path, size):
    for name, text in (("a", POEM), ("b", "x" * 9000), ("c", "x" * 9000 + "\n" + "y" * 9000)):
        path = tmp_path / name
        path.write_text(text)
        parts = items(path, size)
        assert "".join(part.text for part in parts) == text
        assert [part.last for part in parts] == [False] * (len(parts) - 1) + [True]


def test_a_range_inside_a_line_without_end_is_not_read_beyond_itself(tmp_path):
    path = tmp_path / "a"
    with open(path, "wb") as file:
        file.truncate(1 << 40)  # a terabyte of zeros that takes no space
    begin, end, _ = _bytes.line_range(path, 1 << 30, (1 << 30) + 4096)
    assert begin == end


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_compressed_file_is_read_as_what_it_holds(tmp_path, suffix):
    (tmp_path / "a.txt").write_text(POEM)
    plain = items(tmp_path / "a.txt")
    compress(tmp_path / f"a.txt{suffix}", POEM.encode())
    packed = items(tmp_path / f"a.txt{suffix}")
    assert [(p.text, p.last) for p in packed] == [(p.text, p.last) for p in plain]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_compressed_files_of_several_members_and_of_none_are_read(tmp_path, suffix):
    path = tmp_path / f"a{suffix}"
    compress(path, b"one ")
    one = path.read_bytes()
    compress(path, b"two")
    path.write_bytes(one + path.read_bytes())
    assert b"".join(_bytes.chunks(path)) == b"one two"
    path.write_bytes(b"")
    assert b"".join(_bytes.chunks(path)) == b""


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("damage", ["cut", "flipped", "foreign", "tail"])
def test_corrupt_compressed_data_is_one_clear_line(tmp_path, suffix, damage):
    path = tmp_path / f"a.txt{suffix}"
    compress(path, os.urandom(50_000).hex().encode())
    data = path.read_bytes()
    flipped = data[:9000] + bytes([data[9000] ^ 255]) * 40 + data[9040:]
    broken = {"cut": data[:-20], "flipped": flipped, "foreign": b"plain text", "tail": data + b"x"}
    path.write_bytes(broken[damage])
    with pytest.raises(DataError, match="corrupt or cut off") as caught:
        items(tmp_path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ("naïve".encode("latin-1"), "it is not UTF-8 (byte 0xef at 2)"),
        ("text".encode("utf-16"), "it is not UTF-8 (it looks like UTF-16)"),
        (b"MZ\x00\x01", "it is not text (a zero byte at 2)"),
        (b"cut in a character \xe6\xbc", "it is not UTF-8 (byte 0xe6 at 19)"),
    ],
)
def test_a_file_that_is_not_text_is_rejected_with_a_reason(tmp_path, data, reason):
    (tmp_path / "a").write_bytes(data)
    assert items(tmp_path) == [Reject("a", reason)]


def test_a_long_file_with_one_bad_byte_is_rejected_whole(tmp_path):
    (tmp_path / "a.txt").write_bytes(POEM.encode() + b"\xff")
    (reject,) = items(tmp_path)
    assert isinstance(reject, Reject)


def test_of_a_file_too_large_to_hold_what_follows_the_bad_part_is_rejected(tmp_path):
    compress(tmp_path / "a.txt.gz", POEM[:60_000].encode() + b"\xff" + POEM.encode())
    *parts, reject = items(tmp_path)
    assert parts
    assert all(isinstance(part, Document) for part in parts)
    assert POEM.startswith("".join(part.text for part in parts))
    assert isinstance(reject, Reject)
    assert "a.txt.gz from byte" in reject.path


def test_a_byte_order_mark_is_not_part_of_the_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbftext")
    assert items(tmp_path) == [Document("text", "a.txt")]


# JSON lines


def lines(path, *values: object, raw: bytes = b"") -> None:
    path.write_bytes(b"".join(json.dumps(v).encode() + b"\n" for v in values) + raw)


def test_each_bad_line_is_rejected_by_its_number(tmp_path):
    path = tmp_path / "a.jsonl"
    good = {"text": "good"}
    lines(path, good, [1], {"body": "x"}, {"text": 5}, good)
    path.write_bytes(path.read_bytes() + b'{"text": "\xff"}\n{"text"\n\n{"text": "\\ud800"}')
    found = items(path, type="jsonl")
    assert [item.text for item in found if isinstance(item, Document)] == ["good", "good"]
    rejects = {item.path: item.reason for item in found if isinstance(item, Reject)}
    assert rejects["a.jsonl:2"] == "it is not an object with fields but a list"
    assert rejects["a.jsonl:3"] == "there is no field 'text' (fields: body)"
    assert rejects["a.jsonl:4"] == "field 'text' is not text but a number"
    assert rejects["a.jsonl:6"].startswith("it is not UTF-8")
    assert rejects["a.jsonl:7"].startswith("it is not JSON")
    assert rejects["a.jsonl:9"].startswith("field 'text' holds half a character")
    assert len(rejects) == 6


@pytest.mark.parametrize("size", [1, 10, 50])
def test_bad_lines_have_the_same_numbers_however_the_file_is_cut(tmp_path, size):
    path = tmp_path / "a.jsonl"
    lines(path, *([{"text": "good"}, 7] * 10))
    found = items(path, size, type="jsonl")
    assert [i.path for i in found if isinstance(i, Reject)] == [
        f"a.jsonl:{n}" for n in range(2, 21, 2)
    ]


def test_a_null_text_is_an_empty_document(tmp_path):
    lines(tmp_path / "a.jsonl", {"text": None}, {"text": ""})
    assert items(tmp_path, type="jsonl") == [Document("", "a.jsonl")] * 2


def test_nesting_that_would_exhaust_the_stack_is_a_bad_line(tmp_path):
    lines(tmp_path / "a.jsonl", raw=b'{"text": ' + b"[" * 200_000 + b"\n" + b'{"text": "x"}')
    reject, good = items(tmp_path, type="jsonl")
    assert isinstance(reject, Reject)
    assert good == Document("x", "a.jsonl")


def test_a_line_longer_than_the_limit_is_passed_over():
    pieces = [b"ab\ncd", b"ef", b"gh\n", b"i", b"j\nklmnopq"]
    assert list(_bytes.lines(iter(pieces), 4)) == [b"ab", None, b"ij", None]
    assert list(_bytes.lines(iter([b"a\n", b"\n"]), 4)) == [b"a", b""]
    assert list(_bytes.lines(iter([]), 4)) == []


def test_windows_line_ends_and_a_byte_order_mark_are_no_problem(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n{"text": "b"}\r\n\r\n')
    assert [item.text for item in items(tmp_path, type="jsonl")] == ["a", "b"]


# Parquet


def table(path, **columns: object) -> None:
    arrow, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(arrow.table(columns), path, row_group_size=3)


@pytest.mark.parametrize("kind", ["string", "large_string", "binary", "dictionary"])
def test_any_kind_of_text_column_is_read(tmp_path, kind):
    pa = pytest.importorskip("pyarrow")
    types = {"string": pa.string(), "large_string": pa.large_string(), "binary": pa.binary()}
    column = pa.array(["a", None, "ü", "b"], pa.string())
    column = column.dictionary_encode() if kind == "dictionary" else column.cast(types[kind])
    table(tmp_path / "a.parquet", text=column, other=pa.array([1, 2, 3, 4]))
    assert [item.text for item in items(tmp_path, type="parquet")] == ["a", "", "ü", "b"]


def test_a_row_that_is_not_utf8_is_rejected_by_its_number(tmp_path):
    pa = pytest.importorskip("pyarrow")
    table(tmp_path / "a.parquet", text=pa.array([b"a", b"b", b"c", b"\xff", b"e"], pa.binary()))
    rejects = [i for i in items(tmp_path, 1, type="parquet") if isinstance(i, Reject)]
    assert rejects == [Reject("a.parquet:4", "it is not UTF-8 (byte 0xff at 0)")]


@pytest.mark.parametrize("damage", ["cut", "foreign", "empty", "pages"])
def test_a_corrupt_parquet_file_is_one_clear_line(tmp_path, damage):
    path = tmp_path / "a.parquet"
    table(path, text=[os.urandom(3000).hex() for _ in range(9)])
    data = path.read_bytes()
    pages = data[:4] + os.urandom(len(data) // 2) + data[4 + len(data) // 2 :]
    broken = {"cut": data[:-200], "foreign": b"x" * 500, "empty": b"", "pages": pages}
    path.write_bytes(broken[damage])
    with pytest.raises(DataError, match="corrupt or cut off") as caught:
        items(tmp_path, type="parquet")
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_column_that_is_missing_or_no_text_is_one_clear_line(tmp_path):
    table(tmp_path / "a.parquet", body=["x"], number=[1])
    with pytest.raises(UserError, match=r"'text' does not exist .* columns of text: body"):
        items(tmp_path, type="parquet")
    with pytest.raises(UserError, match="'number' is not text"):
        items(tmp_path, type="parquet", text_field="number")


# The standard library


def test_python_stdlib_is_ten_megabytes_of_modules_without_installed_packages():
    (built,) = build_sources([SourceConfig(type="python_stdlib")])
    files = built.files()
    assert 400 < len(files) < 1500
    assert 8e6 < sum(file.size for file in files) < 25e6
    folders = {part for file in files for part in file.path.split("/")[:-1]}
    assert not folders & {"site-packages", "test", "tests", "idlelib", "lib2to3"}
    assert built.name == "python_stdlib"
