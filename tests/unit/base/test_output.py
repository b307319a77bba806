"""Output into pipes that nobody reads any more, and encodings without the character."""

import subprocess
import sys

import pytest

PRINT = (
    "import sys\n"
    "from danlu.base.output import guard_output\n"
    "guard_output(outlive_reader={outlive})\n"
    "for _ in range(3):\n"
    "    print('x' * 100_000)\n"
    "    sys.stdout.flush()\n"
    "sys.exit(7)\n"
)


@pytest.mark.parametrize(("outlive", "code"), [(True, 7), (False, 0)])
def test_a_reader_that_leaves_harms_nobody(outlive, code):
    process = subprocess.Popen(
        [sys.executable, "-c", PRINT.format(outlive=outlive)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    process.stdout.read(1)
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert process.wait(60) == code
    assert errors == ""


def test_a_character_that_the_encoding_lacks_is_a_question_mark():
    code = (
        "import sys\n"
        "from danlu.base.output import guard_output\n"
        "guard_output(outlive_reader=True)\n"
        "print('a→\\udcff')\n"
        "print('b→', file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        env={"PYTHONIOENCODING": "ascii", "PYTHONPATH": ":".join(sys.path)},
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("a??\n", "b?\n")


def test_a_stream_that_is_closed_or_missing_stays_as_it_is():
    code = (
        "import sys\n"
        "from danlu.base.output import guard_output\n"
        "sys.stdout = None\n"
        "sys.stderr.close()\n"
        "guard_output(outlive_reader=True)\n"
        "assert sys.stdout is None\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
