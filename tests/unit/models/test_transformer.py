import math

import pytest
import torch
import torch.nn.functional as F

from danlu.base.facts import ModelShape
from danlu.config.load import load
from danlu.hardware.seed import generator
from danlu.kernels.dispatch import torch_ops
from danlu.models.describe import describe, flops_per_token
from danlu.models.generate import Sampling, generate
from danlu.models.transformer import PLACEMENTS, Positions, Transformer

SHAPE = ModelShape(64, 32, 2, 4, 2, 8, 48, 16, False, 10000.0, 1e-5)


def make(shape=SHAPE, dtype=torch.float32, part=None):
    model = Transformer(shape, torch_ops(), dtype, part)
    model.initialize(lambda name, w, s: w.normal_(0, s * 5, generator=generator(0, name)))
    return model


def plain_llama(weights, ids, shape=SHAPE):
    """The same model written out again, Hugging Face's way, in fp64."""
    w = {k: v.double() for k, v in weights.items()}

    def norm(x, weight):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + shape.norm_epsilon) * weight

    length, size = ids.shape[1], shape.head_size
    inverse = shape.rope_theta ** (-torch.arange(0, size, 2).double() / size)
    angle = torch.outer(torch.arange(length).double(), inverse)
    angle = torch.cat((angle, angle), -1)

    def rotate(x):
        half = torch.cat((-x[..., size // 2 :], x[..., : size // 2]), -1)
        return x * angle.cos() + half * angle.sin()

    x = w["embed_tokens.weight"][ids]
    for i in range(shape.layers):
        p = f"layers.{i}."
        h = norm(x, w[p + "input_layernorm.weight"])
        q, k, v = (h @ w[p + f"self_attn.{n}_proj.weight"].t() for n in "qkv")
        q, k, v = (t.view(*ids.shape, -1, size).transpose(1, 2) for t in (q, k, v))
        q, k = rotate(q), rotate(k)
        repeat = shape.heads // shape.kv_heads
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        score = q @ k.transpose(-1, -2) / math.sqrt(size)
        score = score.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
        out = (score.softmax(-1) @ v).transpose(1, 2).flatten(2)
        x = x + out @ w[p + "self_attn.o_proj.weight"].t()
        h = norm(x, w[p + "post_attention_layernorm.weight"])
        gate, up = (h @ w[p + f"mlp.{n}_proj.weight"].t() for n in ("gate", "up"))
        x = x + (F.silu(gate) * up) @ w[p + "mlp.down_proj.weight"].t()
    return norm(x, w["norm.weight"]) @ w["lm_head.weight"].t()


def test_the_loss_equals_a_plain_llama_s():
    model = make()
    ids = torch.randint(0, 64, (2, 16), generator=generator(1))
    targets = torch.randint(0, 64, (2, 16), generator=generator(2))
    logits = plain_llama(model.state_dict(), ids)
    wanted = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    assert model(ids, targets, None, 1 / 32).item() == pytest.approx(wanted.item(), rel=1e-6)


def test_parameter_names_are_one_renaming_away_from_hugging_face():
    names = {"model." + n if n != "lm_head.weight" else n for n, _ in make().named_parameters()}
    assert names == {
        "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight",
        *(f"model.layers.{i}.{part}.weight" for i in range(2) for part in (
            "input_layernorm", "post_attention_layernorm", "self_attn.q_proj", "self_attn.k_proj",
            "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
        )),
    }  # fmt: skip


def test_every_matrix_has_a_placement_and_every_placement_a_matrix():
    matrices = {n.removesuffix(".weight") for n, p in make().named_parameters() if p.dim() > 1}
    found = {key for key in PLACEMENTS for m in matrices if m.endswith(key)}
    assert found == set(PLACEMENTS)
    assert all(any(m.endswith(key) for key in PLACEMENTS) for m in matrices)


def test_a_token_sees_only_its_own_document_when_starts_are_given():
    model = make()
    ids = torch.randint(0, 64, (1, 16), generator=generator(3))
    starts = torch.tensor([[0] * 6 + [6] * 10], dtype=torch.int32)
    cosine, sine = model.cosine[:16], model.sine[:16]
    before = model.hidden(ids, Positions(1, cosine, sine, starts))
    changed = ids.clone()
    changed[0, :6] = (changed[0, :6] + 1) % 64
    after = model.hidden(changed, Positions(1, cosine, sine, starts))
    assert torch.equal(before[6:], after[6:])
    assert not torch.allclose(before[:6], after[:6])


def test_a_token_never_sees_a_later_one():
    model = make()
    ids = torch.randint(0, 64, (1, 16), generator=generator(3))
    positions = Positions(1, model.cosine[:16], model.sine[:16])
    before = model.hidden(ids, positions)
    changed = ids.clone()
    changed[0, 10:] = 0
    assert torch.equal(before[:10], model.hidden(changed, positions)[:10])


def test_tied_embeddings_are_one_matrix():
    tied = ModelShape(64, 32, 2, 4, 2, 8, 48, 16, True, 10000.0, 1e-5)
    model = make(tied)
    assert model.lm_head.weight is model.embed_tokens.weight
    assert sum(p.numel() for p in model.parameters()) == tied.parameters


def test_the_parts_of_a_model_with_one_matrix_keep_its_names_and_first_weights():
    tied = ModelShape(64, 32, 2, 4, 2, 8, 48, 16, True, 10000.0, 1e-5)
    whole = make(tied).state_dict()
    found = {}
    for number in (0, 1):
        part = make(tied, part=[number])
        assert (part.lm_head is None) == (number == 0)
        found |= part.state_dict()
        for name, weight in part.named_parameters():
            assert torch.equal(weight, whole[name]), name
    assert found.keys() == whole.keys()


@pytest.mark.parametrize("tied", [False, True])
def test_the_description_counts_what_the_model_has(tied):
    shape = ModelShape(64, 32, 2, 4, 2, 8, 48, 16, tied, 10000.0, 1e-5)
    assert sum(layer.parameters for layer in describe(shape)) == shape.parameters
    assert sum(p.numel() for p in make(shape).parameters()) == shape.parameters


def test_flops_a_token_are_the_field_s_six_times_weights_plus_attention():
    shape = load(None, "model.preset=30m").model.shape(8192)
    weights = shape.parameters - shape.vocab_size * shape.hidden_size
    norms = (2 * shape.layers + 1) * shape.hidden_size
    attention = 6 * shape.layers * shape.hidden_size * shape.sequence_length
    assert flops_per_token(shape) == 6 * (weights - norms) + attention


def test_first_weights_do_not_depend_on_order_or_layout():
    a, b = make(), make()
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        assert torch.equal(p, q), name


def test_the_cache_continues_exactly_as_a_full_pass_would():
    model = make().for_inference()
    prompt = [int(i) for i in torch.randint(1, 64, (5,), generator=generator(4))]
    made = list(generate(model, prompt, 8, end=0, sampling=Sampling(temperature=0)))
    window = list(prompt)
    for token in made:
        ids = torch.tensor([window])
        n = len(window)
        hidden = model.hidden(ids, Positions(1, model.cosine[:n], model.sine[:n]))
        assert int((hidden[-1:] @ model.lm_head.weight.t()).argmax()) == token
        window.append(token)
    assert len(made) == 8


def test_generation_goes_on_past_the_window_and_is_reproducible():
    model = make().for_inference()
    sampling = Sampling(temperature=1.5, top_k=0, top_p=1.0, seed=7)
    first = list(generate(model, [3], 50, end=-1, sampling=sampling))
    assert len(first) == 50
    assert first == list(generate(model, [3], 50, end=-1, sampling=sampling))
    assert first != list(generate(model, [3], 50, end=-1, sampling=Sampling(1.5, 0, 1.0, 8)))


def test_sampling_keeps_to_the_likeliest_tokens():
    model = make().for_inference()
    likeliest = list(generate(model, [5], 6, end=-1, sampling=Sampling(temperature=0)))
    for sampling in (
        Sampling(1.0, top_k=1),
        Sampling(1.0, top_k=0, top_p=1e-6),
        Sampling(1.0, top_k=0, top_p=0.0),
        Sampling(1e-300),
    ):
        assert list(generate(model, [5], 6, end=-1, sampling=sampling)) == likeliest


def test_a_model_in_bf16_keeps_fp32_weights_and_gradients():
    model = make(dtype=torch.bfloat16)
    ids = torch.randint(0, 64, (1, 16), generator=generator(1))
    model(ids, ids, None, 1.0).backward()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
