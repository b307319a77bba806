import pytest

from danlu.train.ranks import lost_a_peer


@pytest.mark.parametrize(
    "text",
    [
        "[pair.cc:537] Read error [127.0.0.1]:15077: Connection reset by peer.",
        "Timed out waiting 30000ms for recv operation to complete",
        "Broken pipe",
    ],
)
def test_what_a_rank_says_whose_peer_has_died_is_known(text):
    assert lost_a_peer(RuntimeError(text))


def test_an_error_of_its_own_is_no_lost_peer():
    assert not lost_a_peer(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
