import pytest

from danlu.config.load import load
from danlu.train.planning import plan_run


@pytest.mark.parametrize("tied", [False, True])
def test_the_small_model_has_one_matrix_at_its_ends_where_the_plans_has(tied):
    from danlu.train.validate import _words, reduced

    words = ("train.steps=9", "pipeline_parallel.stages=2", f"model.tied_embeddings={tied}")
    plan = plan_run(load(None, *words), "1x8xh100")
    small = load(None, *_words(reduced(plan.layout, 4), plan))
    assert small.model.tied_embeddings is tied
