"""GPT-2."""

from collections.abc import Iterator

from .layout import Config, Field, Layout, Part, rate


def linear(theirs: str, ours: dict[str, int], columns: int) -> Iterator[Part]:
    rows = sum(ours.values())
    for end, width in (("weight", columns), ("bias", None)):
        named = {f"{name}.{end}": count for name, count in ours.items()}
        yield Part({f"{theirs}.{end}": rows}, named, width, transposed=end == "weight")


def norm(theirs: str, ours: str, rows: int) -> Iterator[Part]:
    for end in ("weight", "bias"):
        yield Part({f"{theirs}.{end}": rows}, {f"{ours}.{end}": rows})


def parts(config: Config) -> Iterator[Part]:
    e, inner, positions = config["n_embd"], config["n_inner"], config["n_positions"]
    yield Part({"wpe.weight": positions}, {"embed_positions.weight": positions}, e)
    yield from norm("ln_f", "norm", e)
    for i in range(config["n_layer"]):
        their, our = f"h.{i}.", f"layers.{i}."
        both = {f"{our}attention.query": e, f"{our}attention.key_value": 2 * e}
        yield from norm(f"{their}ln_1", f"{our}attention_norm", e)
        yield from linear(f"{their}attn.c_attn", both, e)
        yield from linear(f"{their}attn.c_proj", {f"{our}attention.output": e}, e)
        yield from norm(f"{their}ln_2", f"{our}ffn_norm", e)
        yield from linear(f"{their}mlp.c_fc", {f"{our}inner": inner}, e)
        yield from linear(f"{their}mlp.c_proj", {f"{our}outer": e}, inner)


GPT2 = Layout(
    name="gpt2",
    title="GPT-2",
    model="GPT2LMHeadModel",
    prefix="transformer.",
    embedding="wte.weight",
    fields=(
        Field("n_layer", "decoder_layers"),
        Field("n_embd", "decoder_embed_dim"),
        Field("n_head", "decoder_attention_heads"),
        Field("n_inner", "decoder_ffn_embed_dim", lambda config: 4 * config["n_embd"]),
        Field("n_positions", "decoder_positions", 1024),
        rate("embd_pdrop", "dropout", 0.1),  # of the two, the next one counts
        rate("resid_pdrop", "dropout", 0.1),
        rate("attn_pdrop", "attention_dropout", 0.1),
    ),
    fixed={
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
        "tie_word_embeddings": True,
    },
    parts=parts,
    ignored=r"h\.\d+\.attn\.(masked_)?bias",
    encoding=("gpt2", {"vocab.json": "encoder.json", "merges.txt": "vocab.bpe"}),
    tied=True,
    end=50256,
)
