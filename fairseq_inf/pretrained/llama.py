"""Llama, and what has its layers: SmolLM2, TinyLlama, …"""

from collections.abc import Iterator

from fairseq_inf.errors import Failure

from .layout import Config, Field, Layout, Part, positive, rate


def parts(config: Config) -> Iterator[Part]:
    e, inner, heads = (
        config[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads")
    )
    keys = config["num_key_value_heads"] * (e // heads)
    yield Part({"norm.weight": e}, {"norm.weight": e})
    for i in range(config["num_hidden_layers"]):
        at = f"layers.{i}."

        def same(theirs: str, ours: str, rows: int, columns: int | None, at: str = at) -> Part:
            return Part({f"{at}{theirs}.weight": rows}, {f"{at}{ours}.weight": rows}, columns)

        both = {f"{at}self_attn.{name}_proj.weight": keys for name in "kv"}
        yield same("input_layernorm", "attention_norm", e, None)
        yield same("self_attn.q_proj", "attention.query", e, e)
        yield Part(both, {f"{at}attention.key_value.weight": 2 * keys}, e)
        yield same("self_attn.o_proj", "attention.output", e, e)
        yield same("post_attention_layernorm", "ffn_norm", e, None)
        yield same("mlp.gate_proj", "gate", inner, e)
        yield same("mlp.up_proj", "inner", inner, e)
        yield same("mlp.down_proj", "outer", e, inner)


def tidy(config: Config) -> Config:
    """Other spellings of the same, by transformers 5 and by Llama 3."""
    config = {**config}
    rope = config.get("rope_parameters")
    if isinstance(rope, dict):
        config.setdefault("rope_theta", rope.get("rope_theta"))
        config["rope_scaling"] = rope
    scaling = config.get("rope_scaling")
    if isinstance(scaling, dict) and scaling.get("rope_type", scaling.get("type")) == "default":
        config["rope_scaling"] = None
    if isinstance(config.get("eos_token_id"), list) and config["eos_token_id"]:
        config["eos_token_id"] = config["eos_token_id"][0]
    width, heads, e = map(config.get, ("head_dim", "num_attention_heads", "hidden_size"))
    if width and heads and e and width * heads != e:
        raise Failure(
            f"heads of {width} are not hidden_size {e} / num_attention_heads {heads}: such a model "
            "cannot be imported"
        )
    return config


LLAMA = Layout(
    name="llama",
    title="Llama",
    model="LlamaForCausalLM",
    prefix="model.",
    embedding="embed_tokens.weight",
    fields=(
        Field("num_hidden_layers", "decoder_layers"),
        Field("hidden_size", "decoder_embed_dim"),
        Field("num_attention_heads", "decoder_attention_heads"),
        Field(
            "num_key_value_heads",
            "decoder_key_heads",
            lambda config: config["num_attention_heads"],
        ),
        Field("intermediate_size", "decoder_ffn_embed_dim"),
        Field("max_position_embeddings", "decoder_positions", 2048),
        positive("rope_theta", "rope_theta", 10000.0),
        positive("rms_norm_eps", "norm_eps", 1e-6),
        rate("attention_dropout", "attention_dropout", 0.0),
    ),
    fixed={
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rope_scaling": None,
    },
    parts=parts,
    tidy=tidy,
    ignored=r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
    encoding=("tokenizers", {"tokenizer.json": "tokenizer.json"}),
    tied=False,
    end=2,
)
