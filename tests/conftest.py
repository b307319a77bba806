import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session", autouse=True)
def _own_home(tmp_path_factory):
    """Nothing that a test remembers (kernels, text, measured rates) reaches the user's folder."""
    if "DANLU_TEST_HOME" not in os.environ:
        os.environ["DANLU_HOME"] = str(tmp_path_factory.getbasetemp().parent / "danlu-home")
    else:
        os.environ["DANLU_HOME"] = os.environ["DANLU_TEST_HOME"]
