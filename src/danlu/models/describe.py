"""A model in numbers, without making it: what each layer costs per token. No torch."""

from functools import partial

from danlu.base.facts import LayerCost, ModelShape

__all__ = ["describe", "flops_per_token"]


def describe(shape: ModelShape) -> tuple[LayerCost, ...]:
    """The costs of the embedding, every block, and the head with its loss, in order.

    FLOP count 2 for each weight of a matrix product and, for causal attention, two products over
    half of T x T. Saved elements are what the native operations keep for backward; traffic is what
    they read and write besides matrix products; cheap are the outputs of norms and SwiGLU.
    """
    d, f, length = shape.hidden_size, shape.intermediate_size, shape.sequence_length
    query = shape.heads * shape.head_size
    qkv = query + 2 * shape.kv_heads * shape.head_size
    weights = d * qkv + query * d + 3 * d * f
    block = partial(
        LayerCost,
        parameters=shape.layer_parameters,
        forward_flops=2.0 * weights,
        attention_flops=2.0 * length * query,
        saved_elements=4.0 * d + qkv + query + 3.0 * f,
        traffic_elements=24.0 * d + 8.0 * qkv + 6.0 * query + 12.0 * f,
        split_saved=qkv + query + 3.0 * f,
        split_traffic=8.0 * qkv + 6.0 * query + 12.0 * f,
        cheap_elements=2.0 * d + f,
        split_cheap=1.0 * f,
    )
    head = shape.vocab_size * d
    return (
        LayerCost("embed_tokens", head, 0.0, 0.0, 1.0 * d, 6.0 * d),
        *(block(f"layers.{i}") for i in range(shape.layers)),
        LayerCost(
            "lm_head",
            d if shape.tied_embeddings else head + d,
            2.0 * head,
            0.0,
            3.0 * d,
            12.0 * d + 4.0 * shape.vocab_size,
            split_traffic=4.0 * shape.vocab_size,
            tied_parameters=head if shape.tied_embeddings else 0,
        ),
    )


def flops_per_token(shape: ModelShape) -> float:
    """FLOP of training on one token: forward, and backward at twice that; nothing recomputed."""
    return 3.0 * sum(c.forward_flops + c.attention_flops for c in describe(shape))
