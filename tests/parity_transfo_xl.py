"""transformer_xl_lm against Hugging Face's TransfoXL, with the same weights.

The last release with that model is old, so it goes into an environment of its own, beside torch
and fairseq:

    pip install transformers==4.35.2
    python tests/parity_transfo_xl.py

Random weights of several shapes, a stream in segments of odd lengths, batch and memory length
as given; prints the largest differences and fails above 1e-5.
"""

from types import SimpleNamespace

import torch
from fairseq.data import Dictionary
from transformers import TransfoXLConfig, TransfoXLLMHeadModel

from fairseq_inf.models.transformer_xl import TransformerXLLM

WORDS = 100
SHAPES = [  # layers, width, heads, inner width, memory, segments
    (1, 16, 2, 32, 5, [3, 7, 1, 4]),
    (4, 64, 4, 128, 32, [32] * 5),
    (3, 40, 5, 70, 17, [9, 23, 1, 17, 40]),
    (2, 32, 2, 64, 0, [8, 8]),
]


def theirs(layers, width, heads, inner, memory):
    config = TransfoXLConfig(
        vocab_size=WORDS, cutoffs=[], d_model=width, d_embed=width, n_head=heads,
        d_head=width // heads, d_inner=inner, div_val=1, n_layer=layers, mem_len=memory,
        clamp_len=-1, untie_r=True, same_length=False, dropout=0.0, dropatt=0.0,
    )  # fmt: skip
    model = TransfoXLLMHeadModel(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    torch.nn.init.zeros_(model.crit.out_layers[0].bias)  # ours has none
    return model


def ours(model, layers, width, heads, inner, memory):
    dictionary = Dictionary()
    for i in range(WORDS - len(dictionary)):
        dictionary.add_symbol(str(i))
    cfg = TransformerXLLM.config(
        decoder_layers=layers, decoder_embed_dim=width, decoder_attention_heads=heads,
        decoder_ffn_embed_dim=inner, decoder_post_norm=True, activation_fn="relu", dropout=0.0,
        stm_length=memory,
    )  # fmt: skip
    cfg.seed = 1
    copy = TransformerXLLM.build_model(cfg, SimpleNamespace(source_dictionary=dictionary)).eval()
    weights = {"decoder.embed_tokens.weight": model.transformer.word_emb.emb_layers[0].weight}
    weights["decoder.output_projection.weight"] = model.crit.out_layers[0].weight
    for i, layer in enumerate(model.transformer.layers):
        attention, net = layer.dec_attn, layer.pos_ff
        query, key_value = attention.qkv_net.weight.split([width, 2 * width])
        for name, value in {
            "attention.query.weight": query,
            "attention.key_value.weight": key_value,
            "attention.position.weight": attention.r_net.weight,
            "attention.output.weight": attention.o_net.weight,
            "attention.content_bias": attention.r_w_bias,
            "attention.position_bias": attention.r_r_bias,
            "attention_norm.weight": attention.layer_norm.weight,
            "attention_norm.bias": attention.layer_norm.bias,
            "inner.weight": net.CoreNet[0].weight,
            "inner.bias": net.CoreNet[0].bias,
            "outer.weight": net.CoreNet[3].weight,
            "outer.bias": net.CoreNet[3].bias,
            "ffn_norm.weight": net.layer_norm.weight,
            "ffn_norm.bias": net.layer_norm.bias,
        }.items():
            weights[f"decoder.layers.{i}.{name}"] = value
    copy.load_state_dict(weights)
    return copy.decoder


@torch.no_grad()
def main():
    worst = 0
    for *shape, segments in SHAPES:
        torch.manual_seed(0)
        model = theirs(*shape)
        decoder, memory = ours(model, *shape), shape[-1]
        # left to itself, theirs would begin by looking at zeros
        state, mems = decoder.initial_state(3), [torch.empty(0, 3, shape[1])] * shape[0]
        logits = memories = 0
        for size in segments:
            tokens = torch.randint(4, WORDS, (3, size))
            expected = model(tokens, mems=mems)
            mems = expected.mems
            x, state, _ = decoder(tokens, state)
            difference = (x.log_softmax(-1) - expected.prediction_scores).abs().max()
            logits = max(logits, difference.item())
            if not memory:
                continue
            for layer, other in zip(state.layers, mems, strict=True):
                own = layer.window.vectors[:, -len(other) :].transpose(0, 1)
                memories = max(memories, (own - other).abs().max().item())
        print(
            f"{shape} segments {segments}: log-probabilities {logits:.1e}, memories {memories:.1e}"
        )
        worst = max(worst, logits, memories)
    assert worst < 1e-5, f"differs by {worst}"


if __name__ == "__main__":
    main()
